"""How long a step waits for a checkpoint and a new start for the last one, beside accelerate's saving and loading.

The model has about 30 million parameters and the state of AdamW beside them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import (
    BenchSettings,
    Contender,
    Row,
    Work,
    compare_times,
    load_baseline,
    measure_or_skip,
    take_turns,
)
from benchmarks.model import build_model, list_cases
from frameloom.checkpoint.reader import Checkpoint, load_latest
from frameloom.checkpoint.writer import Saver
from frameloom.config.schema.optim import OptimSection
from frameloom.training.optim.optimizer import (
    allocate_state,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    trained_names,
)


def measure(bench: BenchSettings) -> Iterator[Row]:
    case = [one for one in list_cases(is_quick=bench.is_quick) if one.family == "opensora2"][-1]
    _, _, model = build_model(case)
    optimizer = build_optimizer(model.named_parameters(), OptimSection())
    allocate_state(optimizer)
    tensors = {"model": model.state_dict(), "optimizer": optimizer_tensors(optimizer, trained_names(optimizer))}
    size = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    note = f"{size / 2**20:,.0f} MiB"
    with tempfile.TemporaryDirectory() as folder:
        yield from measure_or_skip("save", "background", _measure_background, Path(folder), tensors, note, bench)
        yield from measure_or_skip(
            "save", "accelerate", _measure_accelerate, Path(folder), model, optimizer, tensors, note, bench
        )


Tensors = dict[str, dict[str, Tensor]]


def _measure_background(folder: Path, tensors: Tensors, note: str, bench: BenchSettings) -> Iterator[Row]:
    background = Saver(folder / "background", 1, in_background=True)
    times = take_turns(
        {
            "ours": Contender(_saving(background, tensors), finish=background.wait),
            "other": _saving(Saver(folder / "direct", 1), tensors),
        },
        bench.rounds,
    )
    row = compare_times(
        "save", "a step waits for a save in the background", times["ours"], times["other"], against="our save at once"
    )
    assert row.ratio is not None
    yield replace(row, note=f"{note}; {1 / row.ratio:.1%} of a save at once")


def _saving(saver: Saver, tensors: Tensors) -> Work:
    steps = count(1)
    return lambda: saver.save(Checkpoint(next(steps), tensors, {"format": 1}))


def _measure_accelerate(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Tensors,
    note: str,
    bench: BenchSettings,
) -> Iterator[Row]:
    accelerator = load_baseline("accelerate").Accelerator(cpu=True)
    prepared: Any = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    prepared[1].step()
    background = Saver(folder / "ours", 1, in_background=True)
    direct = Saver(folder / "ours at once", 1)
    saved = folder / "accelerate"
    times = take_turns(
        {
            "background": Contender(_saving(background, tensors), finish=background.wait),
            "ours": _saving(direct, tensors),
            "other": lambda: accelerator.save_state(str(saved)),
        },
        bench.rounds,
    )
    name = "accelerate's save_state"
    checked = f"{note}; ours is digested, synced and renamed"
    yield compare_times(
        "save",
        "a step waits for a save in the background",
        times["background"],
        times["other"],
        against=name,
        note=note,
    )
    yield compare_times("save", "a save at once", times["ours"], times["other"], against=name, note=checked)

    def resume() -> None:
        found = load_latest(folder / "ours at once")
        assert found is not None
        model.load_state_dict(found.tensors["model"])
        load_optimizer_tensors(optimizer, trained_names(optimizer), found.tensors["optimizer"])

    times = take_turns({"ours": resume, "other": lambda: accelerator.load_state(str(saved))}, bench.rounds)
    yield compare_times(
        "save",
        "resuming",
        times["ours"],
        times["other"],
        against="accelerate's load_state",
        note=f"{note}; ours checks the digest of every file",
    )
