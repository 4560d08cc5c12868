"""Inpaint conditions of CogVideoX-Fun: known pixels as a mask and a masked latent beside the noisy latent.

Pixels that must be made are black (-1) before encoding. The mask is brought to latent cells by linear interpolation,
its first frame by itself and the others together. With strides of 4 frames and 8 pixels this reads only the two middle
frames of each four and the middle 2x2 of each 8x8 block: a lone given frame at the end is not seen in the mask.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.models.denoisers.base import Draws, Encode
from frameloom.models.denoisers.cogvideox_fun.config import CogVideoXFunConfig

BLANK = -1.0
# Noise on the given pixels of models with add_noise_in_inpaint_model: its deviation when sampling, and the mean and
# deviation of the logarithm of it in training.
SAMPLING_SIGMA = 0.0563
TRAINING_LOG_SIGMA = (-3.0, 0.5)
KEPT_EMPTY = 0.1


def pack_known(
    config: CogVideoXFunConfig,
    clip_BCFHW: Tensor,
    known_B1FHW: Tensor,
    encode: Encode,
    *,
    noise_BCFHW: Tensor | None = None,
    sigma_B: Tensor | None = None,
    keep_empty_B: Tensor | None = None,
) -> Tensor:
    """Mask and masked latent, [B, 1 + C, F, H, W], as `cond_latents`.

    A sample of which nothing is given gets zeros in all channels (text to video); where `keep_empty_B` is true it gets
    the latent of a black clip instead, as one in ten of them do in the published training. `noise_BCFHW` (standard
    normal, like the clip) times `sigma_B` is added to given pixels.
    """
    masked_BCFHW = blank_unknown(clip_BCFHW, known_B1FHW)
    if noise_BCFHW is not None and sigma_B is not None:
        masked_BCFHW = add_noise_to_known(masked_BCFHW, noise_BCFHW, sigma_B)
    latent_BCFHW = encode(masked_BCFHW)
    mask_B1FHW = resize_known(known_B1FHW.to(latent_BCFHW.dtype), (*latent_BCFHW.shape[2:],))
    cond_BCFHW = torch.cat([config.mask_scale * mask_B1FHW, latent_BCFHW], dim=1)
    is_used_B = (known_B1FHW > 0).flatten(1).any(dim=1)
    if keep_empty_B is not None:
        is_used_B = is_used_B | keep_empty_B.bool()
    return torch.where(is_used_B[:, None, None, None, None], cond_BCFHW, 0.0)


def draw_known(
    config: CogVideoXFunConfig, clip_BCFHW: Tensor, known_B1FHW: Tensor, encode: Encode, draws: Draws
) -> Tensor:
    """`pack_known` with what the published training and sampling draw."""
    noise = sigma_B = keep_empty_B = None
    if draws.is_training:
        keep_empty_B = draws.uniform_B("empty condition") < KEPT_EMPTY
    if config.add_noise_in_inpaint_model:
        noise = draws.normal("condition noise", tuple(clip_BCFHW.shape[1:]))
        sigma_B = torch.full((len(clip_BCFHW),), SAMPLING_SIGMA, device=clip_BCFHW.device)
        if draws.is_training:
            mean, deviation = TRAINING_LOG_SIGMA
            sigma_B = torch.exp(mean + deviation * draws.normal("condition sigma", (1,))[:, 0])
    return pack_known(
        config, clip_BCFHW, known_B1FHW, encode, noise_BCFHW=noise, sigma_B=sigma_B, keep_empty_B=keep_empty_B
    )


def blank_unknown(clip_BCFHW: Tensor, known_B1FHW: Tensor) -> Tensor:
    return torch.where(known_B1FHW > 0, clip_BCFHW, BLANK)


def add_noise_to_known(masked_BCFHW: Tensor, noise_BCFHW: Tensor, sigma_B: Tensor) -> Tensor:
    """Noise on all pixels but black ones; those of the picture that are exactly black stay clean, too."""
    noisy_BCFHW = masked_BCFHW + sigma_B[:, None, None, None, None] * noise_BCFHW
    return torch.where(masked_BCFHW == BLANK, masked_BCFHW, noisy_BCFHW)


def resize_known(known_B1FHW: Tensor, latent_FHW: tuple[int, ...]) -> Tensor:
    """A mask of pixels as one of latent cells, with values between 0 and 1."""
    frames, height, width = latent_FHW
    resize = partial(F.interpolate, mode="trilinear", align_corners=False)
    first = resize(known_B1FHW[:, :, :1], size=(1, height, width))
    if frames == 1:
        return first
    return torch.cat([first, resize(known_B1FHW[:, :, 1:], size=(frames - 1, height, width))], dim=2)
