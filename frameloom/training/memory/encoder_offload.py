"""Offloading of frozen models (autoencoder, text encoders): their weights are on the device only while in use.

They wait in host memory and never change, so a use costs one copy to the device and none back. Buffers are small and
stay on the device. Where the device is the host, there is nothing to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from frameloom.models.text.base import TextEncoder
from frameloom.models.vaes.base import VideoVAE


def offload_encoders(vae: VideoVAE, encoders: Iterable[TextEncoder], device: torch.device) -> list[OffloadedModule]:
    """Keep the frozen models of a denoiser's training in host memory. None of `encoders` may have gradients pass
    through it: its weights are needed again in the backward pass."""
    if device.type == "cpu":
        return []
    found = [offload(vae, vae, ("encode", "decode"), device)]
    for encoder in encoders:
        model = encoder.load()
        if model is not None:
            found.append(offload(encoder, model, ("encode",), device))
    return found


def offload(owner: object, model: nn.Module, methods: Iterable[str], device: torch.device) -> OffloadedModule:
    """Bring `model` to the device while one of `owner`'s methods runs."""
    offloaded = OffloadedModule(model, device)

    def bring(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            with offloaded.on_device():
                return method(*args, **options)

        return call

    for name in methods:
        setattr(owner, name, bring(getattr(owner, name)))
    return offloaded


class OffloadedModule:
    """The weights of one model in host memory, pinned for a GPU. The model must stay frozen."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        if any(weight.requires_grad for weight in model.parameters()):
            raise ValueError("only a frozen model can be offloaded: its changes on the device would be lost")
        self.model, self.device = model, device
        self._depth = 0
        self._hosted = []
        for weight in model.parameters():
            host = weight.detach().to("cpu", copy=True)
            self._hosted.append((weight, host.pin_memory() if device.type == "cuda" else host))
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, the model is on the device; nested calls copy it once."""
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
        for weight, host in self._hosted:
            weight.data = host.to(self.device, non_blocking=True, copy=True)

    def _leave(self) -> None:
        # The device's copies are freed once what was computed with them is done: its allocator sees to that.
        for weight, host in self._hosted:
            weight.data = host
