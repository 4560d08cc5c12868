"""The process that makes videos for the studio: `python -m frameloom.studio.worker`, orders in, events out.

Lines of JSON on standard input: {"id": 3, "wish": {…}} is an order, {"cancel": 3} ends it between two steps. Events on
standard output have the id and one of: loading, step, done (with files), cancelled, failed (with a message). The
process stands in the studio's folder, where paths in recipes start. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from frameloom.core.errors import FrameloomError
from frameloom.core.log import set_up_logging
from frameloom.studio.wishes import OUT, Wish, media_paths

Event = dict[str, Any]


class Cancelled(Exception):
    """The person changed their mind."""


class Orders:
    """Orders from a stream, read by a thread of its own so that a cancellation is heard while one is made."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._is_over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stream:
            message = json.loads(line)
            if "cancel" in message:
                self._cancelled.add(message["cancel"])
            else:
                self._waiting.put(message)
        self._is_over = True
        self._waiting.put(None)

    def next(self) -> Event | None:
        """The next order; None when there will be no more."""
        return self._waiting.get()

    def check(self, number: int) -> None:
        if self._is_over or number in self._cancelled:
            raise Cancelled


def serve(orders: Orders, send: Callable[[Event], None]) -> None:
    """Fill orders one by one; an order that fails does not end the process."""
    from frameloom.studio.model_keeper import ModelKeeper

    number = 0

    def tell(kind: str, **values: Any) -> None:
        send({"id": number, "event": kind, **values})

    keeper = ModelKeeper(lambda text: tell("loading"))
    while (order := orders.next()) is not None:
        number = order["id"]
        try:
            orders.check(number)
            files = fill(Wish(**order["wish"]), keeper, _watch(number, orders, send))
            tell("done", files=[path.as_posix() for path in files])
        except Cancelled:
            tell("cancelled")
        except FrameloomError as error:
            tell("failed", message=str(error))
        except Exception as error:  # a mistake of ours or too little memory: told, logged, and the next order is taken
            traceback.print_exc()
            tell("failed", message=_explain(error))
            keeper.drop()


def _watch(number: int, orders: Orders, send: Callable[[Event], None]) -> Callable[[int], None]:
    """Called after each step: tells of it, and ends an order that was cancelled."""

    def on_step(count: int) -> None:
        send({"id": number, "event": "step", "count": count})
        orders.check(number)

    return on_step


def fill(wish: Wish, keeper: Any, on_step: Callable[[int], None]) -> list[Path]:
    """The files of one wish, made by the very call that `frameloom sample` makes."""
    from frameloom.generate.load import Source
    from frameloom.generate.order import Order, fill_order
    from frameloom.generate.prompts import read_rows

    order = Order(
        source=Source(Path(wish.model), tuple(wish.overrides())),
        rows=read_rows([wish.prompt], None),
        out=Path(OUT),
        first_seed=wish.seed,
        num_samples=wish.num_samples,
        media=media_paths(wish),
        ratio=wish.ratio,
    )
    return fill_order(order, tell=lambda text: None, open_model=keeper.open, on_step=on_step)


def _explain(error: Exception) -> str:
    from frameloom.train.shortage import is_shortage

    if is_shortage(error):
        return "memory or disk space ran out; ask for fewer frames or a smaller size"
    first = str(error).partition("\n")[0]
    return f"an error that should not happen: {type(error).__name__}: {first}"


def main() -> None:
    """Events have a channel of their own: what a library prints goes to the log."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    set_up_logging()
    lock = threading.Lock()

    def send(event: Event) -> None:
        with lock:
            channel.write(json.dumps(event) + "\n")
            channel.flush()

    try:
        serve(Orders(sys.stdin), send)
    except BrokenPipeError:
        # The studio is gone, and with it everybody who could be told.
        os._exit(1)


if __name__ == "__main__":
    main()
