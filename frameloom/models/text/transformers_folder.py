"""Local folders of text encoders: weights, configuration and tokenizer, without download, pickle or remote code.

Two layouts are known: one folder with everything in it, and the folders of a diffusers pipeline, `text_encoder` with
`tokenizer`, `text_encoder_2` with `tokenizer_2` and so on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, ConfigError, MissingExtra
from frameloom.core.files import digest_file, digest_value
from frameloom.core.text_files import read_object

CONFIG = "config.json"
# Any one of these groups of files makes a tokenizer.
TOKENIZERS = (("tokenizer.json",), ("spiece.model",), ("vocab.json", "merges.txt"))
_TOKENIZER_FILES = (
    *("tokenizer.json", "spiece.model", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
_VARIANTS = (None, "fp16", "bf16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class EncoderFolder:
    """`weights` holds config.json and `files`, the safetensors files in the published dtype `variant`."""

    weights: Path
    files: tuple[Path, ...]
    variant: str | None
    tokenizer: Path

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file that the states depend on, by its role rather than by its path."""
        parts = [self.weights / CONFIG, *self.files]
        named = {f"weights/{path.name}": path for path in parts}
        return {name: digest_file(path) for name, path in named.items()} | digest_tokenizer(self.tokenizer)


@dataclass(frozen=True)
class EncoderFile:
    """An encoder in a single file beside other parts of a model: `weights` is that file.

    `tensors` are those of this encoder under transformers' names, read when they are asked for; `config` is what its
    config.json would say.
    """

    weights: Path
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    tokenizer: Path

    def digests(self) -> dict[str, str]:
        """Of this encoder's tensors alone: what else is in the file does not matter to the states."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = self.tensors[name].contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        words = digest_tokenizer(self.tokenizer)
        return {"weights/config.json": digest_value(dict(self.config)), "weights/tensors": digest.hexdigest(), **words}


def list_tokenizer(folder: Path) -> list[Path]:
    """The files of a folder that make its tokenizer."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def digest_tokenizer(folder: Path) -> dict[str, str]:
    return {f"tokenizer/{path.name}": digest_file(path) for path in list_tokenizer(folder)}


def holds_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in group) for group in TOKENIZERS)


def find_folder(path: Path | None, *, encoder: str, kinds: Collection[str], subfolders: Sequence[str]) -> EncoderFolder:
    """The parts of an encoder below `path`, whose config.json must name one of `kinds` as its model type."""
    if path is None:
        raise ConfigError(
            f"text encoder {encoder}: its weights come with no package; give the folder that holds them as path"
        )
    weights = _find_weights(path, encoder, kinds, subfolders)
    files, variant = _find_files(weights, encoder)
    return EncoderFolder(weights, files, variant, _find_tokenizer(weights, encoder))


def _find_weights(path: Path, encoder: str, kinds: Collection[str], subfolders: Sequence[str]) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; name the folder of the text encoder {encoder}")
    candidates = [path] if (path / CONFIG).is_file() else [path / name for name in subfolders]
    configs = {candidate: _read_json(candidate / CONFIG) for candidate in candidates if (candidate / CONFIG).is_file()}
    found = {candidate: str(config.get("model_type", "no model_type")) for candidate, config in configs.items()}
    if not found:
        inside = " or ".join(f"{name}/{CONFIG}" for name in subfolders)
        raise CheckpointError(
            f"{path}: has neither {CONFIG} nor {inside}; name the folder of the text encoder {encoder}"
        )
    for candidate, kind in found.items():
        if kind in kinds:
            return candidate
    listed = ", ".join(f"{candidate} holds '{kind}'" for candidate, kind in found.items())
    raise CheckpointError(
        f"{path}: the text encoder {encoder} is a model of type {' or '.join(sorted(kinds))}, but {listed}; "
        "name another folder or another encoder"
    )


def _find_files(weights: Path, encoder: str) -> tuple[tuple[Path, ...], str | None]:
    for variant in _VARIANTS:
        mark = f".{variant}" if variant else ""
        index = weights / f"model.safetensors.index{mark}.json"
        if (whole := weights / f"model{mark}.safetensors").is_file():
            return (whole,), variant
        if index.is_file():
            return _read_index(index), variant
    pickles = sorted(found.name for pattern in _PICKLES for found in weights.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{weights}: has its weights as {', '.join(pickles)} only, a pickle, which can run code when opened; "
            f"convert it: frameloom convert {weights / pickles[0]} {weights / 'model.safetensors'}"
        )
    raise CheckpointError(
        f"{weights}: has no model.safetensors and no model.safetensors.index.json; copy {encoder} again"
    )


def _read_index(index: Path) -> tuple[Path, ...]:
    placed = _read_json(index).get("weight_map")
    names = sorted(set(placed.values())) if isinstance(placed, dict) else []
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{index}: does not list the files that hold the weights; copy the folder again")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{index.parent}: {', '.join(missing)} missing; copy the folder again")
    return tuple(index.parent / name for name in names)


def _find_tokenizer(weights: Path, encoder: str) -> Path:
    sibling = weights.with_name(weights.name.replace("text_encoder", "tokenizer"))
    for candidate in (weights, sibling):
        if holds_tokenizer(candidate):
            return candidate
    files = ", ".join(" with ".join(group) for group in TOKENIZERS)
    raise CheckpointError(
        f"{weights}: no tokenizer here or in {sibling} ({files}); copy that of the text encoder {encoder} there"
    )


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, error=CheckpointError, fix="copy it again")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences the progress bars and reports of loading; settings are restored afterwards."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder: as its tokenizer.json says; without one, built from the older files."""
    # Its threads do not survive a fork, and loader workers fork; a few short captions do not need them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with quiet_transformers():
        from transformers import CLIPTokenizer, PreTrainedTokenizerFast, T5Tokenizer

        if (folder / "tokenizer.json").is_file():
            kind: Any = PreTrainedTokenizerFast
        elif (folder / "spiece.model").is_file():
            if find_spec("sentencepiece") is None:
                raise MissingExtra("sentencepiece, which reads spiece.model,", "t5")
            kind = T5Tokenizer
        else:
            kind = CLIPTokenizer
        try:
            return kind.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder}: the tokenizer cannot be read ({error}); copy it again") from error


def load_model(kind: Any, folder: EncoderFolder | EncoderFile, dtype: torch.dtype, *, advice: str = "") -> nn.Module:
    """A frozen model of the transformers class `kind`; weights that are missing are an error, never drawn at random.

    Weights that the class does not have are left: a folder may hold the decoder or the image half as well.
    """
    source: dict[str, Any]
    if isinstance(folder, EncoderFile):
        config, tensors = kind.config_class.from_dict(dict(folder.config)), dict(folder.tensors)
        source = {"pretrained_model_name_or_path": None, "config": config, "state_dict": tensors}
    else:
        source = {"pretrained_model_name_or_path": folder.weights, "use_safetensors": True, "variant": folder.variant}
    try:
        with quiet_transformers():
            model, report = kind.from_pretrained(**source, local_files_only=True, dtype=dtype, output_loading_info=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder.weights}: the weights cannot be read ({error}); copy them again") from error
    missing = [*sorted(report["missing_keys"]), *(str(item) for item in report["mismatched_keys"])]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(
            f"{folder.weights}: {kind.__name__} finds no weights for {shown}; {advice or 'copy the folder again'}"
        )
    model.eval().requires_grad_(False)
    return model  # type: ignore[no-any-return]
