"""Run golden cases through our models and print the error of each output.

Example: frameloom parity tests/goldens/open-sora-plan
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from frameloom.core.parity import ParityRunner


def load_runners() -> list[ParityRunner]:
    """Everything that can run a golden case; the first that knows a case gets it."""
    from frameloom.data import bucket_parity
    from frameloom.diffusion import parity as diffusion
    from frameloom.models.denoisers.opensora2 import parity as opensora2
    from frameloom.models.vaes.wfvae import haar_parity, parity

    return [bucket_parity, parity, haar_parity, opensora2, diffusion]


def parity(
    folder: Annotated[
        Path, typer.Argument(help="folder with golden .safetensors and .json files, searched with its subfolders")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Run golden cases through our models and print the error of each output.

    The exit code is 1 when an output is above its tolerance or a case fails, and 2 when nothing could be compared.
    """
    from frameloom.checkpoint.parity import format_table, run_parity, to_json
    from frameloom.core.errors import CheckpointError

    results = run_parity(folder, load_runners())
    print(json.dumps(to_json(results), indent=2) if as_json else "\n".join(format_table(results)))
    if not all(case.is_good for case in results):
        raise typer.Exit(1)
    if not any(case.num_compared for case in results):
        raise CheckpointError(f"{folder}: no case here belongs to one of our models, so nothing was compared")
