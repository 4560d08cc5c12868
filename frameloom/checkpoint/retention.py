"""Retention of checkpoints: deletes the old ones, and what killed saves left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from uuid import uuid4

from frameloom.checkpoint.reader import list_steps, step_folder
from frameloom.core.files import PARTIAL, remove_partial


def apply_retention(root: Path, keep: int) -> None:
    """Delete all but the newest `keep`. Call after a save: a crash then leaves one too many, never one too few."""
    for step in list_steps(root)[:-keep]:
        doomed = root / f"{PARTIAL}{uuid4().hex[:8]}-doomed"
        os.rename(step_folder(root, step), doomed)
        shutil.rmtree(doomed)


def clear_leftovers(root: Path) -> None:
    """Remove what a killed save or deletion left; only the owner of the run may call this."""
    if root.is_dir():
        remove_partial(root)
