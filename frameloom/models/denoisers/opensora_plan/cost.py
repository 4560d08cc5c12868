"""What a layer costs: floating point operations of its forward pass, by formula.

With N tokens, K text tokens, width D and k = sparse_n: projections and MLP are linear in N; the scores and the weighted
sums of values take 4 N^2 D, and 4 N^2 D / k in a skiparse layer.
"""

from __future__ import annotations

from frameloom.models.denoisers.opensora_plan.config import OpenSoraPlanConfig


def attention_flops(config: OpenSoraPlanConfig, layer: int, num_tokens: int) -> int:
    """Self-attention of one sample, without its projections."""
    share = 1 if config.pattern(layer) == "full" else config.sparse_n
    return 4 * num_tokens**2 * config.hidden_size // share


def layer_flops(config: OpenSoraPlanConfig, layer: int, num_tokens: int, num_text: int) -> int:
    """A whole block for one sample: self-attention, cross-attention, MLP."""
    width = config.hidden_size
    self_projections = 8 * num_tokens * width**2
    cross = 4 * (num_tokens + num_text) * width**2 + 4 * num_tokens * num_text * width
    mlp = 16 * num_tokens * width**2
    return attention_flops(config, layer, num_tokens) + self_projections + cross + mlp
