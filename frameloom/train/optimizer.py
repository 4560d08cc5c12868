"""The optimizer, its state as plain named tensors, and gradient clipping.

State is addressed by parameter name ("exp_avg.blocks.0.weight"), never by position, so a checkpoint is a flat table of
tensors that survives a reordering of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.log import get_logger

log = get_logger(__name__)

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def build_optimizer(
    named_parameters: NamedParameters,
    *,
    name: str = "adamw",
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    no_decay: bool = True,
) -> Optimizer:
    """An optimizer over the parameters that train.

    `no_decay` spares vectors and scalars, that is biases and norm scales, from weight decay. Published recipes of
    Open-Sora-Plan decay everything: they need False.
    """
    if name != "adamw":
        raise ConfigError(f"optimizer '{name}' is unknown; choose 'adamw'")
    groups = decay_groups(named_parameters, weight_decay=weight_decay, no_decay=no_decay)
    if not groups:
        raise ConfigError("optimizer: no parameter trains; unfreeze a part of the model")
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
    try:
        return AdamW(groups, fused=True, **options)
    except RuntimeError as error:
        log.warning("fused AdamW is not possible here, using the slower foreach form: %s", error)
        return AdamW(groups, foreach=True, **options)


def decay_groups(named_parameters: NamedParameters, *, weight_decay: float, no_decay: bool) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay, of (name, parameter) pairs; empty groups are left out."""
    decayed: list[tuple[str, nn.Parameter]] = []
    spared: list[tuple[str, nn.Parameter]] = []
    for name, param in named_parameters:
        if param.requires_grad:
            (spared if no_decay and param.ndim <= 1 else decayed).append((name, param))
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def allocate_state(optimizer: Optimizer) -> None:
    """Give every parameter its state as it is before the first step, so that a checkpoint can be read into it.

    The optimizer makes its state in the first step only; this takes one with zero gradients at rate zero, which leaves
    weights as they are, and puts the counters back. Does nothing when there is state already.
    """
    if optimizer.state:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    rates = [group["lr"] for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
        optimizer.state[param]["step"].zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def optimizer_tensors(optimizer: Optimizer, names: Iterable[str]) -> dict[str, Tensor]:
    """The state of the named parameters as "<state>.<parameter name>" -> tensor, step counters included.

    Tensors are not copied. Parameters that have not taken a step yet have none. The optimizer must be one of
    `build_optimizer`, which remembers the names.
    """
    params = _params_by_name(optimizer)
    return {
        f"{key}.{name}": value
        for name in names
        if params[name] in optimizer.state
        for key, value in optimizer.state[params[name]].items()
    }


@torch.no_grad()
def load_optimizer_tensors(optimizer: Optimizer, names: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave; learning rates and other settings stay as the recipe has them.

    State that exists is filled in place (sharded tensors take sharded tensors); otherwise the optimizer gets copies.
    Tensors that do not fit are refused before anything is changed.
    """
    known = _params_by_name(optimizer)
    params = {name: known[name] for name in names}
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    by_param = _split_names(tensors, params)
    _refuse_other_shapes(by_param, params)
    fresh = [name for name in params if name not in by_param]
    if fresh:
        # A parameter that never had a gradient has no state; one that was frozen before has none either.
        log.warning(
            "%d of %d parameters start with fresh optimizer state, first: %s", len(fresh), len(params), fresh[0]
        )
    for name, param in params.items():
        if name not in by_param:
            optimizer.state.pop(param, None)
            continue
        for key, tensor in by_param[name].items():
            _restore(optimizer, param, key, tensor, groups[param])


def _params_by_name(optimizer: Optimizer) -> dict[str, nn.Parameter]:
    return {
        name: param
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def _restore(optimizer: Optimizer, param: Tensor, key: str, tensor: Tensor, group: Mapping[str, Any]) -> None:
    state = optimizer.state[param]
    if key in state:
        state[key].copy_(tensor)
        return
    # The counter of a plain optimizer lives on the host; a fused or captured one reads it on the device.
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    state[key] = tensor.detach().to(param.device if on_device else "cpu", copy=True)


def _split_names(tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by parameter name, then by kind of state; names that do not fit are an error."""
    by_param: dict[str, dict[str, Tensor]] = {}
    for flat, tensor in tensors.items():
        key, _, name = flat.partition(".")
        if name not in params:
            raise CheckpointError(
                f"optimizer: the checkpoint has '{flat}', but no parameter '{name}' trains; "
                "resume with the recipe of the checkpoint, or start with fresh optimizer state"
            )
        by_param.setdefault(name, {})[key] = tensor
    all_keys = {key for state in by_param.values() for key in state}
    for name, state in by_param.items():
        if set(state) != all_keys:
            lost = ", ".join(sorted(all_keys - set(state)))
            raise CheckpointError(f"optimizer: the checkpoint has no {lost} for '{name}'; use another checkpoint")
    return by_param


def _refuse_other_shapes(by_param: Mapping[str, Mapping[str, Tensor]], params: Mapping[str, Tensor]) -> None:
    for name, state in by_param.items():
        for key, tensor in state.items():
            if key != "step" and tensor.shape != params[name].shape:
                raise CheckpointError(
                    f"optimizer: '{key}.{name}' is {tuple(tensor.shape)} in the checkpoint, the parameter is "
                    f"{tuple(params[name].shape)}; resume with the recipe of the checkpoint"
                )


_CLIP_EPS = 1e-6  # what torch adds to the norm before it divides


@torch.no_grad()
def clip_gradients(params: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`; None only measures.

    Returns the norm before clipping, on the device: reading it is what makes the host wait, so read it seldom. A norm
    that is not finite makes the gradients not finite.
    """
    with_grad = [param for param in params if param.grad is not None]
    norm = nn.utils.get_total_norm([param.grad for param in with_grad if param.grad is not None])
    if isinstance(norm, DTensor):
        # Each process has the norm of its shard; the sum over all of them is one small collective.
        norm = norm.full_tensor()
    # On the CPU the norm is at hand, and a pass over all gradients that multiplies them by 1 can be left out.
    if max_norm is not None and not (norm.device.type == "cpu" and norm + _CLIP_EPS <= max_norm):
        nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm
