"""Prefetching: a thread reads batches ahead and copies them to the device while the previous ones are computed on.

On CUDA a batch is pinned and copied on a separate stream, and the consumer's stream waits for exactly that copy.
Order, content and positions are those of the source: a resumed run reads again what was read ahead and never used.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
_JOIN_S = 30.0
_POLL_S = 0.2


# What the thread puts: items, and at last that nothing more comes, with the error if there was one.
_Entry = tuple[Any, bool, BaseException | None]


def prefetch(
    items: Iterable[Item], *, depth: int = 2, prepare: Callable[[Item], Any] = lambda item: item
) -> Generator[Any, None, None]:
    """The same items in the same order, up to `depth` of them ahead; an error comes where it would have come.

    `prepare` runs in the thread. Closing the generator (or ending its loop early) stops the thread and closes the
    source.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}; it must be 1 or more")
    ready: queue.Queue[_Entry] = queue.Queue(maxsize=depth)
    stop = threading.Event()
    thread = threading.Thread(target=_run_ahead, args=(iter(items), prepare, ready, stop), daemon=True, name="prefetch")
    thread.start()
    try:
        item, has_ended, error = ready.get()
        while not has_ended:
            yield item
            item, has_ended, error = ready.get()
        if error is not None:
            raise error
    finally:
        stop.set()
        # A source that is stuck in a file ends with the process; waiting for it here would hide the error that came.
        thread.join(_JOIN_S)


def _run_ahead(
    items: Iterator[Any], prepare: Callable[[Any], Any], ready: queue.Queue[_Entry], stop: threading.Event
) -> None:
    """Fill the queue until the source ends, fails or `stop` is set; the source is closed in the thread that ran it."""
    failure: BaseException | None = None
    try:
        for item in items:
            if not _put(ready, (prepare(item), False, None), stop):
                return
    except BaseException as error:
        # Any error is raised again in the consuming thread.
        failure = error
    finally:
        if isinstance(items, Generator):
            items.close()
        _put(ready, (None, True, failure), stop)


def _put(ready: queue.Queue[_Entry], entry: _Entry, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(entry, timeout=_POLL_S)
            return True
        except queue.Full:
            continue
    return False


def prefetch_to_device(items: Iterable[Item], device: torch.device, *, depth: int = 2) -> Generator[Item, None, None]:
    """`prefetch`, with every tensor of an item on `device`; on the CPU tensors stay as they are."""
    if device.type != "cuda":
        yield from prefetch(items, depth=depth)
        return
    copies = torch.Stream(device)

    def copy(item: Item) -> tuple[Item, torch.Event]:
        # torch keeps a pinned tensor until the copies that were started from it are through.
        pinned = map_tensors(item, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())
        with copies:
            moved = map_tensors(pinned, lambda tensor: tensor.to(device, non_blocking=True))
            return moved, copies.record_event()

    with closing(prefetch(items, depth=depth, prepare=copy)) as ahead:
        for moved, done in ahead:
            current = torch.accelerator.current_stream(device)
            current.wait_event(done)
            # Made on another stream: its memory may be given away only after this stream is through with it.
            map_tensors(moved, partial(_use_on, stream=current))
            yield moved


def _use_on(tensor: Tensor, stream: torch.Stream) -> Tensor:
    tensor.record_stream(stream)
    return tensor


def map_tensors(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of tuples, lists, dicts and dataclasses with every tensor changed; all else is shared."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, tuple) and type(item) is tuple:
        return tuple(map_tensors(part, change) for part in item)
    if isinstance(item, list):
        return [map_tensors(part, change) for part in item]
    if isinstance(item, dict):
        return {name: map_tensors(part, change) for name, part in item.items()}
    if is_dataclass(item) and not isinstance(item, type):
        parts = {field.name: getattr(item, field.name) for field in fields(item) if field.init}
        changed = {name: map_tensors(part, change) for name, part in parts.items()}
        if all(changed[name] is part for name, part in parts.items()):
            return item
        return replace(item, **changed)
    return item
