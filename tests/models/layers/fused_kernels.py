"""Whether torch's own kernels for attention were called."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Counts calls of torch's fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "_scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))
