"""Specs of the text encoders: the longest text, where weights come from, and the function that builds each."""

from __future__ import annotations

from frameloom.models.spec import TextEncoderSpec

# Of CLIP's position table, and how many of them a long text may fill.
CLIP_WINDOW, MAX_WINDOWS = 77, 8
_LONGEST_CLIP = (CLIP_WINDOW - 2) * MAX_WINDOWS + 2

# As long as its position table.
MINILM = TextEncoderSpec(name="minilm", max_length=512, packaged=True, build="frameloom.models.text.minilm:build")
T5 = TextEncoderSpec(name="t5", max_length=512, build="frameloom.models.text.t5:build")
MT5 = TextEncoderSpec(name="mt5", max_length=1024, build="frameloom.models.text.t5:build")
CLIP_L = TextEncoderSpec(
    name="clip_l", max_length=_LONGEST_CLIP, window=CLIP_WINDOW, build="frameloom.models.text.clip:build"
)
CLIP_BIGG = TextEncoderSpec(
    name="clip_bigg", max_length=_LONGEST_CLIP, window=CLIP_WINDOW, build="frameloom.models.text.clip:build"
)
