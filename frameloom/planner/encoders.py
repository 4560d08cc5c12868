"""Cost of the frozen encoders in a step without cached latents or text: sizes, operations, time, bytes.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens.

They run before the denoiser and without gradients, one after the other, so their peak and its activations never live
at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from frameloom.config.schema.models import TextEncoderSection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.text_files import read_object
from frameloom.models.precision import DTYPES
from frameloom.models.text import clip, minilm, t5
from frameloom.models.vaes.base import EncodePolicy, Moments, VideoVAE
from frameloom.planner.costs import Shape, Values, count_cells
from frameloom.planner.devices import Device
from frameloom.planner.shape_tensors import ShapeMode, put_weights, tally_passes

# Of so many lengths, counted from the shortest, all are measured; later on, fewer and fewer.
_FIRST_LENGTHS = 3
_GAP_GROWTH = 1.5
_COLOURS = 3


@dataclass(frozen=True)
class EncodePlan:
    """A micro-batch of a bucket on one device."""

    flops: float = 0.0
    seconds: float = 0.0
    peak_bytes: float = 0.0

    def followed_by(self, other: EncodePlan) -> EncodePlan:
        """One after the other."""
        return EncodePlan(
            self.flops + other.flops, self.seconds + other.seconds, max(self.peak_bytes, other.peak_bytes)
        )


@dataclass(frozen=True)
class PixelEncoder:
    """An autoencoder's half that encodes: `clips` has operations, peak and bytes moved of one clip.

    At most `most` clips are encoded at once; null: all of a batch. A clip of a batch is encoded `times` times: models
    that are given known frames or a control clip encode those too.
    """

    clips: Mapping[Shape, Values]
    latent_channels: int
    number_bytes: int
    most: int | None
    times: int

    def plan(self, batch: int, shape: Shape, num_cells: int, device: Device) -> EncodePlan:
        """`shape` in pixels, which become `num_cells` latent cells."""
        flops, peak, moved = self.clips[shape]
        runs = self.times * batch
        # Of a clip, while others are encoded: its pixels in fp32, rounded ones too, and its moments.
        rounded = self.number_bytes if self.number_bytes < 4 else 0
        waiting = _COLOURS * count_cells(shape) * (4 + rounded) + 2 * self.latent_channels * num_cells * 4
        return EncodePlan(
            flops=runs * flops,
            seconds=device.seconds(runs * flops, runs * moved, bf16=self.number_bytes < 4),
            peak_bytes=min(batch, self.most or batch) * peak + batch * waiting,
        )


def measure_encoder(
    vae: VideoVAE,
    shapes: Iterable[Shape],
    *,
    policy: EncodePolicy | None = None,
    times: int = 1,
) -> PixelEncoder:
    """`shapes` are those of clips in pixels. `vae` is on the meta device, and runs under `policy` afterwards."""
    vae = vae.use(policy or EncodePolicy()).eval().requires_grad_(False)
    (outer, cuts), dtype = vae.cuts(decoding=False), vae.policy.precision.weights_dtype
    mode = ShapeMode()
    with mode:
        put_weights(vae)
    cut = {shape: cuts.list_pieces(shape) for shape in set(shapes)}

    def measure(shape: Shape) -> Values:
        with mode, torch.no_grad():
            pixels_BCFHW = torch.empty(1, _COLOURS, *shape, dtype=dtype)
            with tally_passes(vae, mode) as tally:
                Moments.from_raw(vae.encode_piece(pixels_BCFHW))
            return tally.flops, tally.peak, tally.samples_moved

    pieces = _measure_pieces({piece for parts in cut.values() for piece in parts}, measure)
    clips = {}
    for shape, parts in cut.items():
        flops, peaks, moved = zip(*(pieces[piece] for piece in parts), strict=True)
        clips[shape] = (sum(flops), max(peaks), sum(moved))
    return PixelEncoder(clips, vae.latent_channels, dtype.itemsize, cuts.clips or outer.clips, times)


def _measure_pieces(seen: Iterable[Shape], measure: Callable[[Shape], Values]) -> dict[Shape, Values]:
    """The smallest and the largest picture of some lengths are measured, the others follow.

    The cost of a pixel grows in a straight line with the picture (attention), and between neighbouring lengths. It is
    no polynomial in the length: models that run a clip in chunks need no more memory for a second one.
    """
    by_length: dict[int, list[Shape]] = {}
    for shape in sorted(seen, key=lambda shape: (count_cells(shape), shape)):
        by_length.setdefault(shape[0], []).append(shape)
    lengths = sorted(by_length)
    picks = list(range(min(_FIRST_LENGTHS, len(lengths))))
    while picks[-1] < len(lengths) - 1:
        picks.append(min(len(lengths) - 1, int(_GAP_GROWTH * picks[-1])))
    chosen = [lengths[pick] for pick in picks]
    known = {
        length: {shape: measure(shape) for shape in {by_length[length][0], by_length[length][-1]}} for length in chosen
    }

    found: dict[Shape, Values] = {}
    for length, shapes in by_length.items():
        for shape in shapes:
            sized = [_scale_picture(known[one], shape[1] * shape[2]) for one in chosen]
            fitted = tuple(float(np.interp(length, chosen, values)) for values in zip(*sized, strict=True))
            found[shape] = known.get(length, {}).get(shape, fitted)
    return found


def _scale_picture(known: Mapping[Shape, Values], area: int) -> Values:
    """The values of a picture of so many pixels, from those of one or two other sizes of the same length."""
    (small, first), *rest = sorted((one[1] * one[2], values) for one, values in known.items())
    large, last = rest[0] if rest else (small, first)
    share = (area - small) / (large - small) if large > small else 0.0
    return tuple(area * (a / small + share * (b / large - a / small)) for a, b in zip(first, last, strict=True))


def plan_captions(costs: Sequence[CaptionCost], captions: int, device: Device, *, visiting: bool = False) -> EncodePlan:
    """`visiting`: the weights of each encoder are on the device only while it runs."""
    return EncodePlan(
        flops=captions * sum(cost.flops for cost in costs),
        seconds=sum(
            device.seconds(captions * cost.flops, captions * cost.moved_bytes, bf16=cost.is_half) for cost in costs
        ),
        peak_bytes=max((cost.peak(captions) + visiting * cost.weight_bytes for cost in costs), default=0.0),
    )


_DEFAULTS = {**t5.DEFAULTS, **clip.DEFAULTS}
# Captions of a forward pass.
_MOST_CAPTIONS = {
    **dict.fromkeys(t5.DEFAULTS, t5.T5Encoder.batch_size),
    **dict.fromkeys(clip.DEFAULTS, clip.CLIPEncoder.batch_size),
    "minilm": minilm.MiniLM.batch_size,
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
    config = read_object(file, error=CheckpointError, fix="copy it again")

    def read(default: int, *names: str) -> int:
        return int(next((config[name] for name in names if config.get(name)), default))

    # T5 has its own names.
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
    return float(sum(encoder_size(item).weights * DTYPES[precision_of(item)].itemsize for item in sections))


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
    size, precision, own = encoder_size(section), precision_of(section), _DEFAULTS.get(section.name)
    number_bytes, tokens = DTYPES[precision].itemsize, section.max_length
    # A caption is cut into `count` texts of `length` tokens.
    count, length = 1, tokens
    if size.window is not None and tokens > size.window:
        count, length = -(-(tokens - 2) // (size.window - 2)), size.window
    matrices = 3 if size.gated else 2
    products = 2 * size.multiplied * length + 4 * size.depth * length**2 * size.attention
    # Norms, sums and activations: a dozen readings and writings of the states in a layer.
    moved = length * size.depth * (12 * size.width + 3 * matrices * size.hidden)
    # Without gradients: the states, and the widest of what a layer makes of them.
    peak = length * (3 * size.width + max(4 * size.attention, matrices * size.hidden))
    if size.adds_positions and (section.padding or (own.padding if own else "mask")) == "mask":
        # The mask is added to the table of positions, which then differs between captions.
        peak += size.heads * length**2
    return CaptionCost(
        flops=float(count * (products + 2 * size.pooler)),
        moved_bytes=float(count * moved * number_bytes),
        peak_bytes=float(count * number_bytes * peak),
        fixed_bytes=float(size.heads * tokens**2 * number_bytes) if size.adds_positions else 0.0,
        most=_MOST_CAPTIONS[section.name],
        is_half=precision != "fp32",
        weight_bytes=weight_bytes([section]),
    )
