"""Where the parts of a sampler are: on the device while they work, and in host memory while they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

HOST = torch.device("cpu")


class Movable(Protocol):
    def to(self, device: torch.device, /) -> Any: ...


@dataclass
class Placement:
    """`parts` by name; with `offload`, a part is on `device` only inside `using` it, else all stay there.

    `resident` are the parts on the device now, `moves` all moves so far as (part, device or host): the account of what
    a device must hold at once, which is kept where device and host are the same, too.
    """

    parts: dict[str, Movable]
    device: torch.device
    offload: bool = False
    resident: set[str] = field(default_factory=set)
    moves: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, part in self.parts.items():
            if self.offload:
                part.to(HOST)
            else:
                part.to(self.device)
                self.resident.add(name)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """The part on the device; what is left there by others is parked first."""
        if not self.offload or name in self.resident:
            yield
            return
        for other in sorted(self.resident):
            self._park(other)
        self.parts[name].to(self.device)
        self.resident.add(name)
        self.moves.append((name, "device"))
        try:
            yield
        finally:
            self._park(name)

    def _park(self, name: str) -> None:
        self.parts[name].to(HOST)
        self.resident.discard(name)
        self.moves.append((name, "host"))
