"""Files of learnt words (textual inversion): the vectors of each text encoder, named as users of diffusers know them.

clip_l  [vectors, width of CLIP-L]      clip_g  [vectors, width of OpenCLIP bigG]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from frameloom.checkpoint.folders import replace_folder
from frameloom.checkpoint.lazy_tensors import defer_tensors
from frameloom.checkpoint.model_folder import CONFIG, EXPORT
from frameloom.checkpoint.safetensors_file import open_safetensors, write_safetensors
from frameloom.core.errors import CheckpointError
from frameloom.generate.parts import TextPipeline
from frameloom.models.text.new_words import add_word, clip_encoders

FILE = "learned_embeds.safetensors"
KIND = "inversion"
_NOTE = "placeholder"


@dataclass(frozen=True)
class LearntWord:
    """`vectors` are by the key of their encoder, each [V, D]."""

    placeholder: str
    vectors: Mapping[str, Tensor]


def write_word(folder: Path, word: LearntWord, *, family: str, base: Mapping[str, Any]) -> None:
    """Write the word as a folder; one that is there is replaced. `base` says which models it was learnt with."""
    with replace_folder(folder) as temporary:
        tensors = defer_tensors({name: part.detach().cpu() for name, part in word.vectors.items()})
        digest = write_safetensors(temporary / FILE, tensors, metadata={_NOTE: word.placeholder})
        config = {_NOTE: word.placeholder, "base": dict(base)}
        content = {"kind": KIND, "name": family, "config": config, "sha256": {FILE: digest}}
        (temporary / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def read_word(path: Path) -> LearntWord:
    """A file, an exported folder or the folder of an inversion run; a file without a note is called by its name."""
    places = [path] if path.is_file() else [path / FILE, path / EXPORT / FILE]
    file = next((place for place in places if place.is_file()), None)
    if file is None or file.suffix != ".safetensors":
        raise CheckpointError(f"{path}: holds no {FILE}; name a .safetensors file of vectors or an inversion run")
    tensors = open_safetensors(file)
    vectors = {name: tensors[name] for name in ("clip_l", "clip_g") if name in tensors}
    if not vectors or any(part.ndim != 2 for part in vectors.values()):
        found = ", ".join(sorted(tensors)[:4])
        raise CheckpointError(f"{file}: holds {found}; vectors for SDXL are called clip_l and clip_g, [vectors, width]")
    return LearntWord(tensors.metadata.get(_NOTE, f"<{file.stem}>"), vectors)


def use_word(text: TextPipeline, word: LearntWord, *, where: str) -> None:
    """Let the text encoders know a word; each must have vectors for it."""
    encoders = clip_encoders(text.encoders)
    if missing := sorted(set(encoders) - set(word.vectors)):
        raise CheckpointError(f"{where}: has no vectors {', '.join(missing)} for '{word.placeholder}'; learn it again")
    for name, encoder in encoders.items():
        add_word(encoder, word.placeholder, nn.Parameter(word.vectors[name].float(), requires_grad=False))
