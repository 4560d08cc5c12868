"""Caption dropout: the empty caption in place of some captions, for classifier-free guidance.

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.models.text.base import TextStates


def drop_text(states: TextStates, null: TextStates, words_BD: Tensor, pooled_B1: Tensor) -> TextStates:
    """`null`, the states of the empty caption, where `words_BD` is true, and its pooled vector where `pooled_B1` is.

    `words_BD` has a column for each feature, because those of several encoders can stand side by side, or one for all.
    A null text that is shorter than the captions is filled up by repeating its last token.
    """
    null_tokens = _repeat_last(null.tokens_BKD, states.tokens_BKD.shape[1])
    null_mask = _repeat_last(null.mask_BK, states.mask_BK.shape[1]).bool()
    kept_BK = states.mask_BK.bool() & ~words_BD.all(1, keepdim=True)
    return TextStates(
        tokens_BKD=torch.where(words_BD[:, None], null_tokens, states.tokens_BKD),
        mask_BK=kept_BK | (null_mask & words_BD.any(1, keepdim=True)),
        pooled_BD=torch.where(pooled_B1, null.pooled_BD, states.pooled_BD),
    )


def _repeat_last(values: Tensor, length: int) -> Tensor:
    missing = length - values.shape[1]
    if missing <= 0:
        return values[:, :length]
    return torch.cat([values, values[:, -1:].repeat_interleave(missing, dim=1)], dim=1)
