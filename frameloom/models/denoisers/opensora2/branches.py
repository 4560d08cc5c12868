"""The three predictions that Open-Sora 2.0's guidance draws apart, in one forward.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from frameloom.models.text.base import TextStates

Branches = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def three_branches(
    model: nn.Module,
    text: TextStates,
    negative: TextStates,
    beside_BCFHW: Tensor | None = None,
    *,
    told_guidance: float | None = None,
) -> Branches:
    """Predictions with (text and condition, negative text and condition, negative text alone).

    Without a condition the last two are the same. `told_guidance` is for models that are told their scale.
    """
    tokens = torch.cat([text.tokens_BKD, negative.tokens_BKD, negative.tokens_BKD])
    pooled = torch.cat([text.pooled_BD, negative.pooled_BD, negative.pooled_BD])
    beside = None if beside_BCFHW is None else torch.cat([beside_BCFHW, beside_BCFHW, torch.zeros_like(beside_BCFHW)])

    def predict(x_BCFHW: Tensor, timestep_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, time = x_BCFHW.repeat(3, 1, 1, 1, 1), timestep_B.repeat(3)
        guidance = None if told_guidance is None else torch.full_like(time, told_guidance)
        full, image_only, neither = cast(Tensor, model(x, time, tokens, pooled, beside, guidance)).chunk(3)
        return full, image_only, neither

    return predict
