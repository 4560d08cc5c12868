"""The device of a run, and the settings of the process that go with it."""

from __future__ import annotations

import torch

from frameloom.core.errors import ConfigError
from frameloom.core.process_settings import avoid_amx_in_virtual_machines, keep_freed_memory


def pick_device(name: str) -> torch.device:
    """`auto` is the first accelerator that is there, else the CPU, whose work then keeps the memory that it frees."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"train.device: '{name}' is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"train.device: '{name}' asked for, but PyTorch sees no CUDA device; use auto or cpu")
    if device.type == "cpu":
        keep_freed_memory()
        avoid_amx_in_virtual_machines()
    return device
