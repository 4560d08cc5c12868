"""Write the folder of a diffusers pipeline: one folder for each part, tokenizers, the scheduler and the index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameloom.builders.published import PIPELINE_INDEX, read_table
from frameloom.core.logging import get_logger
from frameloom.interop.convert.target import write_sharded
from frameloom.weights.lazy_tensors import LazyTensors

__all__ = ["SCHEDULER", "PartFolder", "PipelineFolder", "Tokenizer", "write_pipeline_folder"]


SCHEDULER = "scheduler"
_SETTINGS = "tokenizer_config.json"
_log = get_logger(__name__)


@dataclass(frozen=True)
class PartFolder:
    """Weights of one part, what its `config.json` says, and the library that its class comes from."""

    name: str
    tensors: LazyTensors
    config: Mapping[str, Any]
    library: str
    kind: str

    @property
    def stem(self) -> str:
        return "diffusion_pytorch_model" if self.library == "diffusers" else "model"


@dataclass(frozen=True)
class Tokenizer:
    """A folder with a tokenizer to copy, or None; `max_length` is for tokenizers that do not say how much they read."""

    place: Path | None
    max_length: int


@dataclass(frozen=True)
class PipelineFolder:
    """`kind` is the class of the pipeline, `settings` its own arguments; `absent` parts are listed without a class."""

    kind: str
    parts: Sequence[PartFolder]
    scheduler: Mapping[str, Any]
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)
    absent: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tensors(self) -> int:
        return sum(len(part.tensors.pending) for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.tensors.num_bytes for part in self.parts)


def write_pipeline_folder(
    folder: Path,
    pipeline: PipelineFolder,
    *,
    max_bytes: int,
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> dict[str, str]:
    """Write into `folder`, which must be there; gives the digests of the weights by their place inside of it."""
    digests: dict[str, str] = {}
    for part in pipeline.parts:
        written = write_sharded(
            folder / part.name, part.tensors, stem=part.stem, max_bytes=max_bytes, config=part.config, advance=advance
        )
        digests |= {f"{part.name}/{path.name}": digest for path, digest in written.items()}
    kinds = {name: _copy_tokenizer(name, one, folder) for name, one in pipeline.tokenizers.items()}
    _write_json(folder / SCHEDULER / "scheduler_config.json", pipeline.scheduler)
    _write_json(folder / PIPELINE_INDEX, _describe(pipeline, kinds))
    return digests


def _describe(pipeline: PipelineFolder, tokenizers: Mapping[str, str | None]) -> dict[str, Any]:
    from diffusers import __version__

    places: dict[str, list[str | None]] = {part.name: [part.library, part.kind] for part in pipeline.parts}
    places |= {name: ["transformers", kind] if kind else [None, None] for name, kind in tokenizers.items()}
    places |= {name: [None, None] for name in pipeline.absent}
    places[SCHEDULER] = ["diffusers", str(pipeline.scheduler["_class_name"])]
    first = {"_class_name": pipeline.kind, "_diffusers_version": __version__, **pipeline.settings}
    return first | dict(sorted(places.items()))


def _copy_tokenizer(name: str, tokenizer: Tokenizer, out: Path) -> str | None:
    """The tokenizer files of a folder; gives their class, or None where there is nothing to copy."""
    place = tokenizer.place
    if place is None or not place.is_dir():
        _log.warning("no %s: a pipeline needs one; name a folder that holds it, or copy it into %s", name, name)
        return None
    (out / name).mkdir()
    for file in sorted(place.iterdir()):
        if file.is_file() and _is_of_tokenizer(file):
            shutil.copyfile(file, out / name / file.name)
    settings = read_table(place / _SETTINGS)
    # Without this number transformers takes it for endless, and diffusers pads to it.
    _write_json(out / name / _SETTINGS, {"model_max_length": tokenizer.max_length, **settings})
    return str(settings.get("tokenizer_class") or _guess_kind(place))


def _guess_kind(place: Path) -> str:
    kinds = {"tokenizer.json": "PreTrainedTokenizerFast", "spiece.model": "T5Tokenizer", "merges.txt": "CLIPTokenizer"}
    return next((kind for name, kind in kinds.items() if (place / name).is_file()), "AutoTokenizer")


def _is_of_tokenizer(file: Path) -> bool:
    """Some folders hold the weights of an encoder as well."""
    names = ("vocab.json", "merges.txt", "spiece.model", "special_tokens_map.json", "added_tokens.json")
    return file.name in names or (file.name.startswith("tokenizer") and file.suffix == ".json")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(content), indent=2) + "\n")
