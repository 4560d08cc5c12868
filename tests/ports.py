"""Ports for processes that are started later."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Below those that the system hands out: nobody who asks it for one gets them before they are used."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    places = random.Random(os.urandom(8))
    found: set[int] = set()
    while len(found) < count:
        port = places.randrange(10_000, end)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.add(port)
    return sorted(found)
