"""Open-Sora-Plan's lists of sets (`merge_data.txt`, `video_data.txt`, `image_data.txt`): one set a line.

    media folder, annotation
    media folder, text-embedding folder, annotation
    media folder, embedding folder of encoder 1, embedding folder of encoder 2, annotation

Folders and annotations are looked for beside the list and then, as the original does, from the current folder. The
rows of all lines make one table below the folder that holds all of the lines' folders; a path cannot leave its own
line's folder. Embeddings stand in their folder under the clip's own path with the ending .npz.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.text_files import read_text

EMBEDDING_NAMES = ("embedding", "embedding_2")
_ANY_SUFFIX = r"\.[^./\\]+$"
_MAX_ITEMS = 4


class ListedSet(NamedTuple):
    """One line of a list."""

    line: int
    media: Path
    embeddings: tuple[Path, ...]
    annotation: Path


def read_dataset_list(
    path: Path, root: Path | None, read_annotation: Callable[[Path, Path], pl.DataFrame]
) -> tuple[pl.DataFrame, Path, list[tuple[int, str]]]:
    """(all rows, their common root, where each set starts); `read_annotation(file, media folder)` reads one set."""
    sets = parse_dataset_list(path)
    if root is None:
        folders = [str(folder) for entry in sets for folder in (entry.media, *entry.embeddings)]
        root = Path(os.path.commonpath(folders))
        if root == Path("/"):
            raise DataError(
                f"{path}: {folders[0]} and {folders[-1]} share no folder but /; read each line as one of data.sources, "
                "or say that all of / may be read with data.root: /"
            )
    root = root.absolute()
    tables: list[pl.DataFrame] = []
    starts: list[tuple[int, str]] = []
    for entry in sets:
        table = read_annotation(entry.annotation, entry.media)
        columns = [pl.lit(_below(path, entry, entry.media, root)) + pl.col("path")]
        for name, folder in zip(EMBEDDING_NAMES, entry.embeddings, strict=False):
            stem = pl.col("path").str.replace(_ANY_SUFFIX, "")
            columns.append((pl.lit(_below(path, entry, folder, root)) + stem + ".npz").alias(name))
        starts.append((sum(table.height for table in tables), str(entry.annotation)))
        tables.append(table.with_columns(columns[1:]).with_columns(columns[0].alias("path")))
    try:
        return pl.concat(tables, how="diagonal_relaxed", rechunk=True), root, starts
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path}: the annotations' columns differ in type ({error}); write them alike") from error


def parse_dataset_list(path: Path) -> list[ListedSet]:
    """The sets of a list; DataError names the line that is wrong."""
    sets = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        items = [item.strip() for item in line.split(",")]
        if items == [""]:
            continue
        if not 2 <= len(items) <= _MAX_ITEMS or "" in items:
            raise DataError(
                f"{path}: line {number} has {len(items)} items; expected 'media folder, annotation', with one or two "
                "text-embedding folders between them if there are any"
            )
        *folders, annotation = items
        media, *embeddings = [_find(path, number, folder, is_folder=True) for folder in folders]
        sets.append(ListedSet(number, media, tuple(embeddings), _find(path, number, annotation, is_folder=False)))
    if not sets:
        raise DataError(f"{path}: no line in it; a list names one set a line: media folder, annotation")
    return sets


def _find(path: Path, number: int, name: str, *, is_folder: bool) -> Path:
    for start in (path.parent.absolute(), Path.cwd()):
        found = start / name
        if found.is_dir() if is_folder else found.is_file():
            return Path(os.path.normpath(found))
    kind = "folder" if is_folder else "annotation file"
    searched = "" if name.startswith("/") else f", looked for below {path.parent.absolute()} and {Path.cwd()}"
    raise DataError(f"{path}: line {number}: no {kind} '{name}'{searched}; correct the line")


def _below(path: Path, entry: ListedSet, folder: Path, root: Path) -> str:
    """What leads from the root to `folder`, with a slash behind it."""
    for form in (root, root.resolve()):
        if folder.is_relative_to(form):
            inner = folder.relative_to(form).as_posix()
            return "" if inner == "." else f"{inner}/"
    raise DataError(f"{path}: line {entry.line}: {folder} is outside the root {root}; choose a root above it")
