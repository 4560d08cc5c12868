"""Layers of the WFVAE, run on whole clips or piece by piece; module names are those of the published weights.

Shape letters: B batch, C channels, F frames, H height, W width, N tokens.

Every layer takes (x_BCFHW, stream); the stream is None when the whole clip is there at once. Activations stay in
channels-last order: the norm over channels then needs no transposition, and frames fold into the batch for free.

A layer that looks back keeps its last inputs in a `FrameStream`; a layer that looks ahead (linear interpolation in
time) holds an output back until the next piece, and side branches wait for it. Nothing is computed twice and
nothing is cut off, so every clip length and every piece size is exact.

In memory a clip is (B, F, H, W, C). Joining through that view matters: given an expanded or sliced tensor, torch.cat
falls back to channels-first, and every layer after it then copies its input.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.attention.attention import attend
from frameloom.models.layers.patches import fold_frames, unfold_frames
from frameloom.models.vaes.wfvae.config import Interpolation, NormKind

NORM_EPS = 1e-6
NUM_GROUPS = 32


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of every position; images or clips."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = self.norm(x.movedim(1, -1))
        return normal.movedim(-1, 1)


def build_norm(kind: NormKind, channels: int) -> nn.Module:
    return ChannelNorm(channels) if kind == "layernorm" else nn.GroupNorm(NUM_GROUPS, channels, eps=NORM_EPS)


class FrameConv2d(nn.Conv2d):
    """A 3x3 convolution of every frame."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1)

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        return unfold_frames(super().forward(fold_frames(x_BCFHW)), x_BCFHW.shape[2])


class CausalConv3d(nn.Module):
    """A convolution that sees the current and earlier frames; before the first there are copies of it."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int = 3, *, stride: int = 1, padding: int | None = None
    ) -> None:
        super().__init__()
        space = kernel // 2 if padding is None else padding
        self.kernel = kernel
        self.stride = stride
        self.conv = nn.Conv3d(in_channels, out_channels, kernel, stride=stride, padding=(0, space, space))

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        if self.kernel == 1:
            return self._mix_channels(x_BCFHW)
        if stream is None and x_BCFHW.shape[2] == 1:
            return self._filter_image(x_BCFHW)
        result: Tensor = self.conv(prepend_past(x_BCFHW, self, stream, kernel=self.kernel, stride=self.stride))
        return result

    def _mix_channels(self, x_BCFHW: Tensor) -> Tensor:
        # On channels-last input this is one matrix product without any copy.
        return F.linear(x_BCFHW.movedim(1, -1), self.conv.weight.flatten(1), self.conv.bias).movedim(-1, 1)

    def _filter_image(self, x_BCFHW: Tensor) -> Tensor:
        # All frames under the kernel are copies of the only one, so its taps in time add up to a 2-D kernel.
        weight = self.conv.weight.sum(2)
        image = F.conv2d(fold_frames(x_BCFHW), weight, self.conv.bias, self.stride, self.conv.padding[1:])
        return unfold_frames(image, 1)


class ResBlock2D(nn.Module):
    """Residual block of every frame, channels unchanged."""

    def __init__(self, channels: int, norm: NormKind) -> None:
        super().__init__()
        self.norm1 = build_norm(norm, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = build_norm(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        x = fold_frames(x_BCFHW)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return unfold_frames(x + h, x_BCFHW.shape[2])


class ResBlock3D(nn.Module):
    """Residual block with causal convolutions."""

    def __init__(self, in_channels: int, out_channels: int, norm: NormKind) -> None:
        super().__init__()
        self.norm1 = build_norm(norm, in_channels)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = build_norm(norm, out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.nin_shortcut = CausalConv3d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        h: Tensor = self.conv1(F.silu(self.norm1(x_BCFHW)), stream)
        h = self.conv2(F.silu(self.norm2(h)), stream)
        shortcut = x_BCFHW if self.nin_shortcut is None else self.nin_shortcut(x_BCFHW)
        return shortcut + h


class FrameAttention(nn.Module):
    """Single-head attention among the positions of one frame."""

    def __init__(self, channels: int, norm: NormKind) -> None:
        super().__init__()
        self.norm = build_norm(norm, channels)
        self.q = CausalConv3d(channels, channels, 1)
        self.k = CausalConv3d(channels, channels, 1)
        self.v = CausalConv3d(channels, channels, 1)
        self.proj_out = CausalConv3d(channels, channels, 1)

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        h: Tensor = self.norm(x_BCFHW)
        query, key, value = (self._to_tokens(project(h)) for project in (self.q, self.k, self.v))
        mixed_BFNC = attend(query, key, value)
        mixed_BCFHW = mixed_BFNC.reshape(h.movedim(1, -1).shape).movedim(-1, 1)
        change_BCFHW: Tensor = self.proj_out(mixed_BCFHW)
        return x_BCFHW + change_BCFHW

    @staticmethod
    def _to_tokens(x_BCFHW: Tensor) -> Tensor:
        """[B, F, N, C]: frames take the place of heads, so they do not see each other."""
        return x_BCFHW.movedim(1, -1).flatten(2, 3)


class Downsample2D(nn.Module):
    """Half the height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        return unfold_frames(self.conv(F.pad(fold_frames(x_BCFHW), (0, 1, 0, 1))), x_BCFHW.shape[2])


class Downsample3D(nn.Module):
    """Half the frames, height and width: 2n + 1 frames become n + 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, stride=2, padding=0)

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        result: Tensor = self.conv(F.pad(x_BCFHW, (0, 1, 0, 1)), stream)
        return result


class Upsample2D(nn.Module):
    """Twice the height and width, by repetition."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        doubled = F.interpolate(fold_frames(x_BCFHW), scale_factor=2.0, mode="nearest")
        return unfold_frames(self.conv(doubled), x_BCFHW.shape[2])


class Upsample3D(nn.Module):
    """Twice the height and width, by linear interpolation, and twice the frames except for the first: 2n + 1."""

    def __init__(self, channels: int, time_interpolation: Interpolation) -> None:
        super().__init__()
        self.is_linear = time_interpolation == "trilinear"
        self.conv = CausalConv3d(channels, channels)

    def forward(self, x_BCFHW: Tensor, stream: FrameStream | None = None) -> Tensor:
        x_BCFHW = self._double_frames(x_BCFHW, stream)
        doubled = F.interpolate(fold_frames(x_BCFHW), scale_factor=2.0, mode="bilinear", align_corners=False)
        result: Tensor = self.conv(unfold_frames(doubled, x_BCFHW.shape[2]), stream)
        return result

    def _double_frames(self, x_BCFHW: Tensor, stream: FrameStream | None) -> Tensor:
        has_first = stream is None or stream.is_first
        has_last = stream is None or stream.is_last
        past = stream.recall(self) if stream is not None else None
        num_new = x_BCFHW.shape[2] - has_first
        if self.is_linear and stream is not None and not has_last and num_new:
            stream.keep(self, x_BCFHW[:, :, -1:])
        if past is not None:
            x_BCFHW = join_frames([past, x_BCFHW])
        rows = _doubling_rows(
            x_BCFHW.shape[2], linear=self.is_linear, first=has_first, last=has_last, past=past is not None
        )
        weights = torch.tensor(rows, dtype=x_BCFHW.dtype, device=x_BCFHW.device)
        frames_BFHWC = x_BCFHW.movedim(1, -1)
        doubled_BFN = torch.matmul(weights, frames_BFHWC.flatten(2))
        batch, _, *rest = frames_BFHWC.shape
        return doubled_BFN.reshape(batch, len(rows), *rest).movedim(-1, 1)


def _doubling_rows(num_frames: int, *, linear: bool, first: bool, last: bool, past: bool) -> list[list[float]]:
    """Output frames as weighted sums of input frames, one row each.

    The clip's first frame stands alone. The others are interpolated among themselves with half-pixel centres:
    between neighbours a and b lie 3/4 a + 1/4 b and 1/4 a + 3/4 b, and each end repeats its frame. With `past`, input 0
    is the last frame of the piece before, which is already out. Without `last`, the end waits for the next piece.
    """

    start = 1 if first else 0
    shares: list[dict[int, float]] = [{0: 1.0}] if first else []
    if not linear:
        shares += [{frame: 1.0} for frame in range(start, num_frames) for _ in range(2)]
    else:
        if start < num_frames and not past:
            shares.append({start: 1.0})
        for frame in range(start, num_frames - 1):
            shares += [{frame: 0.75, frame + 1: 0.25}, {frame: 0.25, frame + 1: 0.75}]
        if start < num_frames and last:
            shares.append({num_frames - 1: 1.0})
    return [[share.get(frame, 0.0) for frame in range(num_frames)] for share in shares]


class FrameStream:
    """What the layers remember between the pieces of one clip; made for one run and thrown away after it."""

    def __init__(self) -> None:
        self.is_first = True
        self.is_last = False
        self._kept: dict[Hashable, Tensor] = {}

    def recall(self, owner: Hashable) -> Tensor | None:
        """The frames that `owner` kept from the last piece, or None."""
        return self._kept.pop(owner, None)

    def keep(self, owner: Hashable, frames_BCFHW: Tensor) -> None:
        # A slice would hold the whole piece in memory.
        self._kept[owner] = frames_BCFHW.clone()

    def align(self, owner: Hashable, branch_BCFHW: Tensor, num_frames: int) -> Tensor:
        """The next `num_frames` of a branch that runs ahead of the main path; the rest waits for the next piece."""
        waiting = self.recall(owner)
        if waiting is not None:
            branch_BCFHW = join_frames([waiting, branch_BCFHW])
        if branch_BCFHW.shape[2] > num_frames:
            self.keep(owner, branch_BCFHW[:, :, num_frames:])
        return branch_BCFHW[:, :, :num_frames]


def prepend_past(
    x_BCFHW: Tensor, owner: Hashable, stream: FrameStream | None, *, kernel: int, stride: int = 1
) -> Tensor:
    """Put the frames before `x_BCFHW` in front of it, for a causal filter over `kernel` frames.

    At the start of a clip they are copies of its first frame. What the filter will need again is kept.
    """
    past = stream.recall(owner) if stream is not None else None
    if past is None:
        past = x_BCFHW[:, :, :1].expand(-1, -1, kernel - 1, -1, -1)
    joined = join_frames([past, x_BCFHW])
    if stream is not None and not stream.is_last:
        num_steps = (joined.shape[2] - kernel) // stride + 1
        stream.keep(owner, joined[:, :, num_steps * stride :])
    return joined


def run_in_pieces(
    layers: Callable[[Tensor, FrameStream | None], Tensor], x_BCFHW: Tensor, piece_frames: int | None
) -> Tensor:
    """Apply `layers` to pieces of `piece_frames` (the first has one frame more); None means all at once."""
    num_frames = x_BCFHW.shape[2]
    if piece_frames is None or num_frames <= 1 + piece_frames:
        return layers(x_BCFHW, None)
    stream = FrameStream()
    results = []
    for start, stop in pairwise([0, *range(1 + piece_frames, num_frames, piece_frames), num_frames]):
        stream.is_first, stream.is_last = start == 0, stop == num_frames
        results.append(layers(x_BCFHW[:, :, start:stop], stream))
    return torch.cat(results, dim=2)


def join_frames(pieces_BCFHW: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.movedim(1, -1) for piece in pieces_BCFHW], dim=1).movedim(-1, 1)


def join_channels(pieces_BCFHW: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.movedim(1, -1) for piece in pieces_BCFHW], dim=-1).movedim(-1, 1)
