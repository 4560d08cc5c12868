"""Tensors with a shape but no numbers, and a mode in which every operation makes such tensors.

They claim to be on the host and do what torch's fake tensors do, an order of magnitude faster, because they know one
device and check nothing. A plain tensor on the meta device would not do: automatic casts do not know that device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch._dynamo  # the next module loads it with its first operation: here once, before processes fork
import torch._meta_registrations  # operations on the meta device that torch defines in Python
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_META, _HOST = torch.device("meta"), torch.device("cpu")

Seen = Callable[[Any, Sequence[Any], dict[str, Any], Any, "Known | None"], None]
"""called with each operation, its arguments and its result on the meta device, and the same `Known` object whenever the
operation equals an earlier one"""


class _Form(NamedTuple):
    """All that the result of an operation depends on: there are no numbers in tensors here."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


@dataclass(frozen=True, eq=False)
class Known:
    """What an operation gives for forms that it was given before."""

    forms: Sequence[_Form | None]

    def make(self) -> Any:
        made = [None if form is None else form.make() for form in self.forms]
        return tuple(made) if len(made) > 1 else made[0]


class Ghost(Tensor):
    """Looks like a tensor on the host; `shapes` has its shape, and a storage that views share."""

    shapes: Tensor
    form: _Form

    @staticmethod
    def __new__(cls, inner: Tensor) -> Ghost:
        form = _Form.of(inner)
        made: Ghost = torch.Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.stride,
            storage_offset=inner.storage_offset(),
            dtype=form.dtype,
            device=_HOST,
        )
        made.shapes, made.form = inner, form
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with GhostMode():
            return func(*args, **(kwargs or {}))


class GhostMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors are made and changed in shape only. `on_operation` is called with each operation, if set."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_operation: Seen | None = None
        self._known: dict[Any, Known] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and the wrapper that says so costs a tenth of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapper = _Unwrapper()
        given = unwrapper.unwrap(args)
        if unwrapper.is_all_real:  # small tables may be computed
            return func(*args, **(kwargs or {}))
        named = dict(zip(kwargs, unwrapper.unwrap(kwargs.values()), strict=True)) if kwargs else {}
        if "device" in named or (not unwrapper.has_tensors and _takes_device(func)):
            named["device"] = _META
        changed: Sequence[Any] = args
        known: Known | None = None
        if _is_plain(func):
            changed = ()
            key = (func, tuple(named), *unwrapper.facts)
            known = self._known.get(key)
            if known is None:
                out = func(*given, **named)
                self._remember(key, out)
            else:
                out = known.make()  # blocks are alike: most is not worked out again
        else:
            out = func(*given, **named)
        if self.on_operation is not None:
            self.on_operation(func, given, named, out, known)
        return _wrap_all(out, changed, given)

    def _remember(self, key: Any, out: Any) -> None:
        results = out if isinstance(out, tuple) and len(out) > 1 else (out,)
        if all(item is None or isinstance(item, Tensor) for item in results):
            self._known[key] = Known([None if item is None else _Form.of(item) for item in results])


@cache
def _is_plain(func: Any) -> bool:
    """Whether it makes tensors of its own, instead of a look at another one or a change of it."""
    return not func.is_view and not func._schema.is_mutable


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


class _Unwrapper:
    """Finds what stands behind ghosts; `facts` are equal for what gives equal results."""

    def __init__(self) -> None:
        self.facts: list[Any] = []
        self.num_ghosts = self.num_real = 0

    @property
    def is_all_real(self) -> bool:
        return self.num_real > 0 and self.num_ghosts == 0

    @property
    def has_tensors(self) -> bool:
        return self.num_real + self.num_ghosts > 0

    def unwrap(self, items: Iterable[Any]) -> list[Any]:
        found: list[Any] = []
        for item in items:
            if isinstance(item, Ghost):
                self.num_ghosts += 1
                self.facts.append(item.form)
                found.append(item.shapes)
            elif isinstance(item, Tensor):
                self.num_real += 1
                self.facts.append(_Form.of(item))
                found.append(item.to(_META))
            elif isinstance(item, tuple | list):
                self.facts.append(len(item))
                found.append(type(item)(self.unwrap(item)))
            else:
                self.facts.append((type(item), item))
                found.append(item)
        return found


def _wrap_all(out: Any, changed: Sequence[Any], given: Sequence[Any]) -> Any:
    """New ghosts; for what was changed in place, the one in `changed` that stands for it."""
    if isinstance(out, tuple | list):
        return type(out)(_wrap_all(item, changed, given) for item in out)
    if not isinstance(out, Tensor):
        return out
    for ghost, inner in zip(changed, given, strict=False):
        if inner is out:
            return ghost
    return Ghost(out)


def put_weights(model: nn.Module) -> None:
    """Stand-ins on the host for weights on the meta device: automatic casts do not know that device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_like(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _like(buffer)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
