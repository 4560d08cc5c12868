"""Mean and deviation of the latents of many clips, channel by channel, and the scaling that follows from them.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.models.vaes.base import Moments


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
