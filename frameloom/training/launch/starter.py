"""torchrun without its last words: where a process has said what is wrong, its report and trace would bury that.

    python -m frameloom.training.launch.starter --nproc-per-node=8 -m frameloom train my.yaml

takes the words of torchrun, and ends with the exit code of the process that failed first.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run


def start(words: Sequence[str]) -> int:
    """Run torchrun and give an exit code; one above 128 is that of a signal."""
    # Each of its loggers has a level of its own.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    args = get_args_parser().parse_args(list(words))
    num_local = int(args.nproc_per_node) if args.nproc_per_node.isdecimal() else 1
    # torchrun would say at length that it sets this to 1, which leaves most cores of a large machine idle.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(num_local, 1))))
    try:
        run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"process {failure.local_rank} of this machine ended by signal {-failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
