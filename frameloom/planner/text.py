"""Sizes of the text encoders, and what they cost in a step: from their published sizes, because to build them is slow.

Shape letters: K text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frameloom.config.schema.recipe import TextEncoderSection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.text_files import read_object
from frameloom.models.text import clip, minilm, t5

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_DEFAULTS = {**t5.DEFAULTS, **clip.DEFAULTS}
# Captions of a forward pass.
_MOST_CAPTIONS = {
    **dict.fromkeys(t5.DEFAULTS, t5.T5Encoder.batch_size),
    **dict.fromkeys(clip.DEFAULTS, clip.CLIPEncoder.batch_size),
    "minilm": minilm.BATCH,
}


@dataclass(frozen=True)
class EncoderSize:
    """A transformer over captions.

    `attention` is the width of all heads together and `hidden` that of the feed-forward layers, which have three
    matrices if they are `gated` and else two. `rows` are the vectors of its tables, which are looked up and multiply
    nothing; `pooler` has the weights of a layer that sees one token. `window` is the longest text that it sees at once.
    """

    width: int
    pooled_width: int
    depth: int
    heads: int
    attention: int
    hidden: int
    gated: bool
    rows: int
    pooler: int = 0
    window: int | None = None
    adds_positions: bool = False
    """to the scores of every head, so that tables of K^2 numbers live"""

    @property
    def multiplied(self) -> int:
        """Weights that every token is multiplied with."""
        return self.depth * self.width * (4 * self.attention + (3 if self.gated else 2) * self.hidden)

    @property
    def weights(self) -> int:
        return self.multiplied + self.rows * self.width + self.pooler

    def flops(self, num_tokens: int) -> float:
        """Of one caption."""
        count, length = self._windows(num_tokens)
        products = 2 * self.multiplied * length + 4 * self.depth * length**2 * self.attention
        return float(count * (products + 2 * self.pooler))

    def moved_bytes(self, num_tokens: int, number_bytes: int) -> float:
        """Of one caption: norms, sums and activations, a dozen readings and writings of the states in a layer."""
        count, length = self._windows(num_tokens)
        inner = 3 * (3 if self.gated else 2) * self.hidden
        return float(count * length * self.depth * (12 * self.width + inner) * number_bytes)

    def peak_bytes(self, num_tokens: int, number_bytes: int, *, masked: bool) -> float:
        """Of one caption, without gradients: the states, and the widest of what a layer makes of them."""
        count, length = self._windows(num_tokens)
        inner = max(4 * self.attention, (3 if self.gated else 2) * self.hidden)
        # A mask is added to the table of positions, which then differs between captions.
        tables = self.heads * length**2 if self.adds_positions and masked else 0
        return float(count * number_bytes * (length * (3 * self.width + inner) + tables))

    def table_bytes(self, num_tokens: int, number_bytes: int) -> float:
        """Once for all captions."""
        return float(self.heads * num_tokens**2 * number_bytes) if self.adds_positions else 0.0

    def _windows(self, num_tokens: int) -> tuple[int, int]:
        """How many texts a caption is cut into, and how many tokens each has."""
        if self.window is None or num_tokens <= self.window:
            return 1, num_tokens
        return -(-(num_tokens - 2) // (self.window - 2)), self.window


_T5 = EncoderSize(4096, 0, 24, 64, 4096, 10240, gated=True, rows=32128, adds_positions=True)
_ENCODERS = {
    "minilm": EncoderSize(384, 384, 6, 12, 384, 1536, gated=False, rows=30522 + 512 + 2),
    "t5": _T5,
    "mt5": replace(_T5, rows=250112),
    "clip_l": EncoderSize(768, 768, 12, 12, 768, 3072, gated=False, rows=49408 + 77, window=77),
    "clip_bigg": EncoderSize(1280, 1280, 32, 20, 1280, 5120, gated=False, rows=49408 + 77, pooler=1280**2, window=77),
}


def encoder_size(section: TextEncoderSection) -> EncoderSize:
    """Of the folder that a recipe names if it is there, else of the published encoder."""
    known = _ENCODERS.get(section.name)
    if known is None:
        raise ConfigError(f"text.encoders: the planner does not know the size of '{section.name}'")
    file = Path(section.path or "") / "config.json"
    if section.path is None or not file.is_file():
        return known
    return read_size(known, read_object(file, error=CheckpointError, fix="copy it again"))


def read_size(known: EncoderSize, config: Mapping[str, Any]) -> EncoderSize:
    """`known` with the sizes of a folder's config.json, which T5 names in its own way."""

    def read(default: int, *names: str) -> int:
        return int(next((config[name] for name in names if config.get(name)), default))

    width = read(known.width, "d_model", "hidden_size")
    heads = read(known.heads, "num_heads", "num_attention_heads")
    words = read(0, "vocab_size")
    others = read(0, "max_position_embeddings") + read(0, "type_vocab_size")
    return replace(
        known,
        width=width,
        pooled_width=width if known.pooled_width else 0,
        depth=read(known.depth, "num_layers", "num_hidden_layers"),
        heads=heads,
        attention=heads * read(width // heads, "d_kv"),
        hidden=read(known.hidden, "d_ff", "intermediate_size"),
        rows=words + others if words else known.rows,
        pooler=width**2 if known.pooler else 0,
        window=read(known.window, "max_position_embeddings") if known.window else None,
    )


def precision_of(section: TextEncoderSection) -> str:
    """Its own where a recipe names none."""
    own = _DEFAULTS.get(section.name)
    return section.precision or (own.precision if own else "fp32")


def weight_bytes(sections: Sequence[TextEncoderSection]) -> float:
    return float(sum(encoder_size(item).weights * NUMBER_BYTES[precision_of(item)] for item in sections))


@dataclass(frozen=True)
class CaptionCost:
    """One encoder on one caption; it takes `most` captions at a time. `weight_bytes` are those of the encoder."""

    flops: float
    moved_bytes: float
    peak_bytes: float
    fixed_bytes: float
    most: int
    is_half: bool
    weight_bytes: float

    def peak(self, captions: int) -> float:
        return self.fixed_bytes + min(captions, self.most) * self.peak_bytes


def caption_cost(section: TextEncoderSection) -> CaptionCost:
    size, precision = encoder_size(section), precision_of(section)
    number_bytes, tokens = NUMBER_BYTES[precision], section.max_length
    own = _DEFAULTS.get(section.name)
    masked = (section.padding or (own.padding if own else "mask")) == "mask"
    return CaptionCost(
        flops=size.flops(tokens),
        moved_bytes=size.moved_bytes(tokens, number_bytes),
        peak_bytes=size.peak_bytes(tokens, number_bytes, masked=masked),
        fixed_bytes=size.table_bytes(tokens, number_bytes),
        most=_MOST_CAPTIONS[section.name],
        is_half=precision != "fp32",
        weight_bytes=weight_bytes([section]),
    )
