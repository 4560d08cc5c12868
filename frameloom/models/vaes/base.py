"""Base of the video autoencoders: encoding and decoding under a policy, latent scaling, statistics of latents.

Shape letters: B batch, C channels, F frames, H height, W width, N cells of a batch.

Pixels are in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError, DataError
from frameloom.models.layers.tiles import Cuts, Tiles, check_tile
from frameloom.models.layers.tiling import Layers, run_in_cuts
from frameloom.models.precision import FP32, Precision
from frameloom.models.state_dict import load_fitting
from frameloom.models.vaes.config import VAEConfig

LOGVAR_RANGE = (-30.0, 20.0)


class Moments(NamedTuple):
    """A diagonal Gaussian over latents; the log-variance is already clamped."""

    mean_BCFHW: Tensor
    logvar_BCFHW: Tensor

    @classmethod
    def from_raw(cls, raw_BCFHW: Tensor) -> Moments:
        """Split an encoder's output (mean channels, then log-variance channels) and clamp."""
        mean_BCFHW, logvar_BCFHW = raw_BCFHW.chunk(2, dim=1)
        return cls(mean_BCFHW, logvar_BCFHW.clamp(*LOGVAR_RANGE))

    def sample(self, eps_BCFHW: Tensor) -> Tensor:
        """Mean plus standard deviation times `eps_BCFHW`, which the caller draws from a standard normal."""
        return self.mean_BCFHW + torch.exp(0.5 * self.logvar_BCFHW) * eps_BCFHW

    def mode(self) -> Tensor:
        return self.mean_BCFHW

    def kl_B(self) -> Tensor:
        """Divergence from the standard normal in nats, summed over a sample's latent numbers."""
        # Half precision would lose most of a sum over thousands of latents.
        dtype = torch.promote_types(self.mean_BCFHW.dtype, torch.float32)
        mean_BCFHW, logvar_BCFHW = self.mean_BCFHW.to(dtype), self.logvar_BCFHW.to(dtype)
        terms_BCFHW = mean_BCFHW.square() + logvar_BCFHW.exp() - 1.0 - logvar_BCFHW
        return 0.5 * terms_BCFHW.flatten(1).sum(1)


@dataclass(frozen=True)
class EncodePolicy:
    """How an autoencoder runs, in either direction; what is None is not limited.

    precision     of the weights and the computation; with less than fp32, pixels, moments and latents stay float32
    clips         encoded or decoded at a time. No layer looks at another clip of its batch, so the result is that of
                  the whole batch up to the order of sums
    chunk_frames  pixel frames at a time, for autoencoders whose chunks give the result of the whole clip
    tile_px       side of overlapping tiles, for pictures with a longer side. The result is near that of the whole
                  picture, not equal: a layer near the edge of a tile sees less, and norms and attention over a picture
                  see one tile. The fading over the share `tile_overlap` hides the seams
    """

    precision: Precision = FP32
    clips: int | None = None
    chunk_frames: int | None = None
    tile_px: int | None = None
    tile_overlap: float = 0.25


class VideoVAE(nn.Module):
    """Base of the autoencoders: clip sizes, latent scaling, and both directions under an `EncodePolicy`.

    A subclass runs its network on one piece of a clip. `strides` are (frames, height, width).
    """

    scale: Tensor
    shift: Tensor
    block_types: tuple[type[nn.Module], ...] = ()
    exact_chunks = False
    """whether `policy.chunk_frames` gives the result of the whole clip; then a subclass reads it"""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config: Any = config
        self.strides, self.causal = config.strides, config.causal
        self.latent_channels = config.latent_channels
        self.policy = EncodePolicy()
        self.reset_scaling()

    def encode_piece(self, pixels_BCFHW: Tensor) -> Tensor:
        """Means and unclamped log-variances, one behind the other in the channels."""
        raise NotImplementedError

    def decode_piece(self, latent_BCFHW: Tensor) -> Tensor:
        raise NotImplementedError

    def use(self, policy: EncodePolicy) -> Self:
        """Run as `policy` says from now on; ConfigError when this autoencoder cannot."""
        stride, chunk = self.strides[0], policy.chunk_frames
        if policy.tile_px is not None:
            check_tile(policy.tile_px, policy.tile_overlap, compression=self.strides[1], where="tile_px", exact=True)
        if chunk is not None and not self.exact_chunks:
            raise ConfigError("chunk_frames: this autoencoder has no pieces that equal the whole clip; leave it out")
        if chunk is not None and (chunk < 1 or chunk % stride):
            raise ConfigError(f"chunk_frames {chunk}: choose a positive multiple of {stride}")
        if policy.precision != self.policy.precision:
            policy.precision.cast_frozen(self)
        self.policy = policy
        return self

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        """Tiles fade before anything is sampled."""
        return Moments.from_raw(self.encode_raw(pixels_BCFHW))

    def encode_raw(self, pixels_BCFHW: Tensor) -> Tensor:
        """Means and unclamped log-variances, one behind the other in the channels."""
        self.check_pixels(pixels_BCFHW)
        return self._run(self.encode_piece, pixels_BCFHW, decoding=False)

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        """Pixels of unnormalised latents."""
        return self._run(self.decode_piece, latent_BCFHW, decoding=True)

    def cuts(self, *, decoding: bool) -> tuple[Cuts, Cuts]:
        """How a batch is cut before the network sees it: by the policy, then by the model's own tiles."""
        tile_px, stride = self.policy.tile_px, self.strides[1]
        space = None
        if tile_px is not None:
            tiles = Tiles.overlapping(tile_px, self.policy.tile_overlap, compression=stride, decoding=decoding)
            space = tiles, tiles
        return Cuts(space, clips=self.policy.clips), self.config.cuts(decoding=decoding)

    def _run(self, piece: Layers, x_BCFHW: Tensor, *, decoding: bool) -> Tensor:
        outer, own = self.cuts(decoding=decoding)
        dtype = self.policy.precision.weights_dtype

        def run_own(x_BCFHW: Tensor) -> Tensor:
            if dtype == torch.float32:
                return run_in_cuts(piece, x_BCFHW, own)
            return run_in_cuts(piece, x_BCFHW.to(dtype), own).float()

        return run_in_cuts(run_own, x_BCFHW, outer)

    def reset_scaling(self) -> None:
        """Write the latent scale and shift again, for instance after a build on the meta device."""
        self.register_buffer("scale", torch.tensor(self.config.scale, dtype=torch.float32), persistent=False)
        self.register_buffer("shift", torch.tensor(self.config.shift, dtype=torch.float32), persistent=False)

    def encode_with_coefficients(self, pixels_BCFHW: Tensor) -> tuple[Moments, Sequence[Tensor]]:
        """For training: also inner coefficients that the decoder should agree with; none unless a model has them."""
        return self.encode(pixels_BCFHW), ()

    def decode_with_coefficients(self, latent_BCFHW: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        return self.decode(latent_BCFHW), ()

    def last_layer(self) -> nn.Parameter:
        """The weight of the decoder's last convolution, where gradients of losses are compared."""
        layer = self.get_submodule("decoder.conv_out")
        weight = getattr(layer, "conv", layer).weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def blocks(self) -> list[nn.Module]:
        """Repeated blocks, for recompute; they take tensors first and give one tensor."""
        return [module for module in self.modules() if isinstance(module, self.block_types)]

    def normalize(self, latent_BCFHW: Tensor) -> Tensor:
        """What a denoiser sees: (latent - shift) * scale, channel by channel."""
        return (latent_BCFHW - self.shift.view(1, -1, 1, 1, 1)) * self.scale.view(1, -1, 1, 1, 1)

    def denormalize(self, latent_BCFHW: Tensor) -> Tensor:
        return latent_BCFHW / self.scale.view(1, -1, 1, 1, 1) + self.shift.view(1, -1, 1, 1, 1)

    def latent_frames(self, pixel_frames: int) -> int:
        """Latent frames of a clip; DataError when no clip of that length can be encoded."""
        stride = self.strides[0]
        if not self.config.lengths.accepts(pixel_frames):
            rule = f"1 more than a multiple of {stride}" if self.causal else f"1 or a multiple of {stride}"
            raise DataError(f"clip of {pixel_frames} frames: this autoencoder takes {rule}; cut or pad the clip")
        latents: int = self.config.lengths.latents(pixel_frames)
        return latents

    def usable_frames(self, available: int) -> int:
        """The most frames, at most `available`, that come back as they went in; at least 1."""
        frames: int = self.config.lengths.trim(available)
        # A non-causal model that packs frames decodes one latent frame to one frame.
        return frames if frames > 1 and self.latent_frames(frames) > 1 else 1

    def check_pixels(self, pixels_BCFHW: Tensor) -> None:
        """DataError when `pixels_BCFHW` is not a batch of RGB clips that the strides divide."""
        shape = tuple(pixels_BCFHW.shape)
        if len(shape) != 5 or shape[1] != 3:
            raise DataError(f"pixels of shape {shape}: expected (batch, 3, frames, height, width)")
        self.latent_frames(shape[2])
        _, stride_h, stride_w = self.strides
        if shape[3] % stride_h or shape[4] % stride_w:
            raise DataError(
                f"pixels of height {shape[3]} and width {shape[4]}: this autoencoder takes multiples of "
                f"{stride_h} and {stride_w}; crop or resize the clip"
            )


class LatentStatistics:
    """Adds up latents as a denoiser sees them, so with the noise of the posterior; in float64, one pass, no latent
    is kept."""

    def __init__(self, num_channels: int) -> None:
        self.count = 0
        self.mean_C = torch.zeros(num_channels, dtype=torch.float64)
        self._squares_C = torch.zeros(num_channels, dtype=torch.float64)
        self._posterior_C = torch.zeros(num_channels, dtype=torch.float64)

    def add(self, moments: Moments) -> None:
        """All cells of a batch; standard deviations are merged as Chan et al. (1983) do it, without cancellation."""
        mean_CN = moments.mean_BCFHW.detach().transpose(0, 1).flatten(1).double().cpu()
        variance_CN = moments.logvar_BCFHW.detach().transpose(0, 1).flatten(1).double().exp().cpu()
        num_cells, center_C = mean_CN.shape[1], mean_CN.mean(1)
        total, gap_C = self.count + num_cells, center_C - self.mean_C
        self._squares_C += (mean_CN - center_C[:, None]).square().sum(1)
        self._squares_C += gap_C.square() * (self.count * num_cells / total)
        self.mean_C += gap_C * (num_cells / total)
        self._posterior_C += variance_CN.sum(1)
        self.count = total

    @property
    def posterior_std_C(self) -> Tensor:
        """Size of the noise that the encoder itself adds: the root of its mean variance."""
        return (self._posterior_C / max(self.count, 1)).sqrt()

    @property
    def std_C(self) -> Tensor:
        """Standard deviation of sampled latents: that of the means, and the noise of the posterior."""
        return ((self._squares_C + self._posterior_C) / max(self.count, 1)).sqrt()

    def scale_for_all(self) -> float:
        """One scale without a shift: latents get a mean square of 1 over all channels."""
        return float(1 / (self.std_C.square() + self.mean_C.square()).mean().sqrt())

    def scale_per_channel(self) -> tuple[Tensor, Tensor]:
        """(scale, shift) that give every channel mean 0 and standard deviation 1."""
        return 1 / self.std_C, self.mean_C


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    """Load published weights of a family that has their keys, or raise CheckpointError that names what does not fit."""
    load_same_keys(model, tensors, where=f"{model.config.name} weights")


def load_same_keys(model: VideoVAE, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Load a state dict with the keys of `model`, or raise CheckpointError that names what does not fit.

    A model built on the meta device takes the tensors themselves, and gets its latent scale anew.
    """
    was_meta = any(parameter.is_meta for parameter in model.parameters())
    load_fitting(model, tensors, where=where)
    if was_meta:
        model.reset_scaling()
