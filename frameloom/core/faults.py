"""Faults on purpose: code names the points where a test may let it fail. Off unless FRAMELOOM_FAULTS is set.

    FRAMELOOM_FAULTS='[{"point": "step", "rank": 1, "step": 7, "act": "kill"}]'

A fault strikes where all its keys but `act`, `seconds` and `message` agree with what the point says of itself; the key
`samples_over: 2` asks for a fact `samples` above 2. A key that the point does not know never agrees, so a fault that is
spelled wrongly does nothing, and its test fails.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

VARIABLE = "FRAMELOOM_FAULTS"
_OVER = "_over"
_OWN = ("point", "act", "seconds", "message")


def fail_at(point: str, *, step: int | None = None, rank: int | None = None, **facts: object) -> None:
    """Do what a test has asked for at this point: kill, stop or slow this process, or raise. Nothing otherwise.

    `rank` None: that of the environment.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    own = int(os.environ.get("RANK", "0")) if rank is None else rank
    known = {"step": step, "rank": own, **facts}
    for fault in json.loads(text):
        if fault["point"] == point and all(_agrees(key, value, known) for key, value in fault.items()):
            _strike(fault)


def _agrees(key: str, value: Any, known: dict[str, Any]) -> bool:
    if key in _OWN:
        return True
    if key in known:
        return bool(known[key] in value if isinstance(value, list) else known[key] == value)
    fact = known.get(key.removesuffix(_OVER)) if key.endswith(_OVER) else None
    return fact is not None and bool(fact > value)


def _strike(fault: dict[str, Any]) -> None:
    act, message = fault.get("act", "raise"), fault.get("message", "a fault on purpose")
    if act in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)
    elif act == "slow":
        time.sleep(float(fault["seconds"]))
    elif act == "memory":
        raise MemoryError(message)
    elif act == "raise":
        raise RuntimeError(message)
    else:
        raise ValueError(f"{VARIABLE}: act '{act}' is not kill, stop, slow, memory or raise")
