"""Fused AdamW with little around its kernel: torch sorts and counts tensors in every step, a fifth of its time here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW


@dataclass(frozen=True)
class _Group:
    """Parameters that are alike, their states, and their step counters, which are parts of one tensor."""

    params: list[Tensor]
    states: list[dict[str, Tensor]]
    counter: Tensor
    counters: list[Tensor]


class LeanAdamW(AdamW):
    """`AdamW(fused=True)`, equal to the bit and in its state.

    Where all parameters are alike and have gradients, the kernel is called at once. The step counters of a group are
    parts of one tensor, so that one operation counts them all; each is still a tensor of its own.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self._joined: list[_Group] = []
        self._known: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        grads = [[param.grad for param in group["params"]] for group in self.param_groups]
        if closure is not None or any(grad is None for mine in grads for grad in mine) or not self._join():
            return cast(float | None, _torch_step()(self, closure))
        for group, mine, joined in zip(self.param_groups, grads, self._joined, strict=True):
            joined.counter.add_(1)
            torch._fused_adamw_(
                joined.params,
                cast(list[Tensor], mine),
                [state["exp_avg"] for state in joined.states],
                [state["exp_avg_sq"] for state in joined.states],
                [],
                joined.counters,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=None,
            )
        return None

    def _join(self) -> bool:
        """Have `_joined` describe the groups as they are; False where parameters differ in kind or have no state."""
        if self._is_joined():
            return True
        params = [param for group in self.param_groups for param in group["params"]]
        is_simple = all(param in self.state and not isinstance(param, DTensor) for param in params)
        if not is_simple or len({(param.dtype, param.device) for param in params}) != 1:
            return False
        self._joined, self._known = [], list(self.state.values())
        for group in self.param_groups:
            states = [self.state[param] for param in group["params"]]
            counter = torch.stack([state["step"] for state in states])
            counters = list(counter.unbind())
            for state, own in zip(states, counters, strict=True):
                state["step"] = own
            self._joined.append(_Group(group["params"], states, counter, counters))
        return True

    def _is_joined(self) -> bool:
        """Whether groups, states and counters are still the very objects that were joined."""
        return (
            len(self._joined) == len(self.param_groups)
            and len(self._known) == len(self.state)
            and all(map(is_, self.state.values(), self._known))
            and all(
                joined.params is group["params"]
                and len(joined.params) == len(joined.states)
                and all(state["step"] is own for state, own in zip(joined.states, joined.counters, strict=True))
                for joined, group in zip(self._joined, self.param_groups, strict=True)
            )
        )


def _torch_step() -> Callable[..., Any]:
    """That of torch, without the hooks around it, which run around ours."""
    step: Any = AdamW.step
    return cast(Callable[..., Any], step.__wrapped__ if getattr(step, "hooked", False) else step)
