"""What every text encoder offers: captions in, states out, and a digest that a cache can be checked against.

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TextStates:
    """What a denoiser sees of its captions.

    `tokens_BKD` is zero where `mask_BK` is False (padding); `pooled_BD` sums up the whole caption.
    """

    tokens_BKD: Tensor
    mask_BK: Tensor
    pooled_BD: Tensor

    def to(self, device: torch.device | str) -> TextStates:
        return TextStates(self.tokens_BKD.to(device), self.mask_BK.to(device), self.pooled_BD.to(device))


class TextEncoder(ABC):
    """A frozen text encoder. `width` is that of the token states, `pooled_width` that of the pooled vector."""

    name: str
    width: int
    pooled_width: int
    max_length: int

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of everything that the states depend on besides the caption: weights, config, `max_length`."""

    @abstractmethod
    def encode(self, captions: Sequence[str]) -> TextStates:
        """States of the captions, K = `max_length`, without gradients. The empty caption is the null prompt."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """Move the encoder; its states then live on `device`."""
