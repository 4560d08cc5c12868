"""Run golden files of the published code through ours: python -m tests.parity tests/goldens"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from frameloom.core.device import avoid_amx_in_virtual_machines
from frameloom.core.errors import CheckpointError, FrameloomError
from frameloom.core.progress import ProgressBar
from tests.parity.cases import list_goldens
from tests.parity.harness import format_table, run_parity, to_json

GOLDENS = Path(__file__).parents[1] / "goldens"


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.parity",
        description="Run golden files through our code and print the largest error of each. The exit code is 1 when an "
        "output is above its tolerance or was not compared or a case fails, and 2 when a file is of an unknown kind or "
        "nothing could be compared.",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=GOLDENS, help="golden .safetensors and .json files, with subfolders"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for every output, not only for every case")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def run(folder: Path, *, verbose: bool = False, as_json: bool = False) -> int:
    results = []
    with ProgressBar("parity", sum(map(len, list_goldens(folder)))) as bar:
        for result in run_parity(folder):
            results.append(result)
            bar.advance(note=result.name)
    print(json.dumps(to_json(results), indent=2) if as_json else "\n".join(format_table(results, verbose=verbose)))
    unknown = [case.name for case in results if case.status == "unknown"]
    if unknown:
        raise CheckpointError(
            f"{folder}: no runner knows these files: {', '.join(unknown)}; remove them, or list them as deviations"
        )
    if not all(case.is_good for case in results):
        return 1
    if not any(case.num_compared for case in results):
        raise CheckpointError(f"{folder}: no case here belongs to one of our models, so nothing was compared")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    given = read_arguments(arguments)
    avoid_amx_in_virtual_machines()
    try:
        return run(given.folder, verbose=given.verbose, as_json=given.json)
    except FrameloomError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
