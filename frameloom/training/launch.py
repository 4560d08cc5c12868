"""Starting a run on several processes: the torchrun commands for one machine, a hostfile or a Slurm job.

`frameloom train` reads its rank from the environment that torchrun sets. Words are quoted for a POSIX shell; nothing
here goes through one unless it is printed and pasted. The commands run this module, which is torchrun with quiet
failures:

    python -m frameloom.training.launch --nproc-per-node=8 -m frameloom train my.yaml
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from frameloom.core.errors import ConfigError

PORT = 29500
_STARTER = "frameloom.training.launch"
_HOST = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?$")
_SLOTS = re.compile(r"^slots=(\d+)$")


@dataclass(frozen=True)
class Host:
    """A line of a hostfile; `slots` None: as many processes as asked for with --nproc."""

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class Job:
    """What is started: the words behind `frameloom train`, and how many processes on each host."""

    recipe: str
    overrides: Sequence[str] = ()
    nproc: int = 1
    port: int = PORT
    restarts: int = 0
    options: Sequence[str] = field(default=())

    @property
    def training(self) -> list[str]:
        return ["-m", "frameloom", *self.options, "train", self.recipe, *self.overrides]


def single_command(job: Job) -> list[str]:
    """The words for one box; a free port is found by torchrun."""
    if job.nproc == 1 and not job.restarts:
        return [sys.executable, *job.training]
    return [*_torchrun(job.restarts), "--standalone", f"--nproc-per-node={job.nproc}", *job.training]


def host_commands(job: Job, hosts: Sequence[Host]) -> list[tuple[str, str]]:
    """(host, the line to run there): all hosts wait for each other at the first one.

    torchrun numbers the processes by the order given here, so the first host has rank 0 and writes the files.
    """
    counts = {host.slots or job.nproc for host in hosts}
    if len(counts) > 1:
        raise ConfigError(
            f"the hosts have {', '.join(map(str, sorted(counts)))} slots; torchrun starts equally many processes on "
            "each host: give all the same, or name them with --nproc and no slots"
        )
    nproc = counts.pop()
    lines = []
    for number, host in enumerate(hosts):
        words = [
            *_torchrun(job.restarts),
            f"--nnodes={len(hosts)}",
            f"--nproc-per-node={nproc}",
            f"--node-rank={number}",
            f"--master-addr={hosts[0].name}",
            f"--master-port={job.port}",
            *job.training,
        ]
        lines.append((host.name, f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"))
    return lines


def ssh_command(host: str, line: str) -> list[str]:
    """Run a line on a host; without a password prompt, which nobody would see, and ending with this process."""
    return ["ssh", "-tt", "-o", "BatchMode=yes", host, line]


def read_hostfile(path: Path) -> list[Host]:
    """One host a line, with `slots=8` behind it if it has that many; # begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name a text file with one host a line") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_parse_host(words, f"{path}:{number}"))
    if not hosts:
        raise ConfigError(f"{path}: names no host; write one a line, e.g. node1 slots=8")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: names {name} {names.count(name)} times; write it once, with all its slots")
    return hosts


def _parse_host(words: Sequence[str], where: str) -> Host:
    name, *rest = words
    found = [_SLOTS.match(word) for word in rest]
    if not _HOST.match(name) or len(rest) > 1 or not all(found):
        raise ConfigError(
            f"{where}: '{' '.join(words)}' is not a host; write its name, and slots=8 behind it if you like"
        )
    slots = int(found[0].group(1)) if found and found[0] else None
    if slots == 0:
        raise ConfigError(f"{where}: {name} has slots=0; write 1 or more, or remove the line")
    return Host(name, slots)


@dataclass(frozen=True)
class Slurm:
    """What a job asks the cluster for; `options` are further lines of #SBATCH, as `--partition=gpu`."""

    nodes: int
    hours: float = 24.0
    gpus: bool = True
    options: Sequence[str] = ()


def slurm_script(job: Job, slurm: Slurm, *, name: str) -> str:
    """A batch script: one torchrun a node. Slurm sends SIGTERM two minutes before the end, at which the run saves."""
    minutes = max(1, round(slurm.hours * 60))
    asked = [
        f"--job-name={name}",
        f"--nodes={slurm.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.nproc}"] if slurm.gpus else []),
        f"--time={minutes // 60:02d}:{minutes % 60:02d}:00",
        "--signal=TERM@120",
        "--requeue",
        "--open-mode=append",
        f"--output={name}-%j.log",
        *slurm.options,
    ]
    for option in asked:
        if not option.startswith("--") or "\n" in option:
            raise ConfigError(f"--sbatch '{option}': an option of sbatch begins with --, as in --partition=gpu")
    words = [
        *_torchrun(job.restarts),
        "--nnodes=$SLURM_JOB_NUM_NODES",
        f"--nproc-per-node={job.nproc}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=$head:{job.port}",
        "--rdzv-id=$SLURM_JOB_ID",
    ]
    # The $ words are for the shell of the job; all that comes from the person is quoted.
    torchrun = " ".join(word if "$" in word else shlex.quote(word) for word in words)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in asked),
            "",
            "set -e",
            f"cd {shlex.quote(str(Path.cwd()))}",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export head",
            f"srun {torchrun} \\",
            f"  {shlex.join(job.training)}",
            "",
        ]
    )


def _torchrun(restarts: int) -> list[str]:
    return [sys.executable, "-m", _STARTER, *([f"--max-restarts={restarts}"] if restarts else [])]


def start(words: Sequence[str]) -> int:
    """Run torchrun without its last words and give an exit code; one above 128 is that of a signal.

    Where a process has said what is wrong, torchrun's report and trace would bury that. The exit code is that of the
    process that failed first.
    """
    # Here, because the commands alone need no torch.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

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
