"""Task `denoiser`: predict what the objective asks for, from noisy latents and captions.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from frameloom.data.batch import Batch
from frameloom.diffusion.objective import Objective
from frameloom.generate.parts import LoadedDenoiser, TextPipeline, to_unit_range
from frameloom.models.text import TextStates
from frameloom.models.text.scaling import TextScaling
from frameloom.models.vaes import VideoVAE
from frameloom.train.draws import draw_normal, draw_uniform


@dataclass
class DenoiserTask:
    """`vae` and `text` are frozen; a batch that brings cached latents or text states does not call them.

    `scaling` is applied to text states from wherever they come, the null text included.
    """

    denoiser: LoadedDenoiser
    vae: VideoVAE
    text: TextPipeline
    objective: Objective
    null_text: TextStates
    scaling: TextScaling | None
    caption_dropout: float
    seed: int
    device: torch.device

    @property
    def model(self) -> nn.Module:
        return self.denoiser.model

    def losses(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self._losses(batch, self.seed, self.caption_dropout), {}

    def validate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Mean loss on held-out clips, with the same noise each time, so that the numbers compare."""
        with torch.no_grad():
            losses = [self._losses(batch, self.seed + 1, dropout=0.0) for batch in batches]
        return {"validation_loss": float(torch.cat(losses).mean())}

    def count_tokens(self, batch: Batch) -> int:
        """Denoiser tokens of a micro-batch, text not counted."""
        bucket = batch.bucket
        frames = self.vae.latent_frames(bucket.frames)
        _, height_stride, width_stride = self.vae.strides
        cells = (frames, bucket.height // height_stride, bucket.width // width_stride)
        return len(batch.rows) * self.denoiser.family.num_tokens(self.denoiser.config, cells)

    def _losses(self, batch: Batch, seed: int, dropout: float) -> Tensor:
        mean_BCFHW, std_BCFHW = self._moments(batch)
        # Both from one stream per sample: setting a generator up costs as much as drawing a small clip.
        drawn = draw_normal(seed, "noise", batch, (2, *mean_BCFHW.shape[1:]), self.device)
        noise_BCFHW, epsilon_BCFHW = drawn.unbind(1)
        latent_BCFHW = self.vae.normalize(torch.addcmul(mean_BCFHW, std_BCFHW, epsilon_BCFHW))
        draw_B = draw_uniform(seed, "timestep", batch).to(self.device)
        noised = self.objective.add_noise(latent_BCFHW, noise_BCFHW, draw_B)
        text = self._text(batch, seed, dropout)
        prediction = self.denoiser.family.denoise(self.model, noised.noisy_BCFHW, noised.timestep_B, text)
        return self.objective.loss_B(prediction, noised)

    def _moments(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latents, not normalised."""
        if batch.latents is not None:
            mean, std = (part.to(self.device, torch.float32) for part in batch.latents)
            return mean, std
        assert batch.pixels_BCFHW is not None
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            moments = self.vae.encode(to_unit_range(batch.pixels_BCFHW.to(self.device)))
        return moments.mean_BCFHW, torch.exp(0.5 * moments.logvar_BCFHW)

    def _text(self, batch: Batch, seed: int, dropout: float) -> TextStates:
        if batch.text is not None:
            states = TextStates(**{name: part.to(self.device) for name, part in batch.text.items()})
        else:
            states = self.text.encode(batch.captions)
        if dropout > 0:
            states = self._drop(states, (draw_uniform(seed, "caption dropout", batch) < dropout).to(self.device))
        return states if self.scaling is None else self.scaling.apply(states)

    def _drop(self, states: TextStates, dropped_B: Tensor) -> TextStates:
        """The empty caption in place of the dropped ones."""
        return TextStates(
            tokens_BKD=torch.where(dropped_B[:, None, None], self.null_text.tokens_BKD, states.tokens_BKD),
            mask_BK=torch.where(dropped_B[:, None], self.null_text.mask_BK, states.mask_BK),
            pooled_BD=torch.where(dropped_B[:, None], self.null_text.pooled_BD, states.pooled_BD),
        )
