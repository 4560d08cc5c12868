"""Parameter groups: which parameters train, and how fast, chosen by name.

A pattern is one or more whole parts of a parameter's name, with * and ? as in file names: `blocks.1` is in
`blocks.1.attn.weight` and not in `blocks.10.attn.weight`; `*attn*` finds the letters anywhere; `.` is everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from frameloom.config.schema.optim import GroupSection, OptimSection
from frameloom.core.errors import ConfigError
from frameloom.core.spelling import nearest

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def matches(name: str, pattern: str) -> bool:
    return pattern == "." or fnmatchcase(f".{name}.", f"*.{pattern.strip('.')}.*")


def freeze_parameters(model: nn.Module, trainable: Sequence[str] | None, frozen: Sequence[str]) -> None:
    """Freeze all but what `trainable` names, and what `frozen` names; what is frozen already stays so."""
    known = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for key, patterns in (("optim.trainable", trainable or ()), ("optim.frozen", frozen)):
        for pattern in patterns:
            if not any(matches(name, pattern) for name in known):
                _refuse_pattern(key, pattern, list(known))
    for name, param in known.items():
        is_chosen = trainable is None or any(matches(name, pattern) for pattern in trainable)
        param.requires_grad_(is_chosen and not any(matches(name, pattern) for pattern in frozen))


def group_parameters(named_parameters: NamedParameters, section: OptimSection) -> list[dict[str, Any]]:
    """Groups of (name, parameter) pairs that share learning rate and weight decay; those without decay come last.

    `lr_factor` of a group is its share of the run's rate at every step. Without `decay_norms`, vectors and scalars are
    never decayed.
    """
    groups: dict[tuple[float, float], list[tuple[str, nn.Parameter]]] = {}
    params = {name: param for name, param in named_parameters if param.requires_grad}
    own: dict[str, GroupSection] = {}
    for number, chosen in enumerate(section.groups):
        names = [name for name in params if matches(name, chosen.match)]
        if not names:
            _refuse_pattern(f"optim.groups.{number}.match", chosen.match, list(params))
        for name in names:
            own.setdefault(name, chosen)  # the first that matches
    for name, param in params.items():
        group = own.get(name)
        factor = 1.0 if group is None or group.lr is None else group.lr / section.lr
        decay = section.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        spared = not section.decay_norms and param.ndim <= 1
        groups.setdefault((factor, 0.0 if spared else decay), []).append((name, param))
    return [
        {"params": members, "lr": section.lr * factor, "lr_factor": factor, "weight_decay": decay}
        for (factor, decay), members in sorted(groups.items(), key=lambda item: item[0][1] == 0)
    ]


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of weights with two or more dimensions inside lists of modules: the repeated blocks, no ends of a model."""
    inside = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return {
        name
        for name, param in model.named_parameters()
        if param.ndim >= 2 and any(name.startswith(f"{prefix}.") for prefix in inside)
    }


def _refuse_pattern(key: str, pattern: str, names: Sequence[str]) -> None:
    """Say what is near: of whole names, of their beginnings, or of single parts."""
    beginnings = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
    parts = {part for name in names for part in name.split(".") if not part.isdecimal()}
    near = nearest(pattern.strip("."), sorted(beginnings | parts))
    hint = f"did you mean '{near}'?" if near else f"their names are like {names[0] if names else 'none at all'}"
    raise ConfigError(f"{key} has '{pattern}', which is no part of the name of a parameter that trains; {hint}")
