"""Whole sampling runs from recorded text states and noise, through the functions of `frameloom sample`.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.sampling import SampleSection
from frameloom.diffusion.objectives import Objective
from frameloom.models.registry import get_vae
from frameloom.models.text.base import TextStates
from frameloom.models.vaes.base import VideoVAE
from frameloom.sampling.conditions import Prepared
from frameloom.sampling.pipeline import Pipeline, decode, solve
from tests.parity.cases import ParityCase, ParityOutput, read_beside


def load_vae(case: ParityCase, family_name: str, **settings: object) -> Any:
    """The autoencoder whose golden case lies beside this one."""
    beside, family = read_beside(case, case.config["vae_case"].partition(" ")[0]), get_vae(family_name)
    published = {key: value for key, value in beside.config.items() if not key.startswith("tiling")}
    vae = family.build(family.config_class.from_original({**published, **settings})).eval()
    family.load_original(vae, beside.weights)
    return vae


def make_text(tokens_BKD: Tensor, pooled_BD: Tensor | None = None) -> TextStates:
    mask_BK = torch.ones(tokens_BKD.shape[:2], dtype=torch.bool)
    return TextStates(tokens_BKD, mask_BK, tokens_BKD.new_zeros(len(tokens_BKD), 0) if pooled_BD is None else pooled_BD)


def repeat_text(text: TextStates, batch: int) -> TextStates:
    """One row of text states for every sample; a file with a row for each has them already."""
    return TextStates.concatenate([text] * batch) if len(text.tokens_BKD) == 1 else text


def make_sampler(denoiser: LoadedDenoiser, vae: VideoVAE, objective: Objective, settings: SampleSection) -> Pipeline:
    """Without text encoders: the files hold text states."""
    return Pipeline(
        denoiser=denoiser,
        vae=vae,
        text=cast(Any, None),
        scaling=None,
        objective=objective,
        settings=settings,
        origin={},
        device=torch.device("cpu"),
    )


def sample_latents(
    pipeline: Pipeline, text: TextStates, negative: TextStates, noise_BCFHW: Tensor, prepared: Prepared
) -> Tensor:
    batch = len(noise_BCFHW)
    texts = repeat_text(text, batch), repeat_text(negative, batch)
    requests = [pipeline.request("", seed=seed) for seed in range(batch)]
    return solve(pipeline, requests, texts, noise_BCFHW, prepared)


def compare_frames(name: str, pipeline: Pipeline, latent_BCFHW: Tensor, unit_BCFHW: Tensor) -> ParityOutput:
    """Frames as they are written to a file, against published pixels in [0, 1]; rounding may differ by one level."""
    frames = torch.stack([torch.from_numpy(clip) for clip in decode(pipeline, latent_BCFHW)])
    expected_BFHWC = (255 * unit_BCFHW.clamp(0, 1)).round().permute(0, 2, 3, 4, 1)
    return ParityOutput(name, frames[:, : expected_BFHWC.shape[1]].float(), expected_BFHWC, 1.0)
