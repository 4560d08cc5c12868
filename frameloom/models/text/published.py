"""What the `config.json` of the published CLIP text encoders says, for files that carry their weights alone."""

from __future__ import annotations

from typing import Any

_ALIKE: dict[str, Any] = {
    "model_type": "clip_text_model",
    "vocab_size": 49408,
    "max_position_embeddings": 77,
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    # As published: an old mark that stands for the largest id, see `clip.py`.
    "eos_token_id": 2,
    "pad_token_id": 1,
}
CLIP_CONFIGS: dict[str, dict[str, Any]] = {
    "clip_l": {
        "architectures": ["CLIPTextModel"],
        **_ALIKE,
        "hidden_act": "quick_gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "projection_dim": 768,
    },
    "clip_bigg": {
        "architectures": ["CLIPTextModelWithProjection"],
        **_ALIKE,
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "projection_dim": 1280,
    },
}
