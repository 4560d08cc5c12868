"""Text states of a small training set in one table on the device, instead of a cache lookup for each batch.

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frameloom.models.text.base import TextStates
from frameloom.models.text.scaling import TextScaling
from frameloom.training.caching import list_captions
from frameloom.training.feed import Feed

MOST_BYTES = 64 * 2**20
_CHUNK = 256
_EMPTY = ""  # every cache has its states


@dataclass(frozen=True)
class TextTable:
    """`states` of the captions in `rows`, as the denoiser sees them; the last are those of the empty caption."""

    rows: Mapping[str, int]
    states: TextStates

    def pick(self, captions: Sequence[str], dropped_B: Tensor | None) -> TextStates | None:
        """The states of these captions, empty where they are dropped; None if one is not known."""
        rows = [self.rows.get(caption, -1) for caption in captions]
        if not rows or min(rows) < 0:
            return None
        index_B = torch.tensor(rows)
        if dropped_B is not None:
            index_B[dropped_B] = len(self.states.tokens_BKD) - 1
        index_B = index_B.to(self.states.tokens_BKD.device)
        return TextStates(*(part.index_select(0, index_B) for part in vars(self.states).values()))


def preload_text(feed: Feed, null: TextStates, scaling: TextScaling | None) -> TextTable | None:
    """All cached text of a run, on the device of `null`; None where there is too much of it, or no cache.

    With a table the run needs `feed.reader.without_text()`. Captions are scaled in sorted order and not batch by batch,
    so their numbers depend neither on the batch they come in nor on what was read before.
    """
    reader = feed.reader
    if reader.text is None or not reader.text.is_complete:
        return None
    size = sum(part.nbytes for part in reader.text.get([_EMPTY]).values())
    if feed.manifest.column("caption").n_unique() * size > MOST_BYTES:
        return None  # before millions of captions are sorted
    captions = sorted(set(list_captions(feed.manifest)))
    if len(captions) * size > MOST_BYTES:
        return None
    device = null.tokens_BKD.device
    parts = [
        TextStates(**reader.text.get(captions[start : start + _CHUNK])).to(device)
        for start in range(0, len(captions), _CHUNK)
    ]
    states = TextStates.concatenate([*parts, null])
    return TextTable(
        {caption: row for row, caption in enumerate(captions)}, states if scaling is None else scaling.apply(states)
    )
