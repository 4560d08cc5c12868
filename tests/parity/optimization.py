"""Golden cases of the training loop: optimizers, learning rates, clipping and averages of weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.config.schema.optim import ClipFadeSection, OptimSection, ScheduleSection
from frameloom.config.schema.training import EMASection
from frameloom.training.optim.clipping import FadingLimit, clip_gradients
from frameloom.training.optim.ema import EMA
from frameloom.training.optim.optimizer import build_optimizer
from frameloom.training.optim.schedules import build_schedule
from tests.parity.cases import (
    ParityCase,
    ParityOutput,
    compare_numbers,
    golden,
    pair_outputs,
    relative_to_largest,
    under,
)

_POLYNOMIAL_END = 1e-7
_WARMUP_NAME = re.compile(r"base (\S+) initial (\S+) warmup (\d+)")


@golden(lambda case: len(case.config.get("betas", ())) == 3 and "clip_threshold" in case.config)
def run_came(case: ParityCase) -> list[ParityOutput]:
    ours: dict[str, Tensor] = {}
    for run_name, lr in case.config["runs"].items():
        ours |= {f"{run_name}.{name}": tensor for name, tensor in _step_came(case, lr).items()}
    return pair_outputs(case, ours, relative_to_largest(1e-6))


def _step_came(case: ParityCase, lr: float) -> dict[str, Tensor]:
    params = {name: nn.Parameter(tensor.clone()) for name, tensor in under(case.inputs, "param.").items()}
    config = case.config
    halved = [{"match": "*_halflr", "lr": lr / 2}] if any(name.endswith("_halflr") for name in params) else []
    betas, decay = config["betas"], config["weight_decay"]
    section = OptimSection.model_validate(
        {"name": "came", "lr": lr, "betas": betas, "weight_decay": decay, "decay_norms": True, "groups": halved}
    )
    optimizer = build_optimizer(params.items(), section)
    # Not in the recipe: the product has the values of the paper.
    vars(optimizer).update(eps1=config["eps"][0], eps2=config["eps"][1], clip_threshold=config["clip_threshold"])
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


@golden(lambda case: "abnormal_norm_clip_start" in case.config.get("columns", ()))
def run_clip(case: ParityCase) -> list[ParityOutput]:
    rows = [dict(zip(case.config["columns"], row, strict=True)) for row in case.config["rows"]]
    ours = [_clip_row(row) for row in rows]
    names = ("decayed_max_grad_norm", "actual_max_grad_norm", "clip_coefficient_applied_to_grads")
    wanted = ([row[name] for row in rows] for name in names)
    tolerances = (1e-12, 1e-12, 1e-6)
    columns = zip(names, zip(*ours, strict=True), wanted, tolerances, strict=True)
    return [compare_numbers(name, column, values, tolerance) for name, column, values, tolerance in columns]


def _clip_row(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Both limits, and what the gradients are multiplied by, from a real clipping of gradients with that norm."""
    fade = ClipFadeSection(ratio=row["initial_grad_norm_ratio"], fade_steps=row["abnormal_norm_clip_start"])
    rule = FadingLimit(row["max_grad_norm"], fade)
    limit = rule.for_norm(row["global_step"], row["total_norm"])
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.tensor([row["total_norm"]], dtype=torch.float64)
    clip_gradients([param], limit)
    share = float(param.grad) / row["total_norm"] if row["total_norm"] else 1.0
    return rule.at(row["global_step"]), limit, share


@golden(lambda case: "diffusers_get_scheduler" in case.config)
def run_schedules(case: ParityCase) -> list[ParityOutput]:
    return [*_compare_ramps(case.config["vae_cosine_scheduler"]), *_compare_rates(case.config)]


def _compare_ramps(entries: list[dict[str, Any]]) -> Iterator[ParityOutput]:
    for number, entry in enumerate(entries):
        wanted, last_step = entry["values_for_step_0_to_max_plus_2"], entry["max_steps"]
        first, last = entry["value_base"], entry["value_end"]
        schedule = build_schedule(ScheduleSection(name="cosine"), last_step)
        ours = [last + (first - last) * schedule(step) for step in range(len(wanted))]
        tolerance = 1e-6 * min(1.0, max(abs(first), abs(last)))
        yield from _compare_to_the_end(f"cosine ramp {number}", ours, wanted, last_step, tolerance, rises=True)


def _compare_to_the_end(
    name: str, ours: list[float], wanted: list[float], last_step: int, tolerance: float, *, rises: bool
) -> Iterator[ParityOutput]:
    """Up to the last step, and after it. A published cosine that `rises` again then does not in ours."""
    end = last_step + 1
    yield compare_numbers(name, ours[:end], wanted[:end], tolerance)
    if ours[end:]:
        rest = [wanted[last_step]] * len(ours[end:]) if rises else wanted[end:]
        tail = compare_numbers(f"{name} after its end", ours[end:], rest, tolerance)
        yield replace(tail, deviation="cosine-after-its-end" if rises else "")


def _compare_rates(config: Mapping[str, Any]) -> Iterator[ParityOutput]:
    for number, entry in enumerate(config["diffusers_get_scheduler"]):
        name, base, wanted = entry["name"], entry["base_lr"], entry["lr_after_k_scheduler_steps"]
        factor = entry["gradient_accumulation_steps"]
        num_steps = entry["max_train_steps"] * factor
        section = ScheduleSection(
            name="constant" if name == "constant_with_warmup" else name,
            # The "constant" of diffusers has no warm-up, even where it is given one.
            warmup_steps=0 if name == "constant" else entry["lr_warmup_steps"] * factor,
            min_share=_POLYNOMIAL_END / base if name == "polynomial" else 0.0,
            idle_start=True,
        )
        schedule = build_schedule(section, num_steps)
        ours = [base * schedule(step) for step in range(len(wanted))]
        tolerance = 1e-12 * base
        is_cosine = name == "cosine"
        yield from _compare_to_the_end(f"{name} {number}", ours, wanted, num_steps, tolerance, rises=is_cosine)


@golden(lambda case: any(key.startswith("lr_used_at_step") for key in case.config))
def run_warmup(case: ParityCase) -> list[ParityOutput]:
    results = []
    for runs in case.config.values():
        for name, wanted in runs.items():
            found = _WARMUP_NAME.fullmatch(name)
            if found is None:
                raise ValueError(f"a warm-up called {name!r} is of no known kind")
            base, first, num_steps = float(found[1]), float(found[2]), int(found[3])
            schedule = build_schedule(ScheduleSection(warmup_steps=num_steps, start_share=first / base), len(wanted))
            ours = [base * schedule(step) for step in range(len(wanted))]
            results.append(compare_numbers(name, ours, wanted, 1e-9 * base))
    return results


@golden(lambda case: "decay" in case.config and {"ema", "model"} <= {name.partition(".")[0] for name in case.inputs})
def run_ema(case: ParityCase) -> list[ParityOutput]:
    ema = EMA(under(case.inputs, "model."), EMASection(decay=case.config["decay"], warmup=False))
    ema.load_state_dict(under(case.inputs, "ema."))
    ema.update(1)
    return pair_outputs(case, {f"ema.{name}": tensor for name, tensor in ema.state_dict().items()}, 1e-6)
