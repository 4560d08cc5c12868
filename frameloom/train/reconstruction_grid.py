"""One picture of what an autoencoder does to clips: rows of frames, each over its reconstruction.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.generate.parts import to_uint8

_MOST_CLIPS = 4
_MOST_FRAMES = 4
_GAP_PX = 4


def draw_grid(pixels_BCFHW: Tensor, decoded_BCFHW: Tensor) -> Tensor:
    """Bytes HWC: for each of the first clips a row of frames, evenly chosen, and their reconstructions under it."""
    num_frames = pixels_BCFHW.shape[2]
    chosen = torch.linspace(0, num_frames - 1, min(num_frames, _MOST_FRAMES)).round().long().tolist()
    rows = []
    for clip, result in zip(pixels_BCFHW[:_MOST_CLIPS], decoded_BCFHW[:_MOST_CLIPS], strict=True):
        pairs = [torch.cat([clip[:, frame], result[:, frame]], dim=1) for frame in chosen]
        rows.append(torch.cat(_separate(pairs, dim=2), dim=2))
    picture_CHW = torch.cat(_separate(rows, dim=1), dim=1)
    return to_uint8(picture_CHW).permute(1, 2, 0).cpu().contiguous()


def _separate(parts: list[Tensor], *, dim: int) -> list[Tensor]:
    """White lines between neighbours."""
    shape = list(parts[0].shape)
    shape[dim] = _GAP_PX
    line = parts[0].new_ones(shape)
    return [piece for part in parts for piece in (line, part)][1:]
