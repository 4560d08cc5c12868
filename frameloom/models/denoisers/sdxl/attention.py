"""Attention of the UNet through the one door that all models share.

Shape letters: B batch, N queries, M keys, D width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from frameloom.models.layers.attention import attend


class AttendProcessor:
    """What diffusers' `Attention` calls. For layers without norms of their own, which is what the UNet has."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """The names of the arguments are diffusers'; text states, if any, are what is looked at."""
        context_BMD = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            layer(states).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for layer, states in ((attn.to_q, hidden_states), (attn.to_k, context_BMD), (attn.to_v, context_BMD))
        )
        attended_BND = attend(q, k, v, attention_mask).transpose(1, 2).flatten(2)
        result: Tensor = attn.to_out[0](attended_BND)
        return result
