"""Attention processor that routes the attention of diffusers' models through `attend_tokens`.

Shape letters: B batch, C channels, H height, W width, N queries, M keys, D width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from frameloom.models.layers.attention.attention import attend_tokens


class AttendProcessor:
    """What diffusers' `Attention` calls, in a UNet and in an autoencoder."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """The names of the arguments are diffusers'; text states, if any, are what is looked at."""
        if attn.group_norm is None:
            context_BMD = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            return _attend(attn, hidden_states, context_BMD, attention_mask)
        # An autoencoder: the cells of a picture [B, C, H, W], with a norm before and a residual around.
        cells_BNC = attn.group_norm(hidden_states.flatten(2)).transpose(1, 2)
        attended_BNC = _attend(attn, cells_BNC, cells_BNC, None)
        # Named first, its order in memory (channels last) is that of the sum: convolutions after it are faster in it.
        return attended_BNC.transpose(1, 2).reshape(hidden_states.shape) + hidden_states


def _attend(attn: Any, x_BND: Tensor, context_BMD: Tensor, mask: Tensor | None) -> Tensor:
    layers = ((attn.to_q, x_BND), (attn.to_k, context_BMD), (attn.to_v, context_BMD))
    q, k, v = (layer(states).unflatten(-1, (attn.heads, -1)) for layer, states in layers)
    result: Tensor = attn.to_out[0](attend_tokens(q, k, v, mask))
    return result
