"""Models and tokenizers of transformers from local files: no download, no pickle, no foreign code, nothing guessed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from frameloom.core.errors import CheckpointError, MissingExtra
from frameloom.models.text.folders import EncoderFile, EncoderFolder


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Loading prints bars and reports of its own; settings are put back afterwards."""
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

    Weights that the class has no place for are left: a folder may hold the decoder or the image half as well.
    """
    try:
        with quiet_transformers():
            model, report = kind.from_pretrained(
                **_name_source(kind, folder), local_files_only=True, dtype=dtype, output_loading_info=True
            )
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


def _name_source(kind: Any, folder: EncoderFolder | EncoderFile) -> dict[str, Any]:
    if isinstance(folder, EncoderFile):
        config, tensors = kind.config_class.from_dict(dict(folder.config)), dict(folder.tensors)
        return {"pretrained_model_name_or_path": None, "config": config, "state_dict": tensors}
    return {"pretrained_model_name_or_path": folder.weights, "use_safetensors": True, "variant": folder.variant}
