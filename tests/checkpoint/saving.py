"""A checkpoint written at once, as a save that does not run in the background is."""

from __future__ import annotations

from pathlib import Path

from frameloom.checkpoint.reader import Checkpoint, step_folder
from frameloom.checkpoint.writer import Saver
from frameloom.distributed.context import Collective


def save_checkpoint(root: Path, checkpoint: Checkpoint, collective: Collective | None = None) -> Path:
    """Write the checkpoint; a step that is already there is left alone, because nothing is written twice."""
    Saver(root, collective=collective).save(checkpoint)
    return step_folder(root, checkpoint.step)
