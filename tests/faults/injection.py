"""Faults on purpose at the points that the program names (`frameloom/core/hooks.py`), as an environment variable says.

    FRAMELOOM_FAULTS='[{"point": "pass", "rank": 1, "step": 7, "act": "kill"}]' \
        python -m tests.faults.injection train my.yaml

A fault strikes where all its keys but `act`, `seconds` and `message` agree with the facts of the point; the key
`samples_over: 2` asks for a fact `samples` above 2. A key that the point does not know never agrees, so a fault that is
spelled wrongly does nothing, and its test fails. The variable is read at every point, so forked processes and tests may
change it at any time; a process has to call `install` first.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from frameloom.cli.main import main
from frameloom.core.hooks import observers

VARIABLE = "FRAMELOOM_FAULTS"
_OVER = "_over"
_OWN = ("point", "act", "seconds", "message")


def faults(*entries: dict[str, object]) -> dict[str, str]:
    """The environment of a process in which these strike."""
    return {VARIABLE: json.dumps(entries)}


def install() -> None:
    if strike_at not in observers:
        observers.append(strike_at)


def strike_at(point: str, facts: dict[str, object]) -> None:
    """Do what the variable asks for at this point: kill, stop or slow this process, or raise."""
    for fault in json.loads(os.environ.get(VARIABLE) or "[]"):
        if fault["point"] == point and all(_agrees(key, value, facts) for key, value in fault.items()):
            _strike(fault)


def _agrees(key: str, value: Any, facts: dict[str, Any]) -> bool:
    if key in _OWN:
        return True
    if key in facts:
        return bool(facts[key] in value if isinstance(value, list) else facts[key] == value)
    fact = facts.get(key.removesuffix(_OVER)) if key.endswith(_OVER) else None
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


if __name__ == "__main__":
    install()
    main()
