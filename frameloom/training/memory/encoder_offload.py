"""Offloading of frozen models (autoencoder, text encoders): their weights are on the device only while in use.

They wait in host memory and never change, so a visit costs one copy to the device and none back.
Buffers are small and stay on the device. Where the device is the host, there is nothing to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.models.text.base import TextEncoder
from frameloom.models.vaes.base import VideoVAE


def park_encoders(vae: VideoVAE, encoders: Iterable[TextEncoder], device: torch.device) -> list[ParkedModule]:
    """Send the frozen models of a denoiser's training home. None of `encoders` may have gradients pass through it: its
    weights are needed again in the backward pass."""
    if device.type == "cpu":
        return []
    parked = [park(vae, vae, ("encode", "decode"), device)]
    for encoder in encoders:
        model = encoder.load()
        if model is not None:
            parked.append(park(encoder, model, ("encode",), device))
    return parked


def park(owner: object, model: nn.Module, methods: Iterable[str], device: torch.device) -> ParkedModule:
    """Let `model` visit the device while one of `owner`'s methods runs."""
    parked = ParkedModule(model, device)
    for name in methods:
        setattr(owner, name, _on_visit(parked, getattr(owner, name)))
    return parked


def _on_visit(parked: ParkedModule, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with parked.visiting():
            return method(*args, **options)

    return call


class ParkedModule:
    """The weights of one model in host memory, pinned for a GPU. The model must stay frozen."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self._depth = 0
        is_cuda = device.type == "cuda"
        self._home = [(weight, _bring_home(weight, pin_memory=is_cuda)) for weight in _frozen_weights(model)]
        self._leave()

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Inside, the model is on the device; calls inside each other make one visit."""
        if self._depth == 0:
            self._enter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._leave()

    def _enter(self) -> None:
        for weight, home in self._home:
            weight.data = home.to(self.device, non_blocking=True, copy=True)

    def _leave(self) -> None:
        # The device's copies are freed once what was computed with them is done: its allocator sees to that.
        for weight, home in self._home:
            weight.data = home


def _frozen_weights(model: nn.Module) -> list[nn.Parameter]:
    if any(weight.requires_grad for weight in model.parameters()):
        raise ValueError("only a frozen model can be parked: its changes on the device would be lost")
    return list(model.parameters())


def _bring_home(tensor: Tensor, *, pin_memory: bool) -> Tensor:
    home = tensor.detach().to("cpu", copy=True)
    return home.pin_memory() if pin_memory else home
