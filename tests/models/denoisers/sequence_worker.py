"""One of several processes that share clips. Run by `test_sequence.py`; writes what it finds as json.

python -m tests.models.denoisers.sequence_worker RANK NUM_RANKS FOLDER
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.sequence import Traffic
from frameloom.core.random import stream
from frameloom.diffusion.objectives import FlowObjective
from frameloom.diffusion.samplers import run_sampler
from frameloom.distributed.sequence_parallel import ALONE, SequenceGroup, divide_ranks, join_sequence_group
from frameloom.models.denoisers.base import use_sequence_group
from frameloom.training.compiling import compile_blocks
from frameloom.training.memory.recompute import recompute_blocks
from tests.models.denoisers.sequence_cases import CASES, MEASURED, Case

Found = dict[str, Any]
Gradients = dict[str, Tensor]


def main(rank: int, num_ranks: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    groups = {degree: divide_ranks(degree) for degree in (2, num_ranks)}
    found: Found = {"cases": {}, "mistakes": {}, "traffic": {}}
    for name in MEASURED:
        found["traffic"][name] = measure_case(CASES[name], groups)
    for name, case in CASES.items():
        found["cases"][name] = compare_case(case, groups)
        if name == case.family_name:
            found["mistakes"][name] = mistake_case(case, groups[2])
    found["mixed"] = compare_data_parallel(CASES["opensora2"], groups[2])
    found["sample"] = compare_samples(CASES["cogvideox_fun"], groups[num_ranks])
    found["recomputed"] = compare_changed(
        CASES["latte with images beside"], groups[2], lambda case, model: recompute_blocks(model.blocks())
    )
    if rank < 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            found["compiled"] = compare_changed(
                replace(CASES["opensora2"], overrides={"depth_single_blocks": 0}),
                groups[2],
                lambda case, model: compile_blocks(model.blocks(), backend="aot_eager"),
            )
    found["half"] = compare_half(CASES["opensora2"], groups[2])
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def compare_case(case: Case, groups: dict[int, SequenceGroup]) -> Found:
    """Of each degree: largest errors of the prediction and of a gradient, the same with a wrong scale, and bytes."""
    model = case.build()
    expected, gradients = run(case, model)
    found: Found = {}
    for degree, group in groups.items():
        use_sequence_group(case.family, model, group)
        prediction, own = run(case, model)
        found[str(degree)] = {
            "prediction": difference(prediction, expected),
            "gradients": largest(join(own, group), gradients),
            "own": largest(own, gradients),
        }
    return found


def measure_case(case: Case, groups: dict[int, SequenceGroup]) -> Found:
    """Bytes and messages of a forward and a backward pass."""
    model, found = case.build(), {}
    for degree, group in groups.items():
        use_sequence_group(case.family, model, group)
        with Traffic() as traffic:
            run(case, model)
        found[str(degree)] = {"sent": traffic.sent_bytes, "messages": traffic.num_messages}
    return found


def mistake_case(case: Case, group: SequenceGroup) -> Found:
    """What the comparison says of mistakes: gradients without their scale, and ranks that see different clips."""
    model = case.build()
    expected, gradients = run(case, model)
    use_sequence_group(case.family, model, replace(group, reduction="sum"))
    unscaled = join(run(case, model)[1], group)
    other, _ = run(case, model, seed=group.rank)
    use_sequence_group(case.family, model, ALONE)
    again, _ = run(case, model)
    return {
        "unscaled": largest(unscaled, gradients),
        "scale": float(torch.stack([ratio(unscaled[name], gradients[name]) for name in unscaled]).median()),
        "other": difference(other, expected),
        "undone": bool(torch.equal(again, expected)),
    }


def compare_data_parallel(case: Case, group: SequenceGroup) -> Found:
    """Each group has a clip of its own: the mean over all ranks is the mean over the clips."""
    model = case.build()
    num_groups = dist.get_world_size() // group.degree
    clips = [run(case, model, seed=seed)[1] for seed in range(num_groups)]
    expected = {name: torch.stack([clip[name] for clip in clips]).mean(0) for name in clips[0]}
    use_sequence_group(case.family, model, group)
    _, own = run(case, model, seed=dist.get_rank() // group.degree)
    mean = join(own, join_sequence_group())
    return {"gradients": largest(mean, expected), "one_clip": largest(mean, clips[0])}


def compare_samples(case: Case, group: SequenceGroup) -> Found:
    """A clip sampled by the group, and by each rank alone."""
    model = copy.deepcopy(case.build())
    noise, _, text, given = case.draw_inputs()

    def predict(x_BCFHW: Tensor, timestep_B: Tensor) -> Tensor:
        return model(x_BCFHW, timestep_B, {**text.conditions(), **given})

    objective = FlowObjective()
    with torch.no_grad():
        alone = run_sampler("default", objective, predict, noise, num_steps=3)
        use_sequence_group(case.family, model, group)
        together = run_sampler("default", objective, predict, noise, num_steps=3)
    return {
        "error": difference(together, alone),
        "moved": difference(together, noise),
        "numbers": together.sum().item(),
    }


def compare_changed(case: Case, group: SequenceGroup, change: Callable[[Case, nn.Module], None]) -> Found:
    """The same with blocks that are run in another way."""
    model = case.build()
    expected, gradients = run(case, model)
    change(case, model)
    use_sequence_group(case.family, model, group)
    prediction, own = run(case, model)
    return {"prediction": difference(prediction, expected), "gradients": largest(join(own, group), gradients)}


def compare_half(case: Case, group: SequenceGroup) -> Found:
    """In mixed precision, where norms and attention have different ones."""
    model = case.build().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = run(case, model)
        use_sequence_group(case.family, model, group)
        prediction, own = run(case, model)
    return {"prediction": difference(prediction, expected), "gradients": largest(join(own, group), gradients)}


def run(case: Case, model: nn.Module, seed: int = 0) -> tuple[Tensor, Gradients]:
    """The prediction, and all gradients of a weighted sum of it; a weight without a say has zeros."""
    noisy, timestep, text, given = case.draw_inputs(seed)
    model.zero_grad(set_to_none=True)
    prediction = model(noisy, timestep, {**text.conditions(), **given})
    weights = torch.randn(prediction.shape, generator=stream(seed, "sequence loss"), dtype=prediction.dtype)
    (prediction * weights).sum().backward()
    named = model.named_parameters()
    return prediction.detach(), {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in named
    }


def join(own: Gradients, group: SequenceGroup) -> Gradients:
    """The mean over the group."""
    total = torch.cat([gradient.flatten() for gradient in own.values()])
    dist.all_reduce(total, group=dist.distributed_c10d._resolve_process_group(group.name))
    parts = (total / group.degree).split([gradient.numel() for gradient in own.values()])
    return {name: part.view_as(own[name]) for name, part in zip(own, parts, strict=True)}


def difference(one: Tensor, other: Tensor, least: float = 0.0) -> float:
    """The largest difference, as a part of the largest number, or of `least` if that is larger."""
    return float((one - other).abs().max() / max(float(other.abs().max()), least))


def largest(found: Gradients, expected: Gradients) -> float:
    """Over all weights. That of a bias of keys is zero but for rounding: it is compared with the others'."""
    assert found.keys() == expected.keys()
    least = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
    return max(difference(found[name], expected[name], least) for name in expected)


def ratio(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum() / other.square().sum().clamp(min=1e-30)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
