"""What the frozen encoders cost in a step that has no cached latents or text: operations, time, and bytes that live.

They run before the denoiser and without gradients, one after the other, so their peak and its activations never live
at the same time.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from frameloom.models.layers.tiles import Cuts
from frameloom.models.precision import widen_norms
from frameloom.models.vaes.base import VideoVAE
from frameloom.planner.costs import Fitted, Shape, Values, count_cells, put_weights
from frameloom.planner.devices import Device
from frameloom.planner.shape_tensors import GhostMode
from frameloom.planner.text import CaptionCost
from frameloom.planner.tracker import tally_passes

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


@dataclass(frozen=True)
class PixelEncoder:
    """An autoencoder's half that encodes: `clips` has operations, peak and bytes moved of one clip.

    At most `most` clips are encoded at once; null: all of a batch. A clip of a batch is encoded `times` times: models
    that are given known frames or a control clip encode those too.
    """

    clips: Mapping[Shape, Fitted]
    latent_channels: int
    number_bytes: int
    most: int | None
    times: int

    def plan(self, batch: int, shape: Shape, num_cells: int, device: Device) -> EncodePlan:
        """`shape` in pixels, which become `num_cells` latent cells."""
        flops, peak, moved = self.clips[shape].values
        runs = self.times * batch
        return EncodePlan(
            flops=runs * flops,
            seconds=device.seconds(runs * flops, runs * moved, bf16=self.number_bytes < 4),
            peak_bytes=min(batch, self.most or batch) * peak + batch * self._waiting_bytes(shape, num_cells),
        )

    def _waiting_bytes(self, shape: Shape, num_cells: int) -> float:
        """Of a clip, while others are encoded: its pixels in fp32, rounded ones too, and its moments."""
        rounded = self.number_bytes if self.number_bytes < 4 else 0
        return float(_COLOURS * count_cells(shape) * (4 + rounded) + 2 * self.latent_channels * num_cells * 4)


def measure_encoder(
    vae: VideoVAE,
    shapes: Iterable[Shape],
    *,
    dtype: torch.dtype = torch.float32,
    fp32_norms: bool = False,
    mini_batch: int | None = None,
    times: int = 1,
) -> PixelEncoder:
    """`shapes` are those of clips in pixels. `vae` is on the meta device, and is changed."""
    cuts, vae = vae.encode_cuts(), vae.to(dtype).eval().requires_grad_(False)
    if fp32_norms:
        widen_norms(vae, dtype)
    vae.encode_cuts = Cuts  # type: ignore[method-assign]  # pieces are measured one by one
    mode = GhostMode()
    with mode:
        put_weights(vae)
    cut = {shape: cuts.list_pieces(shape) for shape in set(shapes)}
    pieces = _measure_pieces({piece for parts in cut.values() for piece in parts}, partial(_measure, vae, mode, dtype))
    clips = {shape: _join_pieces([pieces[piece] for piece in parts]) for shape, parts in cut.items()}
    most = 1 if cuts.one_by_one else mini_batch
    return PixelEncoder(clips, vae.latent_channels, dtype.itemsize, most, times)


def _join_pieces(pieces: Sequence[Fitted]) -> Fitted:
    """One after the other: they add up, but for their peaks."""
    flops, peaks, moved = zip(*(piece.values for piece in pieces), strict=True)
    return Fitted((sum(flops), max(peaks), sum(moved)), all(piece.is_measured for piece in pieces))


def _measure_pieces(seen: Iterable[Shape], measure: Callable[[Shape], Values]) -> dict[Shape, Fitted]:
    """The smallest and the largest picture of some lengths are measured, the others follow.

    The cost of a pixel grows in a straight line with the picture (attention), and between neighbouring lengths. It is
    no polynomial in the length: models that run a clip in chunks need no more memory for a second one.
    """
    by_length: dict[int, list[Shape]] = {}
    for shape in sorted(seen, key=lambda shape: (count_cells(shape), shape)):
        by_length.setdefault(shape[0], []).append(shape)
    chosen = _choose_lengths(sorted(by_length))
    known = {
        length: {shape: measure(shape) for shape in {by_length[length][0], by_length[length][-1]}} for length in chosen
    }

    def follow(shape: Shape) -> Fitted:
        if shape in known.get(shape[0], {}):
            return Fitted(known[shape[0]][shape], True)
        sized = [_size_up(known[length], shape) for length in chosen]
        return Fitted(tuple(float(np.interp(shape[0], chosen, values)) for values in zip(*sized, strict=True)), False)

    return {shape: follow(shape) for shapes in by_length.values() for shape in shapes}


def _choose_lengths(lengths: Sequence[int]) -> list[int]:
    places = list(range(min(_FIRST_LENGTHS, len(lengths))))
    while places[-1] < len(lengths) - 1:
        places.append(min(len(lengths) - 1, int(_GAP_GROWTH * places[-1])))
    return [lengths[place] for place in places]


def _size_up(known: Mapping[Shape, Values], shape: Shape) -> Values:
    """The values of a picture of this size, from those of one or two other sizes and another length."""
    area = shape[1] * shape[2]
    (small, first), *rest = sorted((one[1] * one[2], values) for one, values in known.items())
    large, last = rest[0] if rest else (small, first)
    place = (area - small) / (large - small) if large > small else 0.0
    return tuple(area * (a / small + place * (b / large - a / small)) for a, b in zip(first, last, strict=True))


def _measure(vae: VideoVAE, mode: GhostMode, dtype: torch.dtype, shape: Shape) -> tuple[float, float, float]:
    with mode, torch.no_grad():
        pixels_BCFHW = torch.empty(1, _COLOURS, *shape, dtype=dtype)
        with tally_passes(vae, mode) as tally:
            vae.encode(pixels_BCFHW)
        return tally.flops, tally.peak, tally.samples_moved


def plan_captions(costs: Sequence[CaptionCost], captions: int, device: Device, *, visiting: bool = False) -> EncodePlan:
    """`visiting`: the weights of each encoder are on the device only while it runs."""
    return EncodePlan(
        flops=captions * sum(cost.flops for cost in costs),
        seconds=sum(
            device.seconds(captions * cost.flops, captions * cost.moved_bytes, bf16=cost.is_half) for cost in costs
        ),
        peak_bytes=max((cost.peak(captions) + visiting * cost.weight_bytes for cost in costs), default=0.0),
    )


def join_plans(*plans: EncodePlan) -> EncodePlan:
    """One after the other."""
    return EncodePlan(
        flops=sum(plan.flops for plan in plans),
        seconds=sum(plan.seconds for plan in plans),
        peak_bytes=max((plan.peak_bytes for plan in plans), default=0.0),
    )
