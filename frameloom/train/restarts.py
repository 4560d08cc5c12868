"""Starts that a scheduler makes by itself, torchrun or Slurm: after several without progress the run refuses to go on.

A fault that comes back at the same step would otherwise burn the machines until somebody looks. A start by hand counts
anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from frameloom.core.errors import RunError
from frameloom.core.files import write_json

MOST = 3
"""restarts in a row from one step"""
_FILE = "restarts.json"
_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def count_restart(folder: Path, step: int, environment: Mapping[str, str] | None = None) -> None:
    """Note a start from `step` of a run; RunError when it is one automatic restart too many."""
    values = os.environ if environment is None else environment
    path = folder / _FILE
    if all(values.get(name, "0") in ("", "0") for name in _VARIABLES):
        path.unlink(missing_ok=True)
        return
    step_before, num_before = _read(path)
    num_restarts = num_before + 1 if step_before == step else 1
    if num_restarts > MOST:
        raise RunError(
            f"{folder}: {MOST} restarts in a row have not come beyond step {step}, and this one would not either; look "
            "at the messages of the first of them, then start the run by hand"
        )
    write_json(path, {"step": step, "restarts": num_restarts})


def _read(path: Path) -> tuple[int, int]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return int(found["step"]), int(found["restarts"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1, 0
