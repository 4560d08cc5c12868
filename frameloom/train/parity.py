"""Golden cases of the training loop: optimizers, learning rates, clipping and averages of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.core.parity import (
    ParityCase,
    ParityOutput,
    compare_numbers,
    pair_outputs,
    relative_to_largest,
)
from frameloom.train.clipping import FadingLimit
from frameloom.train.ema import EMA
from frameloom.train.optimizer import clip_gradients
from frameloom.train.schedules import build_schedule, cosine_factor

_POLYNOMIAL_END = 1e-7
_WARMUP_NAME = re.compile(r"base (\S+) initial (\S+) warmup (\d+)")


def matches(case: ParityCase) -> bool:
    return any(is_kind(case) for is_kind, _ in _KINDS)


def run(case: ParityCase) -> list[ParityOutput]:
    return next(run_kind for is_kind, run_kind in _KINDS if is_kind(case))(case)


def _is_came(case: ParityCase) -> bool:
    return len(case.config.get("betas", ())) == 3 and "clip_threshold" in case.config


def _run_came(case: ParityCase) -> list[ParityOutput]:
    ours: dict[str, Tensor] = {}
    for run_name, lr in case.config["runs"].items():
        ours |= {f"{run_name}.{name}": tensor for name, tensor in _step_came(case, lr).items()}
    return pair_outputs(case, ours, relative_to_largest(1e-6))


def _step_came(case: ParityCase, lr: float) -> dict[str, Tensor]:
    from pytorch_optimizer import CAME

    params = {
        name.removeprefix("param."): nn.Parameter(tensor.clone())
        for name, tensor in case.inputs.items()
        if name.startswith("param.")
    }
    groups = [
        {"params": [param for name, param in params.items() if name.endswith("_halflr") == is_slow], "lr": rate}
        for is_slow, rate in ((False, lr), (True, lr / 2))
    ]
    config = case.config
    optimizer = CAME(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=tuple(config["betas"]),
        eps1=config["eps"][0],
        eps2=config["eps"][1],
        clip_threshold=config["clip_threshold"],
        weight_decay=config["weight_decay"],
    )
    found: dict[str, Tensor] = {}
    num_steps = 1 + max(int(name.split(".")[1]) for name in case.inputs if name.startswith("grad."))
    for step in range(num_steps):
        for name, param in params.items():
            param.grad = case.inputs[f"grad.{step}.{name}"].clone()
        optimizer.step()
        found |= {f"step{step}.{name}": param.detach().clone() for name, param in params.items()}
    for name, param in params.items():
        for key, value in optimizer.state[param].items():
            found[f"state.{name}.{key}"] = torch.as_tensor(value).detach().reshape(value.shape or (1,))
    return found


def _is_clip(case: ParityCase) -> bool:
    return "abnormal_norm_clip_start" in case.config.get("columns", ())


def _run_clip(case: ParityCase) -> list[ParityOutput]:
    rows = [dict(zip(case.config["columns"], row, strict=True)) for row in case.config["rows"]]
    ours = [_clip_row(row) for row in rows]
    names = ("decayed_max_grad_norm", "actual_max_grad_norm", "clip_coefficient_applied_to_grads")
    wanted = ([row[name] for row in rows] for name in names)
    tolerances = (1e-12, 1e-12, 1e-6)
    columns = zip(names, zip(*ours, strict=True), wanted, tolerances, strict=True)
    return [compare_numbers(name, column, values, tolerance) for name, column, values, tolerance in columns]


def _clip_row(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Both limits, and what the gradients are multiplied by, from a real clipping of gradients with that norm."""
    rule = FadingLimit(row["max_grad_norm"], row["initial_grad_norm_ratio"], row["abnormal_norm_clip_start"])
    limit = rule.for_norm(row["global_step"], row["total_norm"])
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.tensor([row["total_norm"]], dtype=torch.float64)
    clip_gradients([param], limit)
    return rule.at(row["global_step"]), limit, float(param.grad) / row["total_norm"]


def _is_schedules(case: ParityCase) -> bool:
    return "diffusers_get_scheduler" in case.config


def _run_schedules(case: ParityCase) -> list[ParityOutput]:
    return [*_compare_ramps(case.config["vae_cosine_scheduler"]), *_compare_rates(case.config)]


def _compare_ramps(entries: list[dict[str, Any]]) -> Iterator[ParityOutput]:
    for number, entry in enumerate(entries):
        wanted = entry["values_for_step_0_to_max_plus_2"]
        first, last = entry["value_base"], entry["value_end"]
        ours = [last + (first - last) * cosine_factor(step / entry["max_steps"]) for step in range(len(wanted))]
        yield compare_numbers(f"cosine ramp {number}", ours, wanted, 1e-6 * max(abs(first), abs(last)))


def _compare_rates(config: Mapping[str, Any]) -> Iterator[ParityOutput]:
    for number, entry in enumerate(config["diffusers_get_scheduler"]):
        name, base, wanted = entry["name"], entry["base_lr"], entry["lr_after_k_scheduler_steps"]
        factor = entry["gradient_accumulation_steps"]
        num_steps = entry["max_train_steps"] * factor
        schedule = build_schedule(
            name,
            num_steps=num_steps,
            num_warmup_steps=entry["lr_warmup_steps"] * factor,
            min_share=_POLYNOMIAL_END / base if name == "polynomial" else 0.0,
            idle_start=True,
        )
        ours = [base * schedule(step) for step in range(len(wanted))]
        tolerance = 1e-12 * base
        yield compare_numbers(f"{name} {number}", ours[: num_steps + 1], wanted[: num_steps + 1], tolerance)
        rest, wanted_rest = ours[num_steps + 1 :], wanted[num_steps + 1 :]
        if rest and name == "cosine":
            stays = torch.full((len(rest),), wanted[num_steps], dtype=torch.float64)
            tail = compare_numbers(f"{name} {number} after its end", rest, stays, tolerance)
            yield ParityOutput(tail.name, tail.ours, tail.expected, tolerance, deviation="cosine-after-its-end")
        elif rest:
            yield compare_numbers(f"{name} {number} after its end", rest, wanted_rest, tolerance)


def _is_warmup(case: ParityCase) -> bool:
    return any(key.startswith("lr_used_at_step") for key in case.config)


def _run_warmup(case: ParityCase) -> list[ParityOutput]:
    results = []
    for runs in case.config.values():
        for name, wanted in runs.items():
            found = _WARMUP_NAME.fullmatch(name)
            if found is None:
                raise ValueError(f"a warm-up called {name!r} is of no known kind")
            base, first, num_steps = float(found[1]), float(found[2]), int(found[3])
            schedule = build_schedule(
                "constant_with_warmup", num_steps=len(wanted), num_warmup_steps=num_steps, first_share=first / base
            )
            ours = [base * schedule(step) for step in range(len(wanted))]
            results.append(compare_numbers(name, ours, wanted, 1e-9 * base))
    return results


def _is_ema(case: ParityCase) -> bool:
    return "decay" in case.config and {"ema", "model"} <= {name.partition(".")[0] for name in case.inputs}


def _run_ema(case: ParityCase) -> list[ParityOutput]:
    params = {name.removeprefix("model."): tensor for name, tensor in case.inputs.items() if name.startswith("model.")}
    ema = EMA(params, case.config["decay"], warmup=False)
    ema.load_state_dict({name: case.inputs[f"ema.{name}"] for name in params})
    ema.update(1)
    return pair_outputs(case, {f"ema.{name}": tensor for name, tensor in ema.state_dict().items()}, 1e-6)


_Run = Callable[[ParityCase], list[ParityOutput]]
_KINDS: tuple[tuple[Callable[[ParityCase], bool], _Run], ...] = (
    (_is_came, _run_came),
    (_is_clip, _run_clip),
    (_is_schedules, _run_schedules),
    (_is_warmup, _run_warmup),
    (_is_ema, _run_ema),
)
