"""Task `denoiser`: predict what the objective asks for, from noisy latents and captions.

Shape letters: B batch, C channels, F frames, H height, W width, N clips or images beside a clip, L noise
levels, E text encoders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.text import PREFIX, TRAINED_TEXT, TextPipeline, write_trained
from frameloom.config.schema.models import TextSection
from frameloom.config.schema.optim import GroupSection, OptimSection
from frameloom.data.loading.batch import Batch
from frameloom.diffusion.noise_levels import band_levels, band_shares
from frameloom.diffusion.objectives import Objective, add_noise, weighted_error_B
from frameloom.models.layers.dropout import has_dropout
from frameloom.models.precision import FP32, Precision
from frameloom.models.text.base import TextStates
from frameloom.models.text.scaling import TextScaling
from frameloom.models.vaes.base import VideoVAE
from frameloom.training.task import MODEL, Losses, Phase, ReadBatches, StepContext, Task
from frameloom.training.tasks.conditions import (
    ConditionMaker,
    encode_moments,
    image_sample_indices,
    join_images,
    split_images,
)
from frameloom.training.tasks.noising import apply_noise_options, draw_levels, draw_normal, draw_seeds, draw_uniform
from frameloom.training.tasks.text_table import TextTable

# Enough for shares to a thousandth, and a multiple of the number of levels of a DDPM.
_SHARE_DRAWS = 20_000
_Z95 = 1.959964


@dataclass(kw_only=True)
class DenoiserTask(Task):
    """`vae` and `text` are frozen; a batch that brings cached latents or text states does not call them.

    `scaling` is applied to text states from wherever they come, the null text included. With `independent_dropout`
    each text encoder's part of a caption is dropped by a draw of its own. `num_levels` noise levels are validated.
    """

    kind: ClassVar[str] = "denoiser"
    denoiser: LoadedDenoiser
    vae: VideoVAE
    text: TextPipeline
    objective: Objective
    null_text: TextStates
    scaling: TextScaling | None
    conditions: ConditionMaker
    section: TextSection
    seed: int
    device: torch.device
    precision: Precision = FP32
    num_levels: int = 8
    text_table: TextTable | None = None
    """scaled states of captions whose encoders are dropped together"""
    prior_weight: float | None = None
    """batches have class pictures in their second half (`class_rows` of `BatchReader`), whose losses count so much"""

    @cached_property
    def _has_dropout(self) -> bool:
        return has_dropout(self.denoiser.model)

    def phases(self, optim: OptimSection) -> Sequence[Phase]:
        trained = [(index, item) for index, item in enumerate(self.section.encoders) if item.train]
        groups = [GroupSection(match=f"{PREFIX}.{index}", lr=item.lr) for index, item in trained]
        own = optim.model_copy(update={"groups": (*groups, *optim.groups)})
        return [Phase(MODEL, self.losses if self.prior_weight is None else self.prior_losses, own, self.companions)]

    def losses(self, context: StepContext, batch: Batch) -> Losses:
        """The error of a prediction from noisy latents, in one pass."""
        objective, seed, dropout = self.objective, self.seed, self.section.dropout
        latent_BCFHW, plain_BCFHW = self._latents_and_noise(batch, seed)
        noise_BCFHW, perturbation_BCFHW = apply_noise_options(objective.noise, plain_BCFHW, seed, batch)
        uniform_B = draw_levels(seed, batch, objective.noise.stratified_levels)
        timestep_B = objective.timesteps(uniform_B, latent_BCFHW)
        noised = add_noise(objective, latent_BCFHW, noise_BCFHW, timestep_B, perturbation_BCFHW)

        conditions = {**self._text(batch, seed, dropout), **self.conditions.make(batch, seed)}
        if self._has_dropout:
            seeds_B = draw_seeds(seed, "model dropout", batch).view(np.int64)
            conditions["dropout_seeds"] = torch.from_numpy(seeds_B)

        prediction_BCFHW = self.denoiser.model(noised.noisy_BCFHW, noised.timestep_B, conditions)
        return Losses(weighted_error_B(prediction_BCFHW, noised, motion_share=objective.motion_share))

    def prior_losses(self, context: StepContext, batch: Batch) -> Losses:
        """DreamBooth: L(instance) + prior_weight * L(class); noise and noise levels of the two are drawn apart."""
        assert self.prior_weight is not None
        instance_B, class_B = self.losses(context, batch).loss_B.chunk(2)
        parts = {"instance_loss": instance_B, "class_loss": class_B}
        return Losses(instance_B + self.prior_weight * class_B, parts)

    def validate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Losses on held-out clips at fixed noise levels, with the same noise each time: the numbers compare."""
        losses, shares = [], []
        dtype = self.precision.weights_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            for batch in batches:
                loss_BL, share_L = self._level_losses(batch, self.seed + 1)
                losses.append(loss_BL)
                shares.append(share_L.expand_as(loss_BL))
        return summarize_levels(torch.cat(losses).cpu(), torch.cat(shares))

    def count_tokens(self, batch: Batch) -> int:
        """Denoiser tokens of a micro-batch, text not counted."""
        bucket = batch.bucket
        frames = self.vae.latent_frames(bucket.frames)
        _, height_stride, width_stride = self.vae.strides
        cells = (frames, bucket.height // height_stride, bucket.width // width_stride)
        return len(batch.sample_indices) * int(self.denoiser.config.num_tokens(cells))

    def _level_losses(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        """Losses [B, L] at all levels of the grid, with plain noise, and the part of training's draws near each."""
        objective = self.objective
        latent_BCFHW, noise_BCFHW = self._latents_and_noise(batch, seed)
        conditions = {**self._text(batch, seed, dropout=0.0), **self.conditions.make(batch, seed)}
        losses = []
        for timestep in objective.timestep_at(band_levels(self.num_levels)):
            noised = add_noise(objective, latent_BCFHW, noise_BCFHW, timestep.expand(len(latent_BCFHW)))
            prediction_BCFHW = self.denoiser.model(noised.noisy_BCFHW, noised.timestep_B, conditions)
            losses.append(weighted_error_B(prediction_BCFHW, noised, motion_share=objective.motion_share))
        share_L = band_shares(objective, latent_BCFHW, self.num_levels, num_draws=_SHARE_DRAWS)
        return torch.stack(losses, dim=1), share_L

    def _latents_and_noise(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        """Normalised latents, drawn from cached moments or those of the frozen autoencoder, and noise."""
        if batch.latents is not None:
            mean_BCFHW, std_BCFHW = (part.to(self.device, torch.float32) for part in batch.latents)
        else:
            assert batch.pixels_BCFHW is not None
            moments = encode_moments(self.vae, batch.pixels_BCFHW, self.device)
            if batch.images is not None:
                images = encode_moments(self.vae, split_images(batch.images.pixels_BCNHW), self.device)
                moments = join_images(moments, images)
            mean_BCFHW, std_BCFHW = moments
        # Both from one stream per sample: setting a generator up costs as much as drawing a small clip.
        drawn = draw_normal(seed, "noise", batch, (2, *mean_BCFHW.shape[1:]), self.device)
        noise_BCFHW, epsilon_BCFHW = drawn.unbind(1)
        return self.vae.normalize(torch.addcmul(mean_BCFHW, std_BCFHW, epsilon_BCFHW)), noise_BCFHW

    def _text(self, batch: Batch, seed: int, dropout: float) -> dict[str, Tensor]:
        """Of clips, and of the images beside them, each of which has its own draw for its dropout."""
        conditions = self._encode_text(batch.text, batch.captions, batch, seed, dropout).conditions()
        if batch.images is not None:
            images = replace(batch, sample_indices=image_sample_indices(batch))
            captions = [caption for of_clip in batch.images.captions for caption in of_clip]
            states = self._encode_text(batch.images.text, captions, images, seed, dropout)
            conditions |= {"image_text": states.tokens_BKD, "image_text_mask": states.mask_BK}
        return conditions

    def _encode_text(
        self, cached: Mapping[str, Tensor] | None, captions: list[str], batch: Batch, seed: int, dropout: float
    ) -> TextStates:
        dropped_BE = self._draw_dropped(batch, seed, dropout) if dropout > 0 else None
        if self.text_table is not None:
            known = self.text_table.pick(captions, None if dropped_BE is None else dropped_BE[:, 0])
            if known is not None:
                return known
        if cached is not None:
            states = TextStates(**{name: part.to(self.device) for name, part in cached.items()})
        else:
            states = self.text.encode(captions).to(self.device)
        if dropped_BE is not None:
            null = self.text.encode([""]).to(self.device) if self.companions else self.null_text
            states = self.text.drop(states, null, dropped_BE.to(self.device))
        return states if self.scaling is None else self.scaling.apply(states)

    def _draw_dropped(self, slots: Batch, seed: int, dropout: float) -> Tensor:
        """[B, text encoders], on the host: true where a caption is replaced by the empty one."""
        count = len(self.text.encoders)
        if not self.section.independent_dropout:
            return (draw_uniform(seed, "caption dropout", slots) < dropout)[:, None].expand(-1, count)
        drawn = [draw_uniform(seed, f"caption dropout {index}", slots) for index in range(count)]
        return torch.stack(drawn, dim=1) < dropout

    def export(self, run: Path, tensors: Mapping[str, Tensor], read_batches: ReadBatches) -> None:
        write_trained(run / TRAINED_TEXT, self.text, self.section)
        super().export(run, tensors, read_batches)


def summarize_levels(loss_NL: Tensor, share_NL: Tensor) -> dict[str, float]:
    """The loss under the training distribution, and that of each band of the noise level, each with its 95% interval.

    `share` is the part of its draws in each band. "_ci95" is half the width of the interval, from the spread
    between clips; noise and levels are the same at every call, so two models differ by themselves alone.
    """
    loss_NL, share_NL = loss_NL.double(), share_NL.double()
    num_levels = loss_NL.shape[1]
    # A band that is never drawn may have a loss that is not finite.
    reached_NL = torch.where(share_NL > 0, loss_NL * share_NL, 0.0)
    values = {"validation_loss": reached_NL.sum(dim=1)}
    for band in range(num_levels):
        values[f"loss_{band / num_levels:.2f}-{(band + 1) / num_levels:.2f}"] = loss_NL[:, band]
    numbers = {}
    for name, loss_N in values.items():
        numbers[name] = float(loss_N.mean())
        if len(loss_N) > 1:
            numbers[f"{name}_ci95"] = half_width(loss_N)
    return numbers


def half_width(value_N: Tensor) -> float:
    """Half of the 95% interval of a mean, for two values or more."""
    return student95(len(value_N) - 1) * float(value_N.double().std()) / math.sqrt(len(value_N))


def student95(freedom: int) -> float:
    """The 97.5% quantile of Student's t; exact for 1 and 2, else within 1% (Hill 1970's expansion)."""
    if freedom <= 2:
        return (12.7062, 4.3027)[freedom - 1]
    z = _Z95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
