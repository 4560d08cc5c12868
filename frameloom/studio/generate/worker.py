"""Worker process that samples for the studio: requests in, events out; one model stays loaded between them.

Lines of JSON on standard input: {"id": 3, "wish": {…}} is an order, {"cancel": 3} ends it between two steps. Events on
standard output have the id and one of: loading, step, done (with files), cancelled, failed (with a message). The
process stands in the studio's folder, where paths in recipes start. It ends when its input does.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import FrameloomError, RunError
from frameloom.core.files import digest_value
from frameloom.core.logging import set_up_logging
from frameloom.sampling.load import RECIPE, Source, open_sampler
from frameloom.sampling.pipeline import Sampler, build_note
from frameloom.sampling.request import ROW_SETTINGS
from frameloom.studio.generate.requests import OUT, Wish, media_paths

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
    from frameloom.sampling.jobs import Order, fill_order
    from frameloom.sampling.load import Source
    from frameloom.sampling.request import read_rows

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
    from frameloom.training.logging.resource_errors import is_shortage

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


_WEIGHTS = ("checkpoints/step-*/state.json", "config.json", "export/config.json", "*.safetensors")
# Learnt words are a setting of a request by name, but stand in the text encoder.
_BUILT_IN = {"words"}


class ModelKeeper:
    """`open` gives what `open_sampler` would; `tell` hears when that takes a while."""

    def __init__(self, tell: Callable[[str], object] = lambda text: None) -> None:
        self._tell = tell
        self._key = ""
        self._sampler: Sampler | None = None
        self.num_loaded = 0

    def open(self, source: Source) -> Sampler:
        recipe = _read_recipe(source)
        key = _find_key(source, recipe)
        if self._sampler is None or key != self._key:
            self.drop()
            self._tell(f"loading {source.path}")
            self._sampler = open_sampler(source)
            self._key = key
            self.num_loaded += 1
        origin = {**self._sampler.origin, **source.describe()}
        return replace(self._sampler, settings=recipe.sample, origin=origin, note=build_note(recipe))

    def drop(self) -> None:
        """Free the model before another one takes its place."""
        self._sampler, self._key = None, ""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _read_recipe(source: Source) -> Recipe:
    places = [Path(source.recipe)] if source.recipe else [source.path / RECIPE, source.path.parent / RECIPE]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise RunError(f"{source.path}: has no {RECIPE}, in it or beside it; it may have been moved, choose another")
    return load_recipe(found, source.overrides)


def _find_key(source: Source, recipe: Recipe) -> str:
    """Changes with all that a model is built from, but not with the settings of a single request."""
    built = recipe.model_dump(mode="json")
    of_request = set(ROW_SETTINGS) - _BUILT_IN
    built["sample"] = {name: value for name, value in built["sample"].items() if name not in of_request}
    files = [path for pattern in _WEIGHTS for path in sorted(source.path.glob(pattern))]
    return digest_value([str(source.path), source.step, built, [_stamp(path) for path in files]])


def _stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # a run that trains on has deleted an old checkpoint meanwhile
    return str(path), status.st_mtime_ns, status.st_size


if __name__ == "__main__":
    main()
