"""The encoder of BERT, as all-MiniLM-L6-v2 has it: token states after the last layer, without the pooler.

Written out here because the embedded encoder needs nothing else of transformers, whose import takes longer than a short
command.

Shape letters: B batch, K text tokens, D width, H heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.attention import attend_tokens


@dataclass(frozen=True)
class BertConfig:
    """The numbers of its config.json that its arithmetic depends on."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float


class Table(nn.Module):
    """Vectors to look up. `nn.Embedding` draws random ones first, which on the meta device imports half of torch."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps)
        self.mlp_in = nn.Linear(width, config.intermediate_size)
        self.mlp_out = nn.Linear(config.intermediate_size, width)
        self.mlp_norm = nn.LayerNorm(width, eps)

    def forward(self, x_BKD: Tensor, mask_B11K: Tensor) -> Tensor:
        q_BKHE, k_BKHE, v_BKHE = (part.unflatten(-1, (self.num_heads, -1)) for part in self.qkv(x_BKD).chunk(3, -1))
        seen_BKD = attend_tokens(q_BKHE, k_BKHE, v_BKHE, mask_B11K)
        x_BKD = self.attention_norm(x_BKD + self.attention_out(seen_BKD))
        return self.mlp_norm(x_BKD + self.mlp_out(F.gelu(self.mlp_in(x_BKD))))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """Texts of one segment: of the two segment vectors the first is used."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.words = Table(config.vocab_size, width)
        self.positions = Table(config.max_position_embeddings, width)
        self.segments = Table(2, width)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, ids_BK: Tensor, mask_BK: Tensor) -> Tensor:
        positions_K = torch.arange(ids_BK.shape[1], device=ids_BK.device)
        segments_BK = self.segments(torch.zeros_like(ids_BK))
        x_BKD = self.norm(self.words(ids_BK) + segments_BK + self.positions(positions_K))
        for layer in self.layers:
            x_BKD = layer(x_BKD, mask_BK[:, None, None])
        return x_BKD  # type: ignore[no-any-return]


_TABLES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
_LAYER = {
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_in": "intermediate.dense",
    "mlp_out": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def build_bert(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Bert:
    """From the values of its config.json and the tensors of its file, by their published names; frozen."""
    config = BertConfig(**{name: values[name] for name in BertConfig.__dataclass_fields__})
    names = dict(_TABLES)
    for index in range(config.num_hidden_layers):
        names |= {f"layers.{index}.{ours}": f"encoder.layer.{index}.{theirs}" for ours, theirs in _LAYER.items()}
    with torch.device("meta"):
        model = Bert(config)
    parts = {}
    for key in model.state_dict():
        module, _, kind = key.rpartition(".")
        if module.endswith(".qkv"):
            place = f"encoder.layer.{module.split('.')[1]}.attention.self"
            parts[key] = torch.cat([tensors[f"{place}.{part}.{kind}"] for part in ("query", "key", "value")])
        else:
            parts[key] = tensors[f"{names[module]}.{kind}"]
    model.load_state_dict(parts, assign=True)
    return model.eval().requires_grad_(False)
