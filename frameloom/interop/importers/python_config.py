"""Read Python configuration files as plain values; the text is parsed and never executed.

What a configuration needs is understood: assignments of literals, `dict(...)`, `**other`, names that were assigned
before, `a["b"]`, arithmetic on numbers, and comprehensions over `range`. Everything else is refused with its line."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Never

from frameloom.config.loading.yaml_values import read_text
from frameloom.core.errors import ConfigError

_MAX_EXPONENT, _MAX_NUMBER, _MAX_LENGTH = 64, 1e30, 10_000
_MAX_VALUES, _MAX_BASES = 100_000, 20
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def read_python_config(path: Path, *, settings: Container[str] = (), chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a configuration over those of its `_base_` files."""
    if path.resolve() in chain or len(chain) > _MAX_BASES:
        raise ConfigError(f"{path}: _base_ goes in a circle; remove one of these lines")
    own = parse_python_config(read_text(path, shown=str(path)), where=str(path), settings=settings)
    bases = own.pop("_base_", [])
    values: dict[str, Any] = {}
    if not isinstance(bases, str | list):
        raise ConfigError(f"{path}: _base_ is {bases!r}; expected a file, or a list of files")
    for base in [bases] if isinstance(bases, str) else bases:
        file = path.parent / str(base)
        if not file.is_file():
            raise ConfigError(f"{path}: the _base_ '{base}' does not exist; it is looked for in {path.parent}")
        merge_over(values, read_python_config(file, settings=settings, chain=(*chain, path.resolve())))
    merge_over(values, own)
    return values


def parse_python_config(text: str, *, where: str, settings: Container[str] = ()) -> dict[str, Any]:
    """The variables that the text assigns; one that feeds others is left out, unless it is among `settings`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ConfigError(f"{where}:{line}: not valid Python ({getattr(error, 'msg', error)})") from error
    reader = _Reader(where)
    try:
        for statement in tree.body:
            reader.run(statement)
    except RecursionError as error:
        raise ConfigError(f"{where}: values nest too deep; a configuration needs far less") from error
    values = {name: value for name, value in reader.values.items() if name in settings or name not in reader.used}
    if _count(values) > _MAX_VALUES:
        raise ConfigError(f"{where}: more than {_MAX_VALUES} values; a configuration needs far less")
    return values


def _count(value: Any) -> int:
    """Values inside, counted in full where one is used twice; a little more than the limit at most."""
    waiting, number = [value], 0
    while waiting and number <= _MAX_VALUES:
        item = waiting.pop()
        number += 1
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return number


class _Reader:
    """Values of expressions; `local` are the loop variables of comprehensions."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.values: dict[str, Any] = {}
        self.local: dict[str, Any] = {}
        self.used: set[str] = set()
        self.num_read = 0

    def run(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Assign):
            value = self.read(node.value)
            for target in node.targets:
                self._assign(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self.read(node.value))
        else:
            self._fail(node, "only assignments of values are read")

    def _assign(self, target: ast.expr, value: Any) -> None:
        if not isinstance(target, ast.Name):
            self._fail(target, "only plain names are assigned")
        self.values[target.id] = value

    def read(self, node: ast.expr) -> Any:
        self.num_read += 1
        if self.num_read > _MAX_VALUES:
            self._fail(node, f"more than {_MAX_VALUES} values; a configuration needs far less")
        match node:
            case ast.Constant(value=value):
                if isinstance(value, bytes | complex) or value is Ellipsis:
                    self._fail(node, "not a plain value")
                return value
            case ast.Name(id=name):
                if name in self.local:
                    return self.local[name]
                if name not in self.values:
                    self._fail(node, f"'{name}' is not assigned above")
                self.used.add(name)
                return self.values[name]
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return [self.read(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                return self._read_items(zip(keys, values, strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                named = (None if one.arg is None else ast.Constant(one.arg) for one in keywords)
                return self._read_items(zip(named, (one.value for one in keywords), strict=True))
            case ast.Call():
                self._fail(node, "only dict(key=value) may be called")
            case ast.Subscript():
                value, key = self.read(node.value), self.read(node.slice)
                try:
                    return value[str(key)] if isinstance(value, dict) else value[key]
                except (KeyError, IndexError, TypeError):
                    self._fail(node, f"nothing stands at [{key!r}]")
            case ast.UnaryOp(operand=operand):
                value = self.read(operand)
                if isinstance(node.op, ast.USub) and _is_number(value):
                    return -value
                if isinstance(node.op, ast.Not) and isinstance(value, bool):
                    return not value
                self._fail(node, "only -number and not are read")
            case ast.BinOp():
                return self._compute(node)
            case ast.DictComp():
                return {str(self.read(node.key)): self.read(node.value) for _ in self._loop(node.generators, node)}
            case ast.ListComp():
                return [self.read(node.elt) for _ in self._loop(node.generators, node)]
        self._fail(node, "this is code, which is not run; write its value instead")

    def _read_items(self, items: Iterable[tuple[ast.expr | None, ast.expr]]) -> dict[str, Any]:
        """Keys and values of a dictionary; without a key it is `**value`."""
        result: dict[str, Any] = {}
        for key, node in items:
            if key is not None:
                result[str(self.read(key))] = self.read(node)
                continue
            value = self.read(node)
            if not isinstance(value, dict):
                self._fail(node, "** needs a dictionary")
            result.update(value)
        return result

    def _compute(self, node: ast.BinOp) -> Any:
        left, right = self.read(node.left), self.read(node.right)
        kind = type(node.op)
        joins = kind is ast.Add and type(left) is type(right) and isinstance(left, str | list)
        if kind is ast.Mult and isinstance(left, list) and type(right) is int and len(left) * right <= _MAX_LENGTH:
            return left * right
        if not joins and not (_is_number(left) and _is_number(right)):
            self._fail(node, "arithmetic needs two numbers")
        if kind not in _OPERATORS or (kind is ast.Pow and not (abs(right) <= _MAX_EXPONENT and abs(left) <= 1e6)):
            self._fail(node, "this arithmetic is not read; write the result")
        try:
            result = _OPERATORS[kind](left, right)
        except (ArithmeticError, ValueError) as error:
            self._fail(node, str(error))
        if (len(result) > _MAX_LENGTH) if joins else isinstance(result, complex) or abs(result) > _MAX_NUMBER:
            self._fail(node, "the result is too large")
        return result

    def _loop(self, generators: list[ast.comprehension], node: ast.expr) -> Iterator[None]:
        """Go through `for name in range(...)`, the only loop that is understood; one around it may use that name."""
        match generators:
            case [ast.comprehension(target=ast.Name(id=name), iter=call, ifs=[])]:
                pass
            case _:
                self._fail(node, "only one loop over range(...) is read")
        match call:
            case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]):
                numbers = [self.read(argument) for argument in arguments]
            case _:
                self._fail(node, "only one loop over range(...) is read")
        if not all(type(number) is int for number in numbers) or not 1 <= len(numbers) <= 3 or 0 in numbers[2:]:
            self._fail(node, "range needs one to three whole numbers")
        steps = range(*numbers)
        if len(steps) > _MAX_LENGTH:
            self._fail(node, f"more than {_MAX_LENGTH} items")
        outer = self.local
        for number in steps:
            self.local = {**outer, name: number}
            yield
        self.local = outer

    def _fail(self, node: ast.AST, text: str) -> Never:
        raise ConfigError(f"{self.where}:{getattr(node, 'lineno', 1)}: {text}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merge_over(target: dict[str, Any], value: Mapping[str, Any]) -> None:
    """Merge `value` into `target` as mmengine does: dictionaries deeply, unless `_delete_` is true inside."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            inner = {name: part for name, part in item.items() if name != "_delete_"}
            if item.get("_delete_") or not isinstance(target.get(key), dict):
                target[key] = {}
            merge_over(target[key], inner)
        else:
            target[key] = copy.deepcopy(item)


def flatten(value: Mapping[str, Any], whole: Container[str], prefix: str = "") -> dict[str, Any]:
    """Values by dotted names; a dictionary whose name is in `whole` stays one."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and name not in whole:
            flat.update(flatten(item, whole, f"{name}."))
        else:
            flat[name] = item
    return flat
