"""Inpaint conditions of Open-Sora-Plan: known frames as a masked latent and a mask.

What is not given is black; the whole clip is encoded at once, so a latent frame also sees its given neighbours. Masks
are 1 where pixels must be made and 0 where they are given, shrunk frame by frame with bilinear interpolation; the
frames that fall into one latent frame become its channels. A causal autoencoder has the first frame for itself: its
mask is repeated.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.models.denoisers.base import Encode
from frameloom.models.denoisers.opensora_plan.config import OpenSoraPlanConfig

BLACK = -1.0


def pack_known(config: OpenSoraPlanConfig, clip_BCFHW: Tensor, known_B1FHW: Tensor, encode: Encode) -> Tensor:
    """Masked latent, then mask: [B, C + vae_scale_factor_t, F, H, W] in latent cells."""
    # The published code hides with the mask before it is shrunk; 0.5 and less counts as hidden.
    masked_BCFHW = torch.where(known_B1FHW > 0.5, clip_BCFHW, BLACK)
    latent_BCFHW = encode(masked_BCFHW)
    mask = shrink_mask(1 - known_B1FHW.float(), (latent_BCFHW.shape[3], latent_BCFHW.shape[4]))
    folded = fold_frames(mask, config.vae_scale_factor_t)
    if folded.shape[2] != latent_BCFHW.shape[2]:
        raise DataError(
            f"opensora_plan condition: {clip_BCFHW.shape[2]} pixel frames became {latent_BCFHW.shape[2]} latent "
            f"frames, but the model's vae_scale_factor_t {config.vae_scale_factor_t} makes {folded.shape[2]}; choose "
            "the autoencoder that the model was made for"
        )
    return torch.cat([latent_BCFHW, folded.to(latent_BCFHW.dtype)], dim=1)


def shrink_mask(mask_B1FHW: Tensor, size_HW: tuple[int, int]) -> Tensor:
    """Every frame to the size of the latent."""
    batch, _, frames = mask_B1FHW.shape[:3]
    flat = mask_B1FHW.reshape(batch * frames, 1, *mask_B1FHW.shape[3:])
    return F.interpolate(flat, size=size_HW, mode="bilinear").reshape(batch, 1, frames, *size_HW)


def fold_frames(mask_B1FHW: Tensor, stride: int) -> Tensor:
    """[B, stride, latent frames, H, W]; an odd number of frames has the first one `stride` times."""
    frames = mask_B1FHW.shape[2]
    if frames % 2:
        first = mask_B1FHW[:, :, :1].expand(-1, -1, stride, -1, -1)
        mask_B1FHW = torch.cat([first, mask_B1FHW[:, :, 1:]], dim=2)
    if mask_B1FHW.shape[2] % stride:
        raise DataError(
            f"opensora_plan condition: {frames} frames cannot be folded into latent frames of {stride}; "
            f"give {stride}n+1 frames (1, {stride + 1}, {2 * stride + 1}, ...)"
        )
    return torch.unflatten(mask_B1FHW[:, 0], 1, (-1, stride)).transpose(1, 2)
