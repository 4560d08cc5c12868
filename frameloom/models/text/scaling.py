"""Whitening of text states per data set, so that low-variance directions are not ignored.

Captions of one set are alike: "left" and "right" move a sentence vector by a tenth of what a colour does, and a small
model learns the large differences first. Token states get mean 0 and spread 1 per feature; pooled vectors are whitened
along the directions in which the set's captions really differ. Measured once per run and kept with its checkpoints.

Shape letters: B batch, K text tokens, N tokens of all captions, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from frameloom.models.text.base import TextStates

# Smaller directions belong to single captions rather than to words; whitened, they would invite a model to learn
# captions by heart instead of their parts.
_MIN_SPREAD = 0.1


@dataclass(frozen=True)
class TextScaling:
    token_mean_D: Tensor
    token_spread_D: Tensor
    pooled_mean_D: Tensor
    pooled_map_DD: Tensor

    def apply(self, states: TextStates) -> TextStates:
        """Scaled states; padding stays zero."""
        scale_D = self.token_spread_D.reciprocal()
        scaled_BKD = torch.addcmul(-self.token_mean_D * scale_D, states.tokens_BKD, scale_D)
        return TextStates(
            tokens_BKD=scaled_BKD.mul_(states.mask_BK.to(scaled_BKD.dtype)[..., None]),
            mask_BK=states.mask_BK,
            pooled_BD=(states.pooled_BD - self.pooled_mean_D) @ self.pooled_map_DD,
        )

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint; `TextScaling(**tensors)` reads them back."""
        return {name: tensor.contiguous() for name, tensor in vars(self).items()}

    def to(self, device: torch.device) -> TextScaling:
        return TextScaling(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor] | None) -> TextScaling | None:
        return None if tensors is None else cls(**tensors)


def measure_scaling(states: TextStates) -> TextScaling:
    """The scaling of a set, from the states of its different captions, computed in double precision."""
    tokens_ND = states.tokens_BKD[states.mask_BK.bool()].double()
    pooled_BD = states.pooled_BD.double()
    mean_D = pooled_BD.mean(0)
    _, singular, directions = torch.linalg.svd(pooled_BD - mean_D, full_matrices=False)
    spread = singular / len(pooled_BD) ** 0.5
    kept = spread > _MIN_SPREAD * spread[:1]  # nothing to keep of pooled vectors of width 0
    basis = directions[kept]
    return TextScaling(
        token_mean_D=tokens_ND.mean(0).float(),
        token_spread_D=tokens_ND.std(0, correction=0).clamp_min(1e-6).float(),
        pooled_mean_D=mean_D.float(),
        # Spread 1 per feature after the map, as token states have, however few directions were kept.
        pooled_map_DD=(basis.T / spread[kept] @ basis * (basis.shape[1] / max(len(basis), 1)) ** 0.5).float(),
    )
