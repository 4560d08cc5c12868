"""Pipeline folders of diffusers, and SDXL in a single file of Stability's layout, converted one tensor at a time.

    sd_xl_base_1.0.safetensors <-> model_index.json scheduler/ unet/ vae/ text_encoder/ text_encoder_2/
                                   tokenizer/ tokenizer_2/

Weights are exact both ways. Small tensors that no file of the folders holds (the `logit_scale` of bigG, old
position ids) stay in the notes of the file that lies nearest to them and come back from there.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frameloom.builders.published import PIPELINE_INDEX, read_pipeline_index, read_table
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.logging import get_logger
from frameloom.interop.convert.files import Source, open_source, write_sharded
from frameloom.models.denoisers.sdxl.single_file import Part, from_single_file, map_key, read_unet_names, to_single_file
from frameloom.models.denoisers.sdxl.weights import (
    CLASSES,
    TOKENIZERS,
    check_description,
    describe_scheduler,
    published_descriptions,
)
from frameloom.weights.files import CONFIG, read_config
from frameloom.weights.lazy_tensors import LazyTensors, PendingTensor, to_deferred, to_pending

SCHEDULER = "scheduler"
_SETTINGS = "tokenizer_config.json"
_UNKEPT = "frameloom.unkept"
_MOST_UNKEPT_BYTES = 65_536
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


Tokenizer = tuple[Path | None, int]
"""a folder with a tokenizer to copy, or None; and how many tokens it reads, for tokenizers that do not say so"""


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
    def num_bytes(self) -> int:
        return sum(part.tensors.num_bytes for part in self.parts)


def open_pipeline(path: Path) -> Source:
    """The parts of a pipeline under the names of a single file."""
    sources = {part: open_source(path / part) for part in CLASSES if (path / part / CONFIG).is_file()}
    if "unet" not in sources:
        raise CheckpointError(f"{path}: has no unet/{CONFIG}; copy the whole pipeline again")
    is_refiner = "text_encoder" not in sources and bool(read_pipeline_index(path).get("requires_aesthetics_score"))
    single = to_single_file({part: to_deferred(source.tensors) for part, source in sources.items()}, refiner=is_refiner)
    pending = to_pending(single, where=str(path)).pending
    notes = sources["unet"].tensors.metadata
    for source in sources.values():
        pending |= _read_unkept(source.tensors.metadata, where=str(source.path))
    kept = {name: note for name, note in notes.items() if name != _UNKEPT}
    files = tuple(file for source in sources.values() for file in (*source.files, source.path.parent / CONFIG))
    return Source(path, LazyTensors(pending, metadata=kept), (*files, path / PIPELINE_INDEX), "model")


def split_pipeline(tensors: LazyTensors, *, config: Path | None, where: str) -> PipelineFolder:
    """The parts of a single file; `config` is a folder with tokenizers, the scheduler, and descriptions of parts that
    are not the published ones."""
    names = read_unet_names(tensors)
    mapped = {key: map_key(key, names) for key in tensors}
    parts = from_single_file(to_deferred(tensors))
    missing = [part for part in ("unet", "vae") if part not in parts]
    if missing:
        raise CheckpointError(
            f"{where}: has no {' and no '.join(missing)}, so it is no whole SDXL model; choose a file of the whole "
            "model, or convert this part by itself with --family"
        )
    unkept: dict[Part, dict[str, Tensor]] = {}
    for key, home in mapped.items():
        if home is not None and not home[1]:
            unkept.setdefault(home[0], {})[key] = tensors[key]
    pending = {part: _note(to_pending(one, where=where), unkept.get(part, {})) for part, one in parts.items()}
    pending["unet"].metadata.update(tensors.metadata)
    described = {part: _find_description(part, parts[part], config, where=where) for part in CLASSES if part in parts}
    tokenizers = {
        name: (config / name if config is not None else None, described[part]["max_position_embeddings"])
        for name, part in TOKENIZERS.items()
        if part in described
    }
    file = config / SCHEDULER / "scheduler_config.json" if config is not None else None
    scheduler = read_table(file) if file is not None and file.is_file() else describe_scheduler()
    return arrange_pipeline(pending, described, tokenizers, scheduler=scheduler)


def arrange_pipeline(
    tensors: Mapping[Part, LazyTensors],
    descriptions: Mapping[Part, Mapping[str, Any]],
    tokenizers: Mapping[str, Tokenizer],
    *,
    scheduler: Mapping[str, Any],
    force_zeros: bool | None = None,
) -> PipelineFolder:
    """The folder of an SDXL pipeline; without a first text encoder it is that of a refiner.

    `force_zeros` says whether the empty negative prompt is zeros; None: as published.
    """
    is_refiner = "text_encoder" not in tensors and "text_encoder_2" in tensors
    settings = {"force_zeros_for_empty_prompt": not is_refiner if force_zeros is None else force_zeros}
    absent = [name for name in (*CLASSES, *TOKENIZERS) if name not in tensors and name not in tokenizers]
    return PipelineFolder(
        "StableDiffusionXLImg2ImgPipeline" if is_refiner else "StableDiffusionXLPipeline",
        [PartFolder(part, tensors[part], descriptions[part], *CLASSES[part]) for part in CLASSES if part in tensors],
        scheduler,
        tokenizers,
        [*absent, *([] if is_refiner else ["image_encoder", "feature_extractor"])],
        settings | ({"requires_aesthetics_score": True} if is_refiner else {}),
    )


def _find_description(
    part: Part, tensors: Mapping[str, Tensor], config: Path | None, *, where: str
) -> Mapping[str, Any]:
    given = config / part if config is not None else None
    if given is not None and (given / CONFIG).is_file():
        content = read_config(given)
        check_description(part, content, tensors, where=f"{where}: {part} as {given / CONFIG} describes it")
        return content
    for content in published_descriptions(part):
        with suppress(CheckpointError):
            check_description(part, content, tensors, where=f"{where}: {part}")
            return content
    raise ConfigError(
        f"{where}: its {part} is none of the published sizes, and weights alone do not tell the rest; give a folder "
        f"with {part}/{CONFIG} as --config"
    )


def _note(tensors: LazyTensors, unkept: Mapping[str, Tensor]) -> LazyTensors:
    """Put tensors without a place into the notes."""
    entries = {}
    for name, tensor in unkept.items():
        if tensor.nbytes > _MOST_UNKEPT_BYTES:
            raise CheckpointError(f"'{name}' of {tensor.nbytes:,} bytes has no place in a pipeline; leave it out first")
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data": base64.b64encode(raw).decode()}
    notes = {_UNKEPT: json.dumps(entries, sort_keys=True)} if entries else {}
    return LazyTensors(tensors.pending, metadata=notes)


def _read_unkept(metadata: Mapping[str, str], *, where: str) -> dict[str, PendingTensor]:
    found = {}
    try:
        for name, entry in json.loads(metadata.get(_UNKEPT, "{}")).items():
            dtype = getattr(torch, entry["dtype"])
            raw = bytearray(base64.b64decode(entry["data"]))
            tensor = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(entry["shape"])
            found[name] = PendingTensor(dtype, tuple(tensor.shape), partial(tensor.clone))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{where}: its note {_UNKEPT} is damaged ({error}); convert the model again") from error
    return found


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
    _write_json(folder / SCHEDULER / "scheduler_config.json", pipeline.scheduler)

    from diffusers import __version__

    classes: dict[str, list[str | None]] = {part.name: [part.library, part.kind] for part in pipeline.parts}
    for name, tokenizer in pipeline.tokenizers.items():
        kind = _copy_tokenizer(name, tokenizer, folder)
        classes[name] = ["transformers", kind] if kind else [None, None]
    classes |= {name: [None, None] for name in pipeline.absent}
    classes[SCHEDULER] = ["diffusers", str(pipeline.scheduler["_class_name"])]
    first = {"_class_name": pipeline.kind, "_diffusers_version": __version__, **pipeline.settings}
    _write_json(folder / PIPELINE_INDEX, first | dict(sorted(classes.items())))
    return digests


def _copy_tokenizer(name: str, tokenizer: Tokenizer, out: Path) -> str | None:
    """The tokenizer files of a folder; gives their class, or None where there is nothing to copy."""
    source, max_length = tokenizer
    if source is None or not source.is_dir():
        _log.warning("no %s: a pipeline needs one; name a folder that holds it, or copy it into %s", name, name)
        return None
    (out / name).mkdir()
    # Some folders hold the weights of an encoder as well.
    names = ("vocab.json", "merges.txt", "spiece.model", "special_tokens_map.json", "added_tokens.json")
    for file in sorted(source.iterdir()):
        is_table = file.name.startswith("tokenizer") and file.suffix == ".json"
        if file.is_file() and (file.name in names or is_table):
            shutil.copyfile(file, out / name / file.name)
    settings = read_table(source / _SETTINGS)
    # Without this number transformers takes it for endless, and diffusers pads to it.
    _write_json(out / name / _SETTINGS, {"model_max_length": max_length, **settings})
    kinds = {"tokenizer.json": "PreTrainedTokenizerFast", "spiece.model": "T5Tokenizer", "merges.txt": "CLIPTokenizer"}
    guess = next((kind for name, kind in kinds.items() if (source / name).is_file()), "AutoTokenizer")
    return str(settings.get("tokenizer_class") or guess)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(content), indent=2) + "\n")
