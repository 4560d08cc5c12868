"""The interface of video autoencoders, and the statistics of their latents.

Shape letters: B batch, C channels, F frames, H height, W width, N cells of a batch.

Pixels are in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from frameloom.core.errors import DataError
from frameloom.models.layers.tiles import Cuts
from frameloom.models.state_dict import load_fitting

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


class VideoVAE(nn.Module):
    """Base of the autoencoders: geometry, latent scaling, and the two directions that a subclass fills in.

    `strides` are (frames, height, width). A causal model takes its first frame alone, so its clip lengths
    are 1, 1 + stride, 1 + 2 * stride, ...
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        *,
        strides: tuple[int, int, int],
        latent_channels: int,
        causal: bool,
        scale: Sequence[float],
        shift: Sequence[float],
    ) -> None:
        super().__init__()
        self.strides = strides
        self.latent_channels = latent_channels
        self.causal = causal
        self._scaling = (tuple(scale), tuple(shift))
        self.reset_scaling()

    def reset_scaling(self) -> None:
        """Write the latent scale and shift again, for instance after a build on the meta device."""
        scale, shift = self._scaling
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32), persistent=False)
        self.register_buffer("shift", torch.tensor(shift, dtype=torch.float32), persistent=False)

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        raise NotImplementedError

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        """Pixels of unnormalised latents."""
        raise NotImplementedError

    def encode_cuts(self) -> Cuts:
        """How clips are cut before the encoder sees them; a model without tiles sees a batch as a whole."""
        return Cuts()

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
        return []

    def normalize(self, latent_BCFHW: Tensor) -> Tensor:
        """What a denoiser sees: (latent - shift) * scale, channel by channel."""
        return (latent_BCFHW - self._per_channel(self.shift)) * self._per_channel(self.scale)

    def denormalize(self, latent_BCFHW: Tensor) -> Tensor:
        return latent_BCFHW / self._per_channel(self.scale) + self._per_channel(self.shift)

    def latent_frames(self, pixel_frames: int) -> int:
        """Latent frames of a clip; DataError when no clip of that length can be encoded."""
        stride = self.strides[0]
        lead = 1 if self.causal else 0
        if pixel_frames < 1 or (pixel_frames - lead) % stride:
            rule = f"1 more than a multiple of {stride}" if self.causal else f"a multiple of {stride}"
            raise DataError(f"clip of {pixel_frames} frames: this autoencoder takes {rule}; cut or pad the clip")
        return lead + (pixel_frames - lead) // stride

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

    @staticmethod
    def _per_channel(values_C: Tensor) -> Tensor:
        return values_C.view(1, -1, 1, 1, 1)


class LatentStatistics:
    """Adds up latents as a denoiser sees them, so with the noise of the posterior; in float64, one pass, no latent
    is kept."""

    def __init__(self, num_channels: int) -> None:
        self.count = 0
        self._mean_C = torch.zeros(num_channels, dtype=torch.float64)
        self._squares_C = torch.zeros(num_channels, dtype=torch.float64)
        self._posterior_C = torch.zeros(num_channels, dtype=torch.float64)

    def add(self, moments: Moments) -> None:
        """All cells of a batch; deviations are merged as Chan et al. (1983) do it, without cancellation."""
        mean_CN = moments.mean_BCFHW.detach().transpose(0, 1).flatten(1).double().cpu()
        variance_CN = moments.logvar_BCFHW.detach().transpose(0, 1).flatten(1).double().exp().cpu()
        num_cells, center_C = mean_CN.shape[1], mean_CN.mean(1)
        total, gap_C = self.count + num_cells, center_C - self._mean_C
        self._squares_C += (mean_CN - center_C[:, None]).square().sum(1)
        self._squares_C += gap_C.square() * (self.count * num_cells / total)
        self._mean_C += gap_C * (num_cells / total)
        self._posterior_C += variance_CN.sum(1)
        self.count = total

    @property
    def mean_C(self) -> Tensor:
        return self._mean_C.clone()

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
        return float(1 / (self.std_C.square() + self._mean_C.square()).mean().sqrt())

    def scale_per_channel(self) -> tuple[Tensor, Tensor]:
        """(scale, shift) that give every channel mean 0 and deviation 1."""
        return 1 / self.std_C, self.mean_C


def load_same_keys(model: VideoVAE, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Load a state dict with the keys of `model`, or raise CheckpointError that names what does not fit.

    A model built on the meta device takes the tensors themselves, and gets its latent scale anew.
    """
    was_meta = any(parameter.is_meta for parameter in model.parameters())
    load_fitting(model, tensors, where=where)
    if was_meta:
        model.reset_scaling()
