"""An exponential moving average of the weights, in float32 beside the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from frameloom.config.schema.training import EMASection
from frameloom.core.errors import CheckpointError


class EMA:
    """Averages the tensors it was given; build it after sharding, so that each process averages its own shard.

    The average is float32 (or wider) even for bfloat16 weights, in which a decay of 0.9999 would round away. An update
    is a pass over memory that costs about half of AdamW's; with `every` n, each n-th step makes up for n of them. With
    `on_cpu` it rests in host memory, for the price of a copy of the weights at each update.
    """

    def __init__(self, model_params: Mapping[str, Tensor], section: EMASection) -> None:
        self.section = section
        self._params = dict(model_params)
        self._shadow = {
            name: param.detach().to(
                "cpu" if section.on_cpu else param.device, torch.promote_types(param.dtype, torch.float32), copy=True
            )
            for name, param in self._params.items()
        }
        self._is_applied = False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights; call after optimizer step `step`, counted from 1."""
        self._refuse_while_applied("update")
        if not self._shadow or step % self.section.every:
            return
        decay = math.prod(self._decay_at(step - back) for back in range(self.section.every))
        shadows = list(self._shadow.values())
        params = [
            param.detach().to(shadow.device, shadow.dtype)
            for param, shadow in zip(self._params.values(), shadows, strict=True)
        ]
        torch._foreach_lerp_(shadows, params, 1 - decay)

    def _decay_at(self, step: int) -> float:
        """The decay of the update after optimizer step `step` (the first is 1).

        With warm-up the first update copies the weights, and later ones forget fast while the average is young:
        min(decay, (1 + s) / (10 + s)) with s = step - 1, the rule of diffusers.
        """
        if not self.section.warmup:
            return self.section.decay
        age = step - 1
        return 0.0 if age <= 0 else min(self.section.decay, (1 + age) / (10 + age))

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights by name; the tensors themselves, not copies."""
        self._refuse_while_applied("state_dict")
        return dict(self._shadow)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over averaged weights; every name and shape must fit."""
        self._refuse_while_applied("load_state_dict")
        _refuse_other_names(set(self._shadow), set(state))
        for name, shadow in self._shadow.items():
            if state[name].shape != shadow.shape:
                found, wanted = tuple(state[name].shape), tuple(shadow.shape)
                raise CheckpointError(
                    f"EMA: '{name}' is {found} in the checkpoint, {wanted} in the model; use its recipe"
                )
        for name, shadow in self._shadow.items():
            shadow.copy_(state[name])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Let `model` have the averaged weights inside the block, and its own again after it.

        Values are exchanged in place, so sharded and compiled models keep their storages; weights of the average's
        dtype rest in the average's memory meanwhile, others in a copy.
        """
        self._refuse_while_applied("applied")
        _reshard(model)
        params = dict(model.named_parameters())
        _refuse_other_names(set(self._shadow), set(params) & set(self._shadow))
        # Of weights in another dtype than the average's, which cannot rest in its memory.
        own: dict[str, Tensor] = {}
        exchanged: list[str] = []
        self._is_applied = True
        try:
            with torch.no_grad():
                for name, shadow in self._shadow.items():
                    kept = params[name].detach().clone()
                    params[name].copy_(shadow)
                    exchanged.append(name)
                    if kept.dtype == shadow.dtype:
                        shadow.copy_(kept)
                    else:
                        own[name] = kept
            yield
        finally:
            _reshard(model)
            with torch.no_grad():
                for name in exchanged:
                    param, shadow = params[name], self._shadow[name]
                    average = param.detach().clone()
                    param.copy_(own.get(name, shadow))
                    if name not in own:
                        shadow.copy_(average)
            self._is_applied = False

    def _refuse_while_applied(self, action: str) -> None:
        if self._is_applied:
            raise RuntimeError(
                f"EMA.{action} inside EMA.applied: the average is in the model now; leave the block first"
            )


def _reshard(model: nn.Module) -> None:
    """Drop gathered copies of sharded weights: FSDP2 keeps the root's after a forward and would use them again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _refuse_other_names(wanted: set[str], found: set[str]) -> None:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing or extra:
        raise CheckpointError(
            f"EMA: {len(missing)} weights are missing (first: {missing[:1]}) and {len(extra)} are unknown "
            f"(first: {extra[:1]}); the average belongs to another model, use the recipe it was made with"
        )
