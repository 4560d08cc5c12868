"""A device beside the host, for machines without one: it computes on the host, and refuses what a GPU refuses.

Its tensors do not meet those of the host: an operation that is given both fails, but for copies, single numbers and
indices. So a run on it shows that every tensor is where a GPU needs it. It shows nothing of a real one's casts, streams
and kernels. Importing this changes torch in the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "second"
_ATEN = torch.ops.aten
_COPIES = {_ATEN.copy_.default, _ATEN._to_copy.default}
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default}


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None:
        pass


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
DEVICE = torch.device(NAME, 0)


class Away(Tensor):
    """A tensor of the device; `numbers` are its values."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Away:
        made: Away = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )
        made.numbers = numbers
        return made

    def tolist(self) -> Any:
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


class SecondDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_there(kwargs.get("device")) or any(isinstance(item, Away) for item in _tensors((args, kwargs))):
            return _compute(func, args, kwargs)
        return func(*args, **kwargs)


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = list(_tensors((args, kwargs)))
    away = [item for item in given if isinstance(item, Away)]
    if away and func not in _COPIES:
        _refuse_mixture(func, args, given)
    device = kwargs.get("device")
    stays = bool(away) if device is None else _is_there(device)
    if func is _ATEN.copy_.default:
        stays = isinstance(args[0], Away)
    own_args, own_kwargs = _map(_strip, args), _map(_strip, kwargs)
    if _is_there(device):
        own_kwargs["device"] = torch.device("cpu")
    made = func(*own_args, **{**own_kwargs, **({"pin_memory": False} if own_kwargs.get("pin_memory") else {})})
    known = {id(item.numbers): item for item in away}
    if not stays:
        return made
    return _map(lambda item: known[id(item)] if id(item) in known else Away(item), made)


def _refuse_mixture(func: Any, args: Any, given: list[Tensor]) -> None:
    if func in _INDEXED:
        # Indices may be those of the host; what is indexed, and what is put there, may not.
        given = [args[0], *_tensors(args[2:])]
    strays = [item for item in given if not isinstance(item, Away) and item.dim() > 0]
    if strays:
        shapes = [f"{item.device.type} {tuple(item.shape)}" for item in given]
        raise RuntimeError(f"{func}: expected all tensors on one device, was given {', '.join(shapes)}")


def _strip(tensor: Tensor) -> Tensor:
    return tensor.numbers if isinstance(tensor, Away) else tensor


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(change, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_map(change, item) for item in value])
    return value


class _Generator(torch._C.Generator):
    """Draws on the device what it draws on the host."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu" if _is_there(device) else device)


torch.Generator = _Generator  # type: ignore[misc]


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return Away(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return Away(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(given: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    _strip(to).copy_(_strip(given))
    return to


# `torch.tensor` works below modes and subclasses. Casts are those of nobody: values stay as they are.
_KERNELS = torch.library.Library("aten", "IMPL")
_KERNELS.impl("empty.memory_format", _empty, "PrivateUse1")
_KERNELS.impl("empty_strided", _empty_strided, "PrivateUse1")
_KERNELS.impl("_copy_from", _copy_from, "PrivateUse1")
_CASTS = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_CASTS.fallback(torch.library.fallthrough_kernel)
