"""Golden cases of media facts: what the metadata script of Open-Sora 2.0 finds in small clips beside the table."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from frameloom.core.errors import DataError
from frameloom.core.parity import ParityCase, ParityOutput, compare_facts, compare_numbers
from frameloom.data.probe import probe_header

_NUMBERS = ("height", "width", "fps", "num_frames", "aspect_ratio", "resolution")


def is_columns(case: ParityCase) -> bool:
    return {"input_csv", "output_csv", "rows"} <= case.config.keys()


def run_columns(case: ParityCase) -> list[ParityOutput]:
    assert case.path is not None
    rows, results = case.config["rows"], []
    facts = {row["path"]: _read_facts(_find_clip(case.path, row["path"])) for row in rows}
    for row in rows:
        ours = [facts[row["path"]][name] for name in _NUMBERS]
        results.append(compare_numbers(row["path"], ours, [row[name] for name in _NUMBERS], 1e-12))
    given = list(csv.DictReader(io.StringIO(case.config["input_csv"])))
    table = list(csv.DictReader(io.StringIO(case.config["output_csv"])))
    results.append(compare_facts("columns", [*given[0], *_NUMBERS], case.config["columns"]))
    ours_table = [{**row, **{name: str(facts[row["path"]][name]) for name in _NUMBERS}} for row in given]
    results.append(compare_facts("table", ours_table, table))
    counts = {entry["file"]: entry["frames_written"] for entry in case.config.get("encoded", [])}
    ours_counts = {name: facts[name]["num_frames"] for name in counts}
    return [*results, compare_facts("frames that were written", ours_counts, counts)]


def _find_clip(table: Path, name: str) -> Path:
    found = next((path for path in sorted(table.parent.rglob(Path(name).name)) if path.is_file()), None)
    if found is None:
        raise DataError(f"{table}: the clip {name} is not beside it; copy the folder of clips as well")
    return found


def _read_facts(path: Path) -> dict[str, Any]:
    facts = probe_header(path)
    fps = None if facts.fps is None else round(facts.fps, 3)
    return {
        "height": facts.height,
        "width": facts.width,
        "fps": fps,
        "num_frames": facts.frames,
        "aspect_ratio": facts.height / facts.width,
        "resolution": facts.height * facts.width,
    }
