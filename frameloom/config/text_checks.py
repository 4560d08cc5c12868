"""Rules about text encoders: which come out of a whole single file, with a tokenizer; which are used in one way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from frameloom.config.problems import Problem
from frameloom.config.schema import Recipe
from frameloom.config.yaml_values import KeyPath
from frameloom.models.registry import TEXT_ENCODERS

# Folder of the tokenizer beside a single file, by encoder; the others lie in folders of their own only.
TOKENIZER_FOLDERS = {"clip_l": "tokenizer", "clip_bigg": "tokenizer_2"}
_OPTIONS = ("padding", "pad", "layer", "pooled", "null", "cleaning", "keep_chinese", "precision")


def check_text_place(recipe: Recipe) -> Iterator[Problem]:
    """What can be said without looking at the disk."""
    for index, encoder in enumerate(recipe.text.encoders):
        path: KeyPath = ("text", "encoders", str(index))
        where, also = ".".join(path), ((*path, "name"),)
        if encoder.name in TOKENIZER_FOLDERS:
            continue
        known = " and ".join(TOKENIZER_FOLDERS)
        if encoder.tokenizer is not None:
            text = f"{where}.tokenizer is set, but only {known} take a tokenizer from elsewhere"
            yield Problem((*path, "tokenizer"), f"{text}; remove it, {encoder.name} finds its own in its folder", also)
        if encoder.path is not None and encoder.path.endswith(".safetensors"):
            text = f"{where}.path is the file '{encoder.path}', but only {known} are parts of single files"
            yield Problem((*path, "path"), f"{text}; name the folder of {encoder.name}", also)


def check_text_options(recipe: Recipe) -> Iterator[Problem]:
    """An encoder that comes with the package is used in one way."""
    for index, encoder in enumerate(recipe.text.encoders):
        spec = TEXT_ENCODERS.get(encoder.name)
        if spec is None or not spec.packaged:
            continue
        for name in _OPTIONS:
            if getattr(encoder, name) is not None:
                path: KeyPath = ("text", "encoders", str(index), name)
                yield Problem(path, f"{'.'.join(path)} is set, but {encoder.name} is used in one way only; remove it")


def check_text_files(recipe: Recipe) -> list[Problem]:
    """Of a file of weights, that a tokenizer was named or lies beside it."""
    problems = []
    for index, encoder in enumerate(recipe.text.encoders):
        place = Path(encoder.path) if encoder.path is not None else None
        folder = TOKENIZER_FOLDERS.get(encoder.name)
        if place is None or folder is None or not place.is_file() or encoder.tokenizer is not None:
            continue
        beside = place.parent / folder
        if not beside.is_dir():
            path: KeyPath = ("text", "encoders", str(index), "tokenizer")
            text = f"{'.'.join(path)} is null, but {place} holds weights alone, and there is no {beside}"
            problems.append(Problem(path, f"{text}; name the folder of the tokenizer of {encoder.name}"))
    return problems
