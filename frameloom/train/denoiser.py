"""Task `denoiser`: predict what the objective asks for, from noisy latents and captions.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from frameloom.data.batch import Batch
from frameloom.diffusion.objective import Objective
from frameloom.generate.parts import LoadedDenoiser, TextPipeline, to_unit_range
from frameloom.models.text import TextStates
from frameloom.models.text.scaling import TextScaling
from frameloom.models.vaes import VideoVAE
from frameloom.train.conditions import ConditionMaker, image_ordinals, join_images, split_images
from frameloom.train.draws import draw_normal, draw_uniform


@dataclass
class DenoiserTask:
    """`vae` and `text` are frozen; a batch that brings cached latents or text states does not call them.

    `scaling` is applied to text states from wherever they come, the null text included. With `independent_dropout`
    each text encoder's part of a caption is dropped by a draw of its own.
    """

    denoiser: LoadedDenoiser
    vae: VideoVAE
    text: TextPipeline
    objective: Objective
    null_text: TextStates
    scaling: TextScaling | None
    conditions: ConditionMaker
    caption_dropout: float
    independent_dropout: bool
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
        text = self._text(batch.text, batch.captions, batch, seed, dropout)
        given = self.conditions.make(batch, seed, self._image_text(batch, seed, dropout))
        prediction = self.denoiser.family.denoise(self.model, noised.noisy_BCFHW, noised.timestep_B, text, given)
        return self.objective.loss_B(prediction, noised)

    def _moments(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latents, not normalised."""
        if batch.latents is not None:
            mean, std = (part.to(self.device, torch.float32) for part in batch.latents)
            return mean, std
        assert batch.pixels_BCFHW is not None
        clip = self._encode(batch.pixels_BCFHW)
        if batch.images is None:
            return clip
        return join_images(clip, self._encode(split_images(batch.images.pixels_BCNHW)))

    def _encode(self, pixels_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            moments = self.vae.encode(to_unit_range(pixels_BCFHW.to(self.device)))
        return moments.mean_BCFHW, torch.exp(0.5 * moments.logvar_BCFHW)

    def _image_text(self, batch: Batch, seed: int, dropout: float) -> TextStates | None:
        """Captions of the images beside clips, each with a slot of its own for its dropout."""
        if batch.images is None:
            return None
        slots = replace(batch, ordinals=image_ordinals(batch))
        captions = [caption for beside in batch.images.captions for caption in beside]
        return self._text(batch.images.text, captions, slots, seed, dropout)

    def _text(
        self, cached: Mapping[str, Tensor] | None, captions: list[str], slots: Batch, seed: int, dropout: float
    ) -> TextStates:
        if cached is not None:
            states = TextStates(**{name: part.to(self.device) for name, part in cached.items()})
        else:
            states = self.text.encode(captions).to(self.device)
        if dropout > 0:
            states = self.text.drop(states, self.null_text, self._draw_dropped(slots, seed, dropout))
        return states if self.scaling is None else self.scaling.apply(states)

    def _draw_dropped(self, slots: Batch, seed: int, dropout: float) -> Tensor:
        """[B, text encoders], true where a caption is replaced by the empty one."""
        count = self.text.num_encoders
        purposes = ["caption dropout"] * count
        if self.independent_dropout:
            purposes = [f"caption dropout {index}" for index in range(count)]
        drawn = {purpose: draw_uniform(seed, purpose, slots) for purpose in set(purposes)}
        return (torch.stack([drawn[purpose] for purpose in purposes], dim=1) < dropout).to(self.device)
