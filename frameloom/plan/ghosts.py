"""Tensors that say they are on the host and hold no numbers, and a mode in which all operations make such tensors.

They do what torch's fake tensors do, an order of magnitude faster, because they know one device and check nothing. A
plain tensor on the meta device would not do: automatic casts do not know that device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch._meta_registrations  # operations on the meta device that torch defines in Python
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")
_REAL = {Tensor}

Seen = Callable[[Any, Sequence[Any], dict[str, Any], Any], None]
"""is told an operation with what it was given and what it gave, on the meta device"""


class _Made(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def remake(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


class Ghost(Tensor):
    """Looks like a tensor on the host; `shapes` has its shape, and a storage that views share."""

    shapes: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Ghost:
        made: Ghost = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cpu"),
        )
        made.shapes = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with GhostMode():
            return func(*args, **(kwargs or {}))


class GhostMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors are made and changed in shape only. `on_operation` is told each operation, where it is set."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_operation: Seen | None = None
        self._known: dict[Any, list[_Made | None]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and the wrapper that says so costs a tenth of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, kinds = _unwrap_all(args)
        if kinds == _REAL:  # small tables may be computed
            return func(*args, **kwargs)
        named = dict(zip(kwargs, _unwrap_all(kwargs.values())[0], strict=True)) if kwargs else {}
        if "device" in named or (not kinds and _takes_device(func)):
            named["device"] = _META
        out = self._run(func, given, named)
        if self.on_operation is not None:
            self.on_operation(func, given, named, out)
        if isinstance(out, Tensor):
            return _wrap(out, args, given)
        if isinstance(out, tuple | list):
            return type(out)(_wrap(item, args, given) if isinstance(item, Tensor) else item for item in out)
        return out

    def _run(self, func: Any, given: list[Any], named: dict[str, Any]) -> Any:
        """Blocks are alike: what an operation gives for shapes that it was given before is not worked out again."""
        if not _is_plain(func):
            return func(*given, **named)
        key = (func, _describe(given), _describe(named.values()), tuple(named))
        known = self._known.get(key)
        if known is not None:
            made = tuple(None if like is None else like.remake() for like in known)
            return made if len(made) > 1 else made[0]
        out = func(*given, **named)
        results = out if isinstance(out, tuple) and len(out) > 1 else (out,)
        if all(item is None or isinstance(item, Tensor) for item in results):
            self._known[key] = [
                None if item is None else _Made(item.shape, item.stride(), item.dtype) for item in results
            ]
        return out


def _describe(items: Iterable[Any]) -> tuple[Any, ...]:
    """Equal for what gives equal results, apart from numbers in tensors, which there are none of."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append((item.shape, item.stride(), item.dtype))
        elif isinstance(item, tuple | list):
            found.append(_describe(item))
        else:
            found.append((type(item), item))
    return tuple(found)


@cache
def _is_plain(func: Any) -> bool:
    """Whether it makes tensors of its own, instead of a look at another one or a change of it."""
    return not func.is_view and not func._schema.is_mutable


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _unwrap_all(items: Iterable[Any]) -> tuple[list[Any], set[type]]:
    """What stands behind ghosts, and which kinds of tensors were there."""
    found: list[Any] = []
    kinds: set[type] = set()
    for item in items:
        if isinstance(item, Ghost):
            found.append(item.shapes)
            kinds.add(Ghost)
        elif isinstance(item, Tensor):
            found.append(item.to(_META))
            kinds.add(Tensor)
        elif isinstance(item, tuple | list):
            inner, inner_kinds = _unwrap_all(item)
            found.append(type(item)(inner))
            kinds |= inner_kinds
        else:
            found.append(item)
    return found, kinds


def _wrap(made: Tensor, args: Sequence[Any], given: Sequence[Any]) -> Tensor:
    """A new ghost, or the one that was changed in place."""
    for ghost, inner in zip(args, given, strict=True):
        if inner is made:
            return ghost  # type: ignore[no-any-return]
    return Ghost(made)
