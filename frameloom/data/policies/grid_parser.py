"""The bucket grid of a recipe: `{resolution: {frames: [probability, batch size]}}`, checked and spelled out.

A probability is one number (the share of fitting clips that stay, the rest go on to the next lower resolution) or,
for videos, a pair (keep, skip): the share `skip` first goes on to the next shorter length of the same resolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameloom.core.errors import ConfigError
from frameloom.data.buckets import Bucket
from frameloom.data.policies.grid import GridPolicy, Length, Level
from frameloom.data.policies.resolutions import Size, parse_resolution, size_table


def parse_grid(
    raw: Mapping[Any, Any], *, stride: int, fps_max: float | None = None, where: str = "data.buckets"
) -> GridPolicy:
    """Check a grid as YAML gives it; ConfigError lists every mistake. `stride` = VAE stride x patch size."""
    problems: list[str] = []
    if not raw:
        raise ConfigError(f"{where} is empty; give at least one resolution, such as {{256px: {{1: [1.0, 8]}}}}")
    if fps_max is not None and not fps_max > 0:
        problems.append(f"{where}: fps_max is {fps_max}; it must be above 0, or null for any frame rate")
    parsed = {str(name): _parse_lengths(lengths, f"{where}.{name}", problems) for name, lengths in raw.items()}
    tables = {name: _parse_sizes(name, stride, where, problems) for name in parsed}
    if problems:
        raise ConfigError(problems)
    levels: list[Level] = []
    buckets: list[Bucket] = []
    for name in sorted(parsed, key=lambda name: parse_resolution(name)[0], reverse=True):
        lengths = tuple(_place(entry, name, tables[name], buckets) for entry in sorted(parsed[name], reverse=True))
        levels.append(Level(name, parse_resolution(name)[0], tables[name], lengths))
    return GridPolicy(stride, fps_max, tuple(levels), tuple(buckets))


_Entry = tuple[int, float, float | None, int]  # frames, keep, skip, batch size


def _place(entry: _Entry, resolution: str, sizes: dict[str, Size], buckets: list[Bucket]) -> Length:
    frames, keep, skip, batch_size = entry
    first = len(buckets)
    for i, (ratio, size) in enumerate(sizes.items()):
        buckets.append(Bucket(first + i, resolution, frames, ratio, size.height, size.width, batch_size))
    return Length(frames, keep, skip, first)


def _parse_sizes(name: str, stride: int, where: str, problems: list[str]) -> dict[str, Size]:
    try:
        return size_table(name, stride)
    except ConfigError as error:
        problems.extend(f"{where}: {problem}" for problem in error.problems)
        return {}


def _parse_lengths(raw: Any, where: str, problems: list[str]) -> list[_Entry]:
    if not isinstance(raw, Mapping) or not raw:
        problems.append(f"{where} is {raw!r}; it must map numbers of frames to [probability, batch size]")
        return []
    entries: dict[int, _Entry] = {}
    for key, value in raw.items():
        frames = int(key) if str(key).isdecimal() else 0
        if frames < 1:
            problems.append(f"{where}: '{key}' is not a number of frames; write 1 for images, 33 for videos")
        elif frames in entries:
            problems.append(f"{where}: {frames} frames is given twice; keep one")
        else:
            entries[frames] = (frames, *_parse_entry(frames, value, f"{where}.{key}", problems))
    return list(entries.values())


def _parse_entry(frames: int, value: Any, where: str, problems: list[str]) -> tuple[float, float | None, int]:
    wrong = (1.0, None, 1)
    if not isinstance(value, list | tuple) or len(value) != 2:
        problems.append(f"{where} is {value!r}; it must be [probability, batch size], such as [1.0, 8]")
        return wrong
    chance, batch_size = value
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        problems.append(f"{where}: the batch size is {batch_size!r}; it must be a whole number from 1 up")
        return wrong
    chances = list(chance) if isinstance(chance, list | tuple) else [chance]
    if len(chances) not in (1, 2) or not all(_is_share(number) for number in chances):
        problems.append(
            f"{where}: the probability is {chance!r}; it must be from 0 to 1, or a pair [keep, skip] of them"
        )
        return wrong
    if len(chances) == 2 and frames == 1:
        problems.append(f"{where}: images have no shorter length to skip to; give one probability, not {chance!r}")
        return wrong
    return float(chances[0]), float(chances[1]) if len(chances) == 2 else None, batch_size


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
