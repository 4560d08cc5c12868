"""The optimizers that a recipe can name, and their state as plain named tensors.

State is addressed by parameter name ("exp_avg.blocks.0.weight"), never by position, so a checkpoint is a flat table of
tensors that survives a reordering of the model's parameters. What an optimizer counts for all parameters together has
a name without a dot ("step").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from frameloom.config.schema.optim import OptimSection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.logging import get_logger
from frameloom.training.optim.groups import NamedParameters, group_parameters

log = get_logger(__name__)
Groups = list[dict[str, Any]]
# Kept in the groups by the optimizers of pytorch-optimizer; equal in all groups, which step together.
GROUP_STATE = ("step", "d", "d_max", "d_numerator")
# Computed anew in every step before it is used, or a constant table.
_NOT_SAVED = frozenset({"RMS", "qmap1", "qmap2"})
_MUON_MOMENTUM = 0.95
# Classes of the package pytorch-optimizer and their options besides learning rate and betas.
_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    # Of the CAME paper and of CogVideoX-Fun: added to the squared gradient and to the squared residual.
    "came": ("CAME", {"eps1": 1e-30, "eps2": 1e-16, "clip_threshold": 1.0}),
    # With the recipe's rate as it is: not scaled by the weights, nor by the step.
    "adafactor": (
        "AdaFactor",
        {"scale_parameter": False, "relative_step": False, "momentum_dtype": torch.float32},
    ),
    "lion": ("Lion", {}),
    # As Open-Sora-Plan has it: bias correction, and a warm-up that does not mislead the estimate.
    "prodigy": ("Prodigy", {"bias_correction": True, "safeguard_warmup": True}),
    "muon": ("Muon", {"use_adjusted_lr": True}),
}


def build_optimizer(
    named_parameters: NamedParameters, section: OptimSection, hidden: Collection[str] = ()
) -> Optimizer:
    """An optimizer over the parameters that train; `hidden` names the matrices inside a model's blocks, for muon."""
    groups = group_parameters(named_parameters, section)
    if not groups:
        raise ConfigError("no parameter trains; let optim.trainable name, or optim.frozen leave, a part of the model")
    options = section.model_dump(include={"lr", "betas", "eps"})
    if section.name == "adamw":
        return _build_adamw(groups, options)
    if section.name == "adamw8bit":
        return _build_adamw8bit(groups, options)
    if section.name == "muon":  # its groups have all settings
        groups, options = _split_for_muon(groups, section, hidden), {}
    if section.name == "adafactor" and not section.betas[0]:
        options["betas"] = (None, section.betas[1])
    if section.name != "prodigy":
        options.pop("eps", None)
    name, more = _PUBLISHED[section.name]
    optimizer: Optimizer = getattr(import_module("pytorch_optimizer"), name)(groups, **options, **more)
    if section.name == "prodigy":
        # It would make this sum in the first step; then a checkpoint of step 0 would lack it.
        first = optimizer.param_groups[0]
        first["d_numerator"] = torch.zeros(1, device=first["params"][0].device)
    return optimizer


def _build_adamw(groups: Groups, options: dict[str, Any]) -> Optimizer:
    try:
        return AdamW(groups, fused=True, **options)
    except RuntimeError as error:
        log.warning("fused AdamW is not possible here, using the slower foreach form: %s", error)
        return AdamW(groups, foreach=True, **options)


def _build_adamw8bit(groups: Groups, options: dict[str, Any]) -> Optimizer:
    try:
        build = import_module("bitsandbytes.optim").AdamW8bit  # its types are not exported
    except ImportError as error:
        raise ConfigError(
            "optim.name is adamw8bit, which needs the package bitsandbytes; install it with "
            "pip install 'frameloom[bitsandbytes]', or choose came or adafactor to save memory"
        ) from error
    optimizer: Optimizer = build(groups, **options)
    return optimizer


def _split_for_muon(groups: Groups, section: OptimSection, hidden: Collection[str]) -> Groups:
    """Hidden matrices by Muon, all else by AdamW; Moonlight's factor gives both updates the size of AdamW's."""
    split: Groups = []
    for group in groups:
        for use_muon in (True, False):
            members = [pair for pair in group["params"] if (pair[0] in hidden) == use_muon]
            own = {"momentum": _MUON_MOMENTUM} if use_muon else {"betas": section.betas, "eps": section.eps}
            if members:
                split.append({**group, "params": members, "use_muon": use_muon, **own})
    if not any(group["use_muon"] for group in split):
        raise ConfigError("optim.name is muon, but no matrix inside the model's blocks trains; choose adamw")
    return split


@torch.no_grad()
def allocate_state(optimizer: Optimizer) -> None:
    """Give every parameter its state as it is before the first step, so that a checkpoint can be read into it.

    Weights, gradients and existing state stay as they are.
    """
    params = params_by_name(optimizer)
    empty = [params[name] for name in trained_names(optimizer) if params[name] not in optimizer.state]
    if not empty:
        return
    # While the state is made, only these have gradients, and those are zero.
    everyone = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in everyone]
    for param in everyone:
        param.grad = None
    for param in empty:
        param.grad = torch.zeros_like(param)
    if hasattr(optimizer, "init_group"):  # pytorch-optimizer
        for group in optimizer.param_groups:
            optimizer.init_group(group, beta1=group.get("betas", (None,))[0])
    elif hasattr(optimizer, "init_state"):  # bitsandbytes
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    optimizer.init_state(group, param, group_index, index)
    else:
        # Optimizers of torch make their state in the first step only: one at rate zero moves nothing.
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for param in empty:
            optimizer.state[param]["step"].zero_()
    for param, grad in zip(everyone, grads, strict=True):
        param.grad = grad


def optimizer_tensors(optimizer: Optimizer, names: Iterable[str]) -> dict[str, Tensor]:
    """The state of the named parameters as "<state>.<parameter name>" -> tensor, step counters included.

    Tensors are not copied, plain numbers become tensors. Parameters that have not taken a step yet have none. The
    optimizer must be one of `build_optimizer`, which remembers the names.
    """
    params = params_by_name(optimizer)
    common = {key: _as_tensor(value) for key, value in _group_state(optimizer.param_groups[0]).items()}
    return common | {
        f"{key}.{name}": _as_tensor(value)
        for name in names
        if params[name] in optimizer.state
        for key, value in optimizer.state[params[name]].items()
        if key not in _NOT_SAVED
    }


@torch.no_grad()
def load_optimizer_tensors(optimizer: Optimizer, names: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave; learning rates and other settings stay as the recipe has them.

    State is filled in place (sharded tensors take sharded tensors). Tensors that do not fit are refused before
    anything is changed.
    """
    known = params_by_name(optimizer)
    params = {name: known[name] for name in names}
    allocate_state(optimizer)
    common = {key: tensor for key, tensor in tensors.items() if "." not in key}
    by_param: dict[str, dict[str, Tensor]] = {}
    for flat, tensor in tensors.items():
        key, dot, name = flat.partition(".")
        if dot and name not in params:
            raise CheckpointError(
                f"optimizer: the checkpoint has '{flat}', but no parameter '{name}' trains; "
                "resume with the recipe of the checkpoint, or start with fresh optimizer state"
            )
        if dot:
            by_param.setdefault(name, {})[key] = tensor
    _refuse_other_keys(set(_group_state(optimizer.param_groups[0])), set(common), "all parameters")
    for name, state in by_param.items():
        own = optimizer.state[params[name]]
        _refuse_other_keys(set(own) - _NOT_SAVED, set(state), f"'{name}'")
        for key, tensor in state.items():
            if tensor.shape != (wanted := _as_tensor(own[key]).shape):
                raise CheckpointError(
                    f"optimizer: '{key}.{name}' is {tuple(tensor.shape)} in the checkpoint, {tuple(wanted)} in the "
                    "optimizer; resume with the recipe of the checkpoint"
                )
    fresh = [name for name in params if name not in by_param]
    if fresh:
        # A parameter that never had a gradient has no state; one that was frozen before has none either.
        log.warning(
            "%d of %d parameters start with fresh optimizer state, first: %s", len(fresh), len(params), fresh[0]
        )
    for name, param in params.items():
        if name in by_param:
            _fill(optimizer.state[param], by_param[name])
        else:
            optimizer.state.pop(param, None)
    for group in optimizer.param_groups:
        _fill(group, {key: tensor for key, tensor in common.items() if key in group})


def trained_names(optimizer: Optimizer) -> list[str]:
    """Names of the parameters that an optimizer of `build_optimizer` keeps state of.

    Where several processes split it, `own_names` are those of this process.
    """
    own = getattr(optimizer, "own_names", None)
    return [name for name in params_by_name(optimizer) if own is None or name in own]


def params_by_name(optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """All parameters that an optimizer of `build_optimizer` was given."""
    return {
        name: param
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def _group_state(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in GROUP_STATE if key in group}


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _fill(state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if isinstance(state[key], Tensor):
            state[key].copy_(tensor)
        else:
            state[key] = type(state[key])(tensor.item())


def _refuse_other_keys(own: set[str], given: set[str], what: str) -> None:
    if extra := sorted(given - own):
        raise CheckpointError(
            f"optimizer: the checkpoint has {', '.join(extra)} for {what}, which this optimizer does not keep; it was "
            "made by another one: put optim.name back, or start a new run with --name"
        )
    if lost := sorted(own - given):
        raise CheckpointError(
            f"optimizer: the checkpoint has no {', '.join(lost)} for {what}; use another checkpoint, or put optim.name "
            "back if it was changed"
        )
