"""Image-to-video and video-to-video conditions of Open-Sora 2.0: known frames as a mask and a latent.

Known frames at the head and at the tail of a clip are encoded apart from the rest, so that nothing of the unknown
frames leaks into them. Masks are per latent frame: 1 where known; the latent is zero elsewhere.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.models.denoisers.base import Encode


def pack_known(clip_BCFHW: Tensor, known_B1FHW: Tensor, encode: Encode) -> Tensor:
    """Mask and masked latent, [B, 1 + C, F, H, W]; a frame is known when all its pixels are."""
    known_BF = known_B1FHW.flatten(3).amin(dim=(1, 3)) > 0
    whole = encode(clip_BCFHW)
    cond = torch.zeros(len(whole), 1 + whole.shape[1], *whole.shape[2:], dtype=whole.dtype, device=whole.device)
    for clip_CFHW, known_F, latent_CFHW, target in zip(clip_BCFHW, known_BF.tolist(), whole, cond, strict=True):
        for frames, cells in _runs(known_F, clip_CFHW.shape[1], whole.shape[2]):
            target[0, cells] = 1
            pixels = clip_CFHW[:, frames]
            # An autoencoder without a causal first frame cannot encode a part of a clip by itself, except a still.
            is_causal = (clip_CFHW.shape[1] - 1) % max(latent_CFHW.shape[1] - 1, 1) == 0
            is_apart = is_causal or pixels.shape[1] == 1
            target[1:, cells] = encode(pixels[None])[0] if is_apart else latent_CFHW[:, cells]
    return cond


def _runs(known_F: list[bool], num_frames: int, num_cells: int) -> list[tuple[slice, slice]]:
    """Known stretches at the head and the tail, as slices of pixel frames and of latent frames."""
    if all(known_F):
        return [(slice(None), slice(None))]
    head = known_F.index(False)
    tail = known_F[::-1].index(False)
    if sum(known_F) != head + tail:
        raise DataError(
            "opensora2 condition: known frames in the middle of a clip; this family takes them at its head and its tail"
        )
    stride = (num_frames - 1) // max(num_cells - 1, 1)
    runs = []
    if head:
        cells = (head - 1) // stride + 1
        runs.append((slice(0, (cells - 1) * stride + 1), slice(0, cells)))
    if tail:
        cells = (tail - 1) // stride + 1
        runs.append((slice(num_frames - (cells - 1) * stride - 1, None), slice(num_cells - cells, None)))
    return runs
