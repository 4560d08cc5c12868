"""Task `autoencoder`: reconstruct clips through a small latent, also against a discriminator.

With a discriminator a step is the autoencoder's, the discriminator's, or both, one after the other. What a phase draws
is a function of the seed and the batch, and which phases are due follows from the step, so a run resumes to the bit.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from frameloom.checkpoint.model_folder import read_weights
from frameloom.config.schema.models import AutoencoderSection, DiscriminatorSection, LpipsSection
from frameloom.config.schema.optim import GroupSection, OptimSection
from frameloom.core.errors import ConfigError
from frameloom.core.random import key, stream, uniform_at
from frameloom.data.loading.batch import Batch
from frameloom.data.media.transforms import psnr_db, to_signed_range, to_uint8
from frameloom.evaluate.pair_metrics import ssim
from frameloom.models.layers.patches import fold_frames
from frameloom.models.vaes.base import Moments, VideoVAE
from frameloom.models.vaes.discriminator import (
    Discriminator,
    DiscriminatorConfig,
    build_discriminator,
    load_discriminator,
)
from frameloom.models.vaes.losses import (
    AdversarialSettings,
    discriminator_loss,
    generator_term,
    kl_divergence,
    reconstruction_nll,
    wavelet_loss,
)
from frameloom.models.vaes.lpips import LPIPS, load_lpips
from frameloom.training.task import MODEL, Losses, Phase, ReadBatches, StepContext, Task
from frameloom.training.tasks.noising import draw_normal

_MOST_CLIPS = 4
_MOST_FRAMES = 4
_GAP_PX = 4
_HALVES = {"encoder": ("encoder.", "quant_conv."), "decoder": ("decoder.", "post_quant_conv.")}


@dataclass(frozen=True)
class Critic:
    """The discriminator and the settings of the game."""

    model: Discriminator
    settings: AdversarialSettings
    section: DiscriminatorSection

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, gradients pass through the discriminator and leave none in it."""
        self.model.requires_grad_(False)
        try:
            yield
        finally:
            self.model.requires_grad_(True)


@dataclass(kw_only=True)
class AutoencoderTask(Task):
    """`logvar` may be a parameter that trains; `lpips` is frozen."""

    kind: ClassVar[str] = "vae"
    vae: VideoVAE
    weights: AutoencoderSection
    seed: int
    device: torch.device
    lpips: LPIPS | None = None
    logvar: Tensor | float = 0.0
    critic: Critic | None = None

    def phases(self, optim: OptimSection) -> Sequence[Phase]:
        # Decay would pull the log-variance to 0.
        undecayed = [GroupSection(match=name, weight_decay=0.0) for name in self.companions]
        own = optim.model_copy(update={"groups": (*undecayed, *optim.groups)})
        if self.critic is None:
            return [Phase(MODEL, self.losses, own, self.companions)]
        section, settings = self.critic.section, self.critic.settings
        if section.adaptive and not self.vae.last_layer().requires_grad:
            raise ConfigError(
                "autoencoder.discriminator.adaptive compares gradients at the decoder's last layer, which does not "
                "train; let it train (optim.trainable, optim.frozen), or set adaptive to false with a weight of your "
                "choice"
            )
        other = {
            "lr": section.lr or optim.lr,
            "weight_decay": section.weight_decay,
            "clip_norm": section.clip_norm,
            **{"groups": (), "clip_fade": None, "skip_spikes": None},
        }
        return [
            Phase(MODEL, self.losses, own, self.companions, settings.trains_autoencoder, settings.start),
            Phase(
                "discriminator",
                self.discriminator_losses,
                optim.model_copy(update=other),
                is_due=settings.trains_discriminator,
                first_step=settings.start,
                ema=False,
            ),
        ]

    def losses(self, context: StepContext, batch: Batch) -> Losses:
        """The autoencoder's, with the discriminator's judgement from its first step on."""
        made = self.reconstruct(batch)
        loss, parts = self.compare(made)
        critic = self.critic
        if critic is not None and context.step >= critic.settings.start:
            with critic.frozen():
                logits = self.judge(made.decoded_BCFHW, batch, "autoencoder")
            layer = self.vae.last_layer()
            term = generator_term(logits, parts["reconstruction"], layer, critic.settings, context.step)
            if critic.settings.update == "both":
                _keep(context, batch, made)
            loss = loss + term.loss
            parts |= {"generator": term.made, "adversarial_weight": term.weight}
        return _spread(loss, parts, batch)

    def discriminator_losses(self, context: StepContext, batch: Batch) -> Losses:
        """On clips and reconstructions, which are made here unless the phase before did."""
        assert self.critic is not None
        kept = context.made.get((batch.epoch, batch.index))
        if kept is None:
            with torch.no_grad():
                reconstructed = self.reconstruct(batch)
            pixels, decoded = reconstructed.pixels_BCFHW, reconstructed.decoded_BCFHW
        else:
            pixels, decoded = _find_rows(kept, batch)
        real = self.judge(pixels, batch, "clips")
        made = self.judge(decoded, batch, "reconstructions")
        loss = discriminator_loss(real, made, self.critic.settings, context.step)
        with torch.no_grad():
            right = [(real > 0).float().mean(), (made < 0).float().mean()]
            parts = {"accuracy": (right[0] + right[1]) / 2, "real": real.float().mean(), "made": made.float().mean()}
        return _spread(loss, parts, batch)

    def judge(self, pixels_BCFHW: Tensor, batch: Batch, purpose: str) -> Tensor:
        """The discriminator's logits."""
        assert self.critic is not None
        generator = None
        if self.critic.model.config.dropout:
            # The draws of a piece are its own: norms and draws are those of what is computed at once.
            counters = (batch.epoch, batch.index, *([batch.part] if batch.part else ()))
            generator = stream(self.seed, f"discriminator dropout {purpose}", *counters, device=str(self.device))
        logits: Tensor = self.critic.model(pixels_BCFHW, generator)
        return logits

    def reconstruct(self, batch: Batch) -> Reconstruction:
        """Through a sample of the latents, whose noise is a function of the sample's slot."""
        pixels = self._pixels(batch)
        if self._is_image(batch):
            pixels = pixels[:, :, :1]
        moments, encoder_bands = self.vae.encode_with_coefficients(pixels)
        epsilon = draw_normal(self.seed, "latent", batch, tuple(moments.mean_BCFHW.shape[1:]), self.device)
        decoded, decoder_bands = self.vae.decode_with_coefficients(moments.sample(epsilon))
        return Reconstruction(pixels, moments, decoded, encoder_bands, decoder_bands)

    def compare(self, made: Reconstruction) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the losses, and all of them by name."""
        weights, lpips = self.weights, self.weights.lpips
        perceptual_BF = None
        if lpips is not None and lpips.weight:
            assert self.lpips is not None
            distance_N = self.lpips(fold_frames(made.pixels_BCFHW), fold_frames(made.decoded_BCFHW))
            perceptual_BF = distance_N.reshape(len(made.pixels_BCFHW), -1)
        parts = {
            "reconstruction": reconstruction_nll(
                made.pixels_BCFHW,
                made.decoded_BCFHW,
                logvar=self.logvar,
                kind=weights.reconstruction,
                perceptual_BF=None if perceptual_BF is None or lpips is None else lpips.weight * perceptual_BF,
            ),
            "kl": kl_divergence(made.moments),
            "wavelet": wavelet_loss(made.encoder_bands, made.decoder_bands),
        }
        loss = parts["reconstruction"] + weights.kl_weight * parts["kl"] + weights.wavelet_weight * parts["wavelet"]
        if perceptual_BF is not None:
            parts["lpips"] = perceptual_BF.mean()
        if isinstance(self.logvar, Tensor):
            parts["logvar"] = self.logvar
        return loss, parts

    def validate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """PSNR, SSIM and, with its weights, LPIPS of the reconstruction from the latent mean, averaged over clips."""
        values: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for batch in batches:
                pixels = self._pixels(batch)
                decoded = self._restore(pixels)
                values.setdefault("psnr_db", []).append(psnr_db(decoded, pixels))
                values.setdefault("ssim", []).append(ssim(decoded, pixels))
                if self.lpips is not None:
                    distance_N = self.lpips(fold_frames(pixels), fold_frames(decoded))
                    values.setdefault("lpips", []).append(distance_N.reshape(len(pixels), -1).mean(1))
        return {name: float(torch.cat(found).mean()) for name, found in values.items()}

    def draw_pictures(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Validation clips over their reconstructions, as one picture HWC of bytes."""
        if not batches:
            return {}
        with torch.no_grad():
            pixels = self._pixels(max(batches, key=lambda batch: batch.bucket.frames))
            return {"reconstructions": draw_grid(pixels, self._restore(pixels))}

    def export_config(self, read_batches: ReadBatches) -> Any:
        """With one `scale` for all channels, which gives the latents of these clips a standard deviation of 1."""
        with torch.no_grad():
            means = [self.vae.encode(self._pixels(batch)).mean_BCFHW.flatten() for batch in read_batches()]
        scale = 1 / float(torch.cat(means).square().mean().sqrt())
        channels = self.vae.latent_channels
        return dataclasses.replace(self.config, scale=(scale,) * channels, shift=(0.0,) * channels)

    def count_tokens(self, batch: Batch) -> int:
        """Latent cells of a micro-batch."""
        bucket = batch.bucket
        _, height_stride, width_stride = self.vae.strides
        frames = self.vae.latent_frames(1 if self._is_image(batch) else bucket.frames)
        return len(batch.rows) * frames * (bucket.height // height_stride) * (bucket.width // width_stride)

    def _restore(self, pixels_BCFHW: Tensor) -> Tensor:
        return self.vae.decode(self.vae.encode(pixels_BCFHW).mean_BCFHW).clamp(-1, 1)

    def _is_image(self, batch: Batch) -> bool:
        """Whether a micro-batch of clips is one of those that are trained on as images."""
        if not self.weights.image_share:
            return False
        drawn = uniform_at(key(self.seed, "image mixing", batch.epoch), np.array([batch.index]))
        return bool(drawn[0] < self.weights.image_share)

    def _pixels(self, batch: Batch) -> Tensor:
        assert batch.pixels_BCFHW is not None
        return to_signed_range(batch.pixels_BCFHW.to(self.device))


class Reconstruction(NamedTuple):
    """A batch on its way through the autoencoder: clips, latents, results, and the bands of both halves."""

    pixels_BCFHW: Tensor
    moments: Moments
    decoded_BCFHW: Tensor
    encoder_bands: Sequence[Tensor]
    decoder_bands: Sequence[Tensor]


def _spread(loss: Tensor, parts: Mapping[str, Tensor], batch: Batch) -> Losses:
    """Losses of a whole micro-batch as those of its samples, which the step takes the mean of."""
    num_samples = len(batch.rows)
    return Losses(loss.expand(num_samples), {name: part.expand(num_samples) for name, part in parts.items()})


def _keep(context: StepContext, batch: Batch, made: Reconstruction) -> None:
    """For the discriminator's phase of the same step: for each piece of a micro-batch where it begins, clips and
    reconstructions."""
    name = batch.epoch, batch.index
    if batch.part == 0 and not batch.is_filler:
        context.made.pop(name, None)  # of passes that ran out of memory
    context.made.setdefault(name, []).append((batch.part, made.pixels_BCFHW, made.decoded_BCFHW.detach()))


def _find_rows(kept: Sequence[tuple[int, Tensor, Tensor]], batch: Batch) -> tuple[Tensor, Tensor]:
    """The rows of a piece, which may be cut otherwise than the pieces that were kept; those are in order."""
    at, end = batch.part, batch.part + batch.size
    parts = []
    for start, pixels, decoded in kept:
        if start <= at < min(end, start + len(pixels)):
            rows = slice(at - start, end - start)
            parts.append((pixels[rows], decoded[rows]))
            at = start + len(pixels)
    if len(parts) == 1:
        return parts[0]
    parts = parts or [(pixels[:0], decoded[:0]) for _, pixels, decoded in kept[:1]]
    return torch.cat([pixels for pixels, _ in parts]), torch.cat([decoded for _, decoded in parts])


def draw_grid(pixels_BCFHW: Tensor, decoded_BCFHW: Tensor) -> Tensor:
    """Bytes HWC: for each of the first clips a row of frames, evenly chosen, and their reconstructions under it."""
    num_frames = pixels_BCFHW.shape[2]
    chosen = torch.linspace(0, num_frames - 1, min(num_frames, _MOST_FRAMES)).round().long().tolist()

    def join(parts: list[Tensor], dim: int) -> Tensor:
        """With white lines between neighbours."""
        shape = list(parts[0].shape)
        shape[dim] = _GAP_PX
        line = parts[0].new_ones(shape)
        return torch.cat([piece for part in parts for piece in (line, part)][1:], dim=dim)

    rows = []
    for clip, result in zip(pixels_BCFHW[:_MOST_CLIPS], decoded_BCFHW[:_MOST_CLIPS], strict=True):
        pairs = [torch.cat([clip[:, frame], result[:, frame]], dim=1) for frame in chosen]
        rows.append(join(pairs, 2))
    return to_uint8(join(rows, 1)).permute(1, 2, 0).cpu().contiguous()


def freeze_other_half(vae: VideoVAE, train_only: str | None) -> None:
    """Leave only the encoder or only the decoder, with the layer that joins it to the latents, to train."""
    if train_only is None:
        return
    for name, parameter in vae.named_parameters():
        if not name.startswith(_HALVES[train_only]):
            parameter.requires_grad_(False)


def build_lpips(section: LpipsSection, device: torch.device) -> LPIPS:
    """Frozen, from the files that the recipe names."""
    assert section.weights is not None
    tensors = dict(read_weights(Path(section.weights)).tensors)
    if section.heads is not None:
        tensors |= dict(read_weights(Path(section.heads)).tensors)
    model = LPIPS(section.channels)
    load_lpips(model, tensors)
    return model.to(device).eval()


def build_critic(section: DiscriminatorSection, seed: int, device: torch.device) -> Critic:
    """The discriminator of a recipe; fresh weights follow from `seed`."""
    config = DiscriminatorConfig(**section.model_dump(include={"channels", "num_layers", "dropout", "kind"}))
    model = build_discriminator(config, stream(seed, "discriminator weights"))
    if section.weights is not None:
        load_discriminator(model, dict(read_weights(Path(section.weights)).tensors))
    settings = AdversarialSettings(**section.model_dump(include={"start", "weight", "loss", "update", "adaptive"}))
    return Critic(model.to(device).train(), settings, section)
