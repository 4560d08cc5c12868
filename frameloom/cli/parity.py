"""Run golden cases through our models and print the error of each output.

Example: frameloom parity tests/goldens/open-sora-plan
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from frameloom.core.parity import ParityRunner


# Modules that can run golden cases, one a line; the first that knows a case gets it.
RUNNERS = (
    "frameloom.data.bucket_parity",
    "frameloom.models.vaes.wfvae.parity",
    "frameloom.models.vaes.wfvae.haar_parity",
    "frameloom.models.vaes.causal.parity",
    "frameloom.models.vaes.cogvideox.parity",
    "frameloom.models.vaes.hunyuan.parity",
    "frameloom.models.vaes.dc_ae.parity",
    "frameloom.models.denoisers.cogvideox_fun.parity",
    "frameloom.generate.parity_cogvideox_fun",
    "frameloom.models.denoisers.latte.parity",
    "frameloom.models.denoisers.opensora2.parity",
    "frameloom.models.denoisers.opensora_plan.parity",
    "frameloom.diffusion.parity",
    "frameloom.models.text.parity",
    "frameloom.train.parity",
    "frameloom.models.vaes.gan_parity",
    "frameloom.models.manifest_parity",
    "frameloom.train.parity_opensora2",
    "frameloom.train.parity_sampling",
    "frameloom.train.parity_batches",
)


def load_runners() -> list[ParityRunner]:
    return [cast("ParityRunner", import_module(name)) for name in RUNNERS]


def parity(
    folder: Annotated[
        Path, typer.Argument(help="folder with golden .safetensors and .json files, searched with its subfolders")
    ],
    verbose: Annotated[
        bool, typer.Option("--verbose", help="a line for every output, not only for every case")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Run golden cases through our models and print the largest error of each.

    The exit code is 1 when an output is above its tolerance, was not compared or a case fails, and 2 when a file is of
    an unknown kind or nothing could be compared.
    """
    from frameloom.checkpoint.goldens import list_goldens
    from frameloom.checkpoint.parity import format_table, iterate_parity, to_json
    from frameloom.core.errors import CheckpointError
    from frameloom.core.progress import ProgressBar

    results = []
    with ProgressBar("parity", sum(map(len, list_goldens(folder)))) as bar:
        for result in iterate_parity(folder, load_runners()):
            results.append(result)
            bar.advance(note=result.name)
    print(json.dumps(to_json(results), indent=2) if as_json else "\n".join(format_table(results, verbose=verbose)))
    unknown = [case.name for case in results if case.status == "unknown"]
    if unknown:
        raise CheckpointError(
            f"{folder}: no runner knows these files: {', '.join(unknown)}; remove them, or list them as deviations"
        )
    if not all(case.is_good for case in results):
        raise typer.Exit(1)
    if not any(case.num_compared for case in results):
        raise CheckpointError(f"{folder}: no case here belongs to one of our models, so nothing was compared")
