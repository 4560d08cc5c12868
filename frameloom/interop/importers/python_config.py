"""Read Python configuration files as plain values; the text is parsed and never executed.

What a configuration needs is understood: assignments of literals, `dict(...)`, `**other`, names that were assigned
before, `a["b"]`, arithmetic on numbers, and comprehensions over `range`. Everything else is refused with its line."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Container, Iterator, Mapping
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
        method = getattr(self, f"_read_{type(node).__name__.lower()}", None)
        if method is None:
            self._fail(node, "this is code, which is not run; write its value instead")
        return method(node)

    def _read_constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bytes | complex) or node.value is Ellipsis:
            self._fail(node, "not a plain value")
        return node.value

    def _read_name(self, node: ast.Name) -> Any:
        if node.id in self.local:
            return self.local[node.id]
        if node.id not in self.values:
            self._fail(node, f"'{node.id}' is not assigned above")
        self.used.add(node.id)
        return self.values[node.id]

    def _read_tuple(self, node: ast.Tuple) -> list[Any]:
        return [self.read(item) for item in node.elts]

    def _read_list(self, node: ast.List) -> list[Any]:
        return [self.read(item) for item in node.elts]

    def _read_dict(self, node: ast.Dict) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                result.update(self._mapping(value))
            else:
                result[str(self.read(key))] = self.read(value)
        return result

    def _read_call(self, node: ast.Call) -> dict[str, Any]:
        if not isinstance(node.func, ast.Name) or node.func.id != "dict" or node.args:
            self._fail(node, "only dict(key=value) may be called")
        result: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                result.update(self._mapping(keyword.value))
            else:
                result[keyword.arg] = self.read(keyword.value)
        return result

    def _mapping(self, node: ast.expr) -> Mapping[str, Any]:
        value = self.read(node)
        if not isinstance(value, dict):
            self._fail(node, "** needs a dictionary")
        return value

    def _read_subscript(self, node: ast.Subscript) -> Any:
        value, key = self.read(node.value), self.read(node.slice)
        try:
            return value[str(key)] if isinstance(value, dict) else value[key]
        except (KeyError, IndexError, TypeError):
            self._fail(node, f"nothing stands at [{key!r}]")

    def _read_unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.read(node.operand)
        if isinstance(node.op, ast.USub) and _is_number(value):
            return -value
        if isinstance(node.op, ast.Not) and isinstance(value, bool):
            return not value
        self._fail(node, "only -number and not are read")

    def _read_binop(self, node: ast.BinOp) -> Any:
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

    def _read_dictcomp(self, node: ast.DictComp) -> dict[str, Any]:
        result = {}
        for _ in self._loop(node.generators, node):
            result[str(self.read(node.key))] = self.read(node.value)
        return result

    def _read_listcomp(self, node: ast.ListComp) -> list[Any]:
        result = []
        for _ in self._loop(node.generators, node):
            result.append(self.read(node.elt))
        return result

    def _loop(self, generators: list[ast.comprehension], node: ast.expr) -> Iterator[None]:
        """Go through `for name in range(...)`, the only loop that is understood; one around it may use that name."""
        first = generators[0]
        call = first.iter
        if len(generators) > 1 or first.ifs or not isinstance(first.target, ast.Name) or not _is_range(call):
            self._fail(node, "only one loop over range(...) is read")
        assert isinstance(call, ast.Call)
        numbers = [self.read(argument) for argument in call.args]
        if not all(type(number) is int for number in numbers) or not 1 <= len(numbers) <= 3 or 0 in numbers[2:]:
            self._fail(node, "range needs one to three whole numbers")
        steps = range(*numbers)
        if len(steps) > _MAX_LENGTH:
            self._fail(node, f"more than {_MAX_LENGTH} items")
        outer = self.local
        for number in steps:
            self.local = {**outer, first.target.id: number}
            yield
        self.local = outer

    def _fail(self, node: ast.AST, text: str) -> Never:
        raise ConfigError(f"{self.where}:{getattr(node, 'lineno', 1)}: {text}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_range(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and not node.keywords
    )


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
