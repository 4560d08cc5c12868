"""The empty caption in place of some captions, so that a model also learns to do without.

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.models.text import TextStates


def drop_text(
    states: TextStates, null: TextStates, dropped_B: Tensor, dropped_pooled_B: Tensor | None = None
) -> TextStates:
    """Token states of the samples in `dropped_B` become those of `null`, pooled vectors those in `dropped_pooled_B`.

    Open-Sora 2.0 draws the two apart; without a second draw both go together. A null text that is shorter than the
    captions is filled up by repeating its last token.
    """
    pooled_B = dropped_B if dropped_pooled_B is None else dropped_pooled_B
    null_tokens = _repeat_last(null.tokens_BKD, states.tokens_BKD.shape[1])
    null_mask = _repeat_last(null.mask_BK, states.mask_BK.shape[1])
    return TextStates(
        tokens_BKD=torch.where(dropped_B[:, None, None], null_tokens, states.tokens_BKD),
        mask_BK=torch.where(dropped_B[:, None], null_mask, states.mask_BK),
        pooled_BD=torch.where(pooled_B[:, None], null.pooled_BD, states.pooled_BD),
    )


def _repeat_last(values: Tensor, length: int) -> Tensor:
    missing = length - values.shape[1]
    if missing <= 0:
        return values[:, :length]
    return torch.cat([values, values[:, -1:].repeat_interleave(missing, dim=1)], dim=1)
