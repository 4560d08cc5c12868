"""Bytes and messages that a rank of a sequence group sends, counted where they are sent."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what this rank really sends in sequence groups: bytes and messages, by collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent_bytes: dict[str, int] = {"all_to_all": 0, "all_gather": 0}
        self.num_messages: dict[str, int] = {"all_to_all": 0, "all_gather": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = torch.ops._c10d_functional
        if func is own.all_to_all_single.default:
            degree = len(args[1])
            self._add("all_to_all", args[0].nbytes * (degree - 1) // degree)
        elif func is own.all_gather_into_tensor.default:
            self._add("all_gather", args[0].nbytes * (args[1] - 1))
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, num_bytes: int) -> None:
        self.sent_bytes[kind] += num_bytes
        self.num_messages[kind] += 1
