"""The optimizers that a recipe can name, each from parameter groups. Packages are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from frameloom.core.errors import ConfigError
from frameloom.core.logging import get_logger

log = get_logger(__name__)

Groups = list[dict[str, Any]]

# Of the CAME paper and of CogVideoX-Fun: added to the squared gradient and to the squared residual.
_CAME_EPS = (1e-30, 1e-16)
_MUON_MOMENTUM = 0.95


@dataclass(frozen=True)
class Settings:
    """What all of them are given; `hidden` are the matrices that muon turns, by name."""

    lr: float
    betas: tuple[float, ...]
    eps: float
    hidden: Collection[str] = ()


def _build_adamw(groups: Groups, settings: Settings) -> Optimizer:
    beta1, beta2 = settings.betas
    options: dict[str, Any] = {"lr": settings.lr, "betas": (beta1, beta2), "eps": settings.eps}
    try:
        return AdamW(groups, fused=True, **options)
    except RuntimeError as error:
        log.warning("fused AdamW is not possible here, using the slower foreach form: %s", error)
        return AdamW(groups, foreach=True, **options)


def _build_adamw8bit(groups: Groups, settings: Settings) -> Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "optim.name is adamw8bit, which needs the package bitsandbytes; install it with "
            "pip install 'frameloom[bitsandbytes]', or choose came or adafactor to save memory"
        ) from error
    optimizer: Optimizer = AdamW8bit(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    return optimizer


def _build_came(groups: Groups, settings: Settings) -> Optimizer:
    from pytorch_optimizer import CAME

    beta1, beta2, beta3 = settings.betas
    return CAME(
        groups,
        lr=settings.lr,
        betas=(beta1, beta2, beta3),
        eps1=_CAME_EPS[0],
        eps2=_CAME_EPS[1],
        clip_threshold=1.0,
    )


def _build_adafactor(groups: Groups, settings: Settings) -> Optimizer:
    """With the recipe's rate as it is: not scaled by the weights, nor by the step."""
    from pytorch_optimizer import AdaFactor

    momentum, beta2 = settings.betas
    options: dict[str, Any] = {"scale_parameter": False, "relative_step": False, "momentum_dtype": torch.float32}
    betas = (momentum, beta2) if momentum else (None, beta2)
    return AdaFactor(groups, lr=settings.lr, betas=betas, **options)


def _build_lion(groups: Groups, settings: Settings) -> Optimizer:
    from pytorch_optimizer import Lion

    beta1, beta2 = settings.betas
    return Lion(groups, lr=settings.lr, betas=(beta1, beta2))


def _build_prodigy(groups: Groups, settings: Settings) -> Optimizer:
    """As Open-Sora-Plan has it: decoupled decay, bias correction, and a warm-up that does not mislead the estimate."""
    from pytorch_optimizer import Prodigy

    beta1, beta2 = settings.betas
    options: dict[str, Any] = {"bias_correction": True, "safeguard_warmup": True}
    optimizer = Prodigy(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps, **options)
    # It would make this sum in the first step; then a checkpoint of step 0 would lack it.
    first = optimizer.param_groups[0]
    first["d_numerator"] = torch.zeros(1, device=first["params"][0].device)
    return optimizer


def _build_muon(groups: Groups, settings: Settings) -> Optimizer:
    """Hidden matrices by Muon, all else by AdamW; Moonlight's factor gives both updates the size of AdamW's."""
    from pytorch_optimizer import Muon

    split: Groups = []
    for group in groups:
        for use_muon in (True, False):
            members = [pair for pair in group["params"] if (pair[0] in settings.hidden) == use_muon]
            own = {"momentum": _MUON_MOMENTUM} if use_muon else {"betas": settings.betas, "eps": settings.eps}
            if members:
                split.append({**group, "params": members, "use_muon": use_muon, **own})
    if not any(group["use_muon"] for group in split):
        raise ConfigError("optim.name is muon, but no matrix inside the model's blocks trains; choose adamw")
    return Muon(split, use_adjusted_lr=True)


KINDS: dict[str, Callable[[Groups, Settings], Optimizer]] = {
    "adamw": _build_adamw,
    "adamw8bit": _build_adamw8bit,
    "came": _build_came,
    "adafactor": _build_adafactor,
    "lion": _build_lion,
    "prodigy": _build_prodigy,
    "muon": _build_muon,
}
