"""How the stored artefacts are computed, here and when they were made: the settings of a process, and what rounds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# One thread, and the instructions and kernels that most machines have in common.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "FRAMELOOM_KERNELS": "torch",
}


def run_frameloom(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`frameloom WORDS` in a process of its own."""
    command = [sys.executable, "-m", "frameloom", *map(str, words)]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def describe_machine() -> dict[str, str]:
    """Results are equal to the bit where all of this is equal; elsewhere the last bits may differ."""
    script = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
    environment = {**os.environ, **SETTINGS}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    capability, threads = told.stdout.split()
    return {
        "torch": torch.__version__,
        "capability": capability,
        "threads": threads,
        "processor": _describe_processor(),
    }


def _describe_processor() -> str:
    """The model by its numbers: the name that a virtual machine shows may be that of a whole family."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return f"{platform.machine()} {platform.processor()}"
    lines = (line.partition(":") for line in path.read_text().splitlines())
    found = {name.strip(): value.strip() for name, _, value in reversed(list(lines))}
    known = (found.get(name, "") for name in ("vendor_id", "cpu family", "model"))
    return " ".join([platform.machine(), *known])
