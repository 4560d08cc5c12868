"""Tables that follow from shapes alone, such as positions: computed once per shape, the latest few kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class PositionTables:
    """The tables of one kind that a model needs; `compute` gets what `get` is asked for, but for the device.

    Tables are computed on the host, so that their numbers do not depend on the device they go to.
    """

    KEPT = 16

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self._compute = compute
        self._tables: OrderedDict[tuple[Hashable, ...], Tensor] = OrderedDict()

    def get(self, *shape: Hashable, device: torch.device) -> Tensor:
        key = (*shape, device)
        if key not in self._tables:
            # A table made while sampling must also serve training, which refuses inference-mode tensors.
            with torch.inference_mode(False), torch.device("cpu"):
                self._tables[key] = self._compute(*shape).to(device)
            if len(self._tables) > self.KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]
