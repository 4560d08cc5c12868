"""Bytes that a process of a sequence group really sends in a step, against the written formula.

Two processes with gloo share the tokens of one clip, forward and backward; every message is counted where it is sent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import BenchSettings, Row, compare_numbers, measure_or_skip
from benchmarks.model import Case, build_model, configure, draw_inputs, list_cases
from frameloom.distributed.sequence_parallel import divide_ranks
from frameloom.models.denoisers.base import use_sequence_group

_ROOT = Path(__file__).parents[1]
_RANKS = 2
_LATENTS = ((3, 16, 16), (5, 16, 16), (9, 16, 16))


def list_shared_cases(*, is_quick: bool) -> list[Case]:
    """The tiny video models; one of them at growing lengths."""
    cases = [one for one in list_cases(is_quick=True) if one.family != "sdxl"]
    longer = [replace(cases[-1], latent=latent) for latent in _LATENTS[1:]]
    return cases if is_quick else [*cases, *longer]


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what this rank really sends in sequence groups: bytes and messages, by collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent_bytes: dict[str, int] = {"all_to_all": 0, "all_gather": 0}
        self.num_messages: dict[str, int] = {"all_to_all": 0, "all_gather": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = torch.ops._c10d_functional
        if func is own.all_to_all_single.default:
            degree = len(args[1])
            self._add("all_to_all", args[0].nbytes * (degree - 1) // degree)
        elif func is own.all_gather_into_tensor.default:
            self._add("all_gather", args[0].nbytes * (args[1] - 1))
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, num_bytes: int) -> None:
        self.sent_bytes[kind] += num_bytes
        self.num_messages[kind] += 1


def measure(bench: BenchSettings) -> Iterator[Row]:
    yield from measure_or_skip("sequence", "two processes", _measure, bench)


def _measure(bench: BenchSettings) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmarks.sequence", folder, str(int(bench.is_quick))]
        processes = [subprocess.Popen([*words, str(rank)], cwd=_ROOT) for rank in range(_RANKS)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise ChildProcessError(f"the processes ended with exit codes {codes}")
        found = json.loads((Path(folder) / "found-0.json").read_text())
    for case, sent in zip(list_shared_cases(is_quick=bench.is_quick), found, strict=True):
        expected = 2 * sum(_count_bytes(case))
        tokens = _count_tokens(case)
        yield compare_numbers(
            "sequence",
            f"{case.family} tiny, {tokens:,} tokens a clip, sent by each of {_RANKS}",
            sent,
            expected,
            unit="B",
            against="the formula, 4 B S W (P - 1) / P each way and layer",
            at=("tokens", tokens) if case.family == "opensora2" else None,
        )


def _count_tokens(case: Case) -> int:
    _family, config = configure(case)
    return int(config.num_tokens(case.latent))


def _count_bytes(case: Case) -> list[int]:
    """Of every self-attention, forward; numbers are float32."""
    family, config = configure(case)
    num_text = draw_inputs(case).text.tokens_BKD.shape[1]
    exchanges = family.model.exchanges(config, case.latent, num_text, _RANKS)
    return [exchange.sent_bytes(_RANKS, batch=case.batch, number_bytes=4) for exchange in exchanges]


def _serve(folder: Path, is_quick: bool, rank: int) -> None:
    """One of the processes."""
    place = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=_RANKS)
    group = divide_ranks(_RANKS)
    sent: list[Any] = []
    for case in list_shared_cases(is_quick=is_quick):
        family, _, model = build_model(case)
        inputs = draw_inputs(case)
        use_sequence_group(family, model, group)
        with Traffic() as traffic:
            made = model(inputs.noisy_BCFHW, inputs.timestep_B, inputs.text.conditions())
            torch.autograd.backward(made.square().mean())
        sent.append(traffic.sent_bytes["all_to_all"])
    (folder / f"found-{rank}.json").write_text(json.dumps(sent))
    dist.destroy_process_group()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2] == "1", int(sys.argv[3]))
