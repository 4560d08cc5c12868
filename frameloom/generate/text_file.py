"""Text encoders out of a single file of a whole SDXL model, with a tokenizer from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from frameloom.checkpoint.deferred import to_deferred, to_pending
from frameloom.checkpoint.lazy_tensors import LazyTensors
from frameloom.checkpoint.weight_files import CONFIG, find_weights, open_weights, read_config, refuse_pickle
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.models.denoisers.sdxl.pipeline import ENCODERS, check_description, published_descriptions
from frameloom.models.denoisers.sdxl.single_file import PREFIXES, Part, from_single_file
from frameloom.models.text.base import TextEncoder
from frameloom.models.text.clip import build_from_file
from frameloom.models.text.folders import EncoderFile, holds_tokenizer

_PARTS: dict[str, Part] = {name: part for part, name in ENCODERS.items()}
_TOKENIZERS = {"clip_l": ("tokenizer",), "clip_bigg": ("tokenizer_2", "tokenizer")}


def build_from_single_file(
    encoder: str, max_length: int, path: Path, options: Mapping[str, Any], *, tokenizer: str | None
) -> TextEncoder:
    """The encoder of a recipe whose `path` is a file."""
    return build_from_file(encoder, max_length, open_text_file(path, encoder=encoder, tokenizer=tokenizer), options)


def open_text_file(path: Path, *, encoder: str, tokenizer: str | None) -> EncoderFile:
    """The encoder in the file `path`; only headers are read now.

    `tokenizer` is the folder of the tokenizer, or of a whole pipeline; it may also hold the encoder's config.json,
    which only an encoder of another size than the published one needs.
    """
    if encoder not in _PARTS:
        raise ConfigError(
            f"text encoder {encoder}: {path} is a file, but only {' and '.join(_PARTS)} are parts of single files; "
            f"name the folder of {encoder}"
        )
    found = find_weights(path)
    refuse_pickle(found)
    tensors = _take_part(open_weights(found), _PARTS[encoder], where=str(path))
    is_given, folder = tokenizer is not None, path.parent if tokenizer is None else Path(tokenizer)
    words = _find_tokenizer(path, encoder, folder, is_given)
    config = _find_config(_PARTS[encoder], to_deferred(tensors), folder, is_given=is_given, where=str(path))
    return EncoderFile(path, tensors, config, words)


def _take_part(tensors: LazyTensors, part: Part, *, where: str) -> LazyTensors:
    prefixes = tuple(prefix for prefix, owner in PREFIXES.items() if owner == part)
    own = {name: one for name, one in tensors.untied().pending.items() if name.startswith(prefixes)}
    if not own:
        raise CheckpointError(
            f"{where}: holds no {part}, no tensor begins with {' or '.join(prefixes)}; choose a file of the whole "
            "SDXL model, or name a folder"
        )
    return to_pending(from_single_file(to_deferred(LazyTensors(own)))[part], where=where)


def _find_config(
    part: Part, tensors: Mapping[str, Tensor], folder: Path, *, is_given: bool, where: str
) -> Mapping[str, Any]:
    places = [folder / part, *([folder] if is_given else [])]
    for place in places:
        if (place / CONFIG).is_file() and read_config(place).get("model_type") == "clip_text_model":
            content = read_config(place)
            check_description(part, content, tensors, where=f"{where}: {part} as {place / CONFIG} describes it")
            return content
    content = published_descriptions(part)[0]
    try:
        check_description(part, content, tensors, where=f"{where}: {part}")
    except CheckpointError as error:
        raise CheckpointError(
            f"{where}: its {part} has not the published size, and weights alone do not tell the rest; put its {CONFIG} "
            f"into {places[0]}"
        ) from error
    return content


def _find_tokenizer(path: Path, encoder: str, folder: Path, is_given: bool) -> Path:
    places = [*([folder] if is_given else []), *(folder / name for name in _TOKENIZERS[encoder])]
    for place in places:
        if holds_tokenizer(place):
            return place
    looked = " or ".join(str(place) for place in places)
    raise CheckpointError(
        f"{path}: holds the weights of {encoder}, but no tokenizer is in {looked}; name the folder of the tokenizer as "
        "tokenizer of this text encoder (that of openai/clip-vit-large-patch14 fits SDXL)"
    )
