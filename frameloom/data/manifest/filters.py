"""Row filters of recipes and commands: `score_motion > 2 and height >= 480`, or a mapping of columns to values.

The language has and, or, not, comparisons (also chained, 1 < x < 5), in [..], not in [..], is null, is not null,
+ - * /, parentheses, numbers, text in quotes, true and false. A column whose name is not a plain word is written in
back quotes. As in SQL, a comparison with a missing value keeps no row; NaN counts as missing.

That is the syntax of Python's expressions, so Python's parser reads it, but sees no name or text of the filter: each
operand is replaced by a placeholder first. The tree becomes a polars expression; it is never executed as Python.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import polars as pl

from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import DataError
from frameloom.core.spelling import suggest

Where = str | Mapping[str, Any]

_MAX_LENGTH = 10_000
_MAX_DEPTH = 30
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<quoted>`[^`]+`)|(?P<name>[^\W\d]\w*)|(?P<symbol><=|>=|==|!=|[-+*/()\[\],<>]))"
)
_WORDS = {"and", "or", "not", "in", "is"}
_LITERALS = {"null", "true", "false"}
_COMPARE: dict[type[ast.cmpop], Callable[[pl.Expr, pl.Expr], pl.Expr]] = {
    ast.Lt: pl.Expr.__lt__,
    ast.LtE: pl.Expr.__le__,
    ast.Gt: pl.Expr.__gt__,
    ast.GtE: pl.Expr.__ge__,
    ast.Eq: pl.Expr.__eq__,
    ast.NotEq: pl.Expr.__ne__,
}
_CALCULATE: dict[type[ast.operator], tuple[str, Callable[[pl.Expr, pl.Expr], pl.Expr]]] = {
    ast.Add: ("+", pl.Expr.__add__),
    ast.Sub: ("-", pl.Expr.__sub__),
    ast.Mult: ("*", pl.Expr.__mul__),
    ast.Div: ("/", pl.Expr.__truediv__),
}
_HINTS = {"=": "write == to compare", "&": "write 'and'", "|": "write 'or'", "!": "write 'not'", "%": "use + - * /"}
_UNEXPECTED = "'{}' is not expected here; expected 'and', 'or' or the end"
_TOO_DEEP = f"more than {_MAX_DEPTH} levels of brackets and signs"


class Condition(NamedTuple):
    """Rows for which `expression` is true are kept; `label` is the condition as written."""

    label: str
    expression: pl.Expr


def parse_where(where: Where, schema: Mapping[str, pl.DataType], *, source: str) -> list[Condition]:
    """The conditions of a filter on a table with these columns; DataError says what is wrong with it."""
    if isinstance(where, str):
        return [Condition(where, parse_filter(where, schema, source=source))] if where.strip() else []
    conditions = []
    for name, value in where.items():
        column = _column(name, schema, f"{source}: cannot filter by '{name}'")
        values = list(value) if isinstance(value, list | tuple) else [value]
        for item in values:
            kind = "truth" if isinstance(item, bool) else "number" if isinstance(item, int | float) else "text"
            if kind != column.kind:
                raise DataError(f"{source}: cannot filter by {name}: {item!r}; the column holds {_PLURAL[column.kind]}")
        conditions.append(Condition(f"{name} = {value!r}", _is_one_of(column, values)))
    return conditions


def filter_table(table: pl.DataFrame, where: Where, *, source: str) -> pl.DataFrame:
    """The rows that fulfil `where`; DataError if there is none."""
    for condition in parse_where(where, table.schema, source=source):
        table = table.filter(condition.expression)
        if not table.height:
            raise no_rows(condition, source)
    return table


def no_rows(condition: Condition, source: str) -> DataError:
    return DataError(f"{source}: no row has {condition.label}; look at the values of its columns")


def parse_filter(text: str, schema: Mapping[str, pl.DataType] | None, *, source: str) -> pl.Expr:
    """The expression for `text`; DataError names the place and the nearest column. Without a schema, all pass."""
    return _Filter(text, schema, source).parse()


def check_recipe_filters(recipe: Recipe) -> None:
    """The filters of a recipe; they are a language of the data engine, which alone can read them."""
    data, validation = recipe.data, recipe.validation
    filters = [("data.where", data.where), *((f"data.sources[{n}].where", s.where) for n, s in enumerate(data.sources))]
    if validation is not None:
        filters.append(("validation.where", validation.where))
    for key, where in filters:
        if isinstance(where, str) and where.strip():
            parse_filter(where, None, source=key)


class _Typed(NamedTuple):
    """An expression and what it yields: number, text, truth, null or other; unknown where there is no table yet.

    `match_as` is the type in which a number is looked for among others: polars compares it with its own type only.
    """

    expression: pl.Expr
    kind: str
    label: str
    match_as: pl.DataType = pl.Float64()


_PLURAL = {"number": "numbers", "text": "text", "truth": "true or false", "null": "null", "other": "nested values"}
_UNKNOWN = "unknown"


def _is_one_of(left: _Typed, values: list[Any]) -> pl.Expr:
    if left.kind != "number":
        return left.expression.is_in(values)
    # One fraction makes fractions of all.
    is_whole = left.match_as.is_integer() and all(isinstance(value, int) for value in values)
    dtype = left.match_as if is_whole or left.match_as.is_float() else pl.Float64()
    return left.expression.cast(dtype).is_in(pl.Series(values, dtype=dtype, strict=False).implode())


def _column(name: str, schema: Mapping[str, pl.DataType] | None, problem: str) -> _Typed:
    if schema is None:
        return _Typed(pl.col(name), _UNKNOWN, name)
    if name not in schema:
        known = [column for column in schema if not column.startswith("__")]
        raise DataError(f"{problem}; {suggest(name, known, kind='columns')}")
    dtype, column = schema[name], pl.col(name)
    if dtype.is_float():
        return _Typed(column.fill_nan(None), "number", name, dtype)
    if dtype.is_integer():
        # Sides are stored in 32 bits and their product must not wrap around; a hash may need 64 without a sign.
        wide = pl.Int128() if dtype == pl.UInt64 else pl.Int64()
        return _Typed(column.cast(wide, strict=False), "number", name, wide)
    if dtype.is_numeric() or dtype == pl.Null:
        return _Typed(column.cast(pl.Float64), "number", name)
    if dtype == pl.Boolean:
        return _Typed(column, "truth", name)
    if dtype == pl.String or isinstance(dtype, pl.Categorical | pl.Enum):
        return _Typed(column.cast(pl.String), "text", name)
    return _Typed(column, "other", name)


class _Token(NamedTuple):
    kind: str
    text: str
    start: int

    @property
    def ends_operand(self) -> bool:
        return self.kind not in ("word", "symbol", "end") or self.text in (")", "]")

    def value(self) -> tuple[Any, str | None]:
        """(value, its kind); the kind is None for a token that is not a value."""
        if self.kind == "number":
            # polars knows no whole number of more than 38 digits.
            is_whole = self.text.isdecimal() and len(self.text) <= 38
            return (int(self.text) if is_whole else float(self.text)), "number"
        if self.kind == "text":
            return re.sub(r"\\(.)", r"\1", self.text[1:-1]), "text"
        if self.kind == "literal":
            return (None, "null") if self.text == "null" else (self.text == "true", "truth")
        return None, None


class _Filter:
    """Builds the expression from the tree of Python's parser and checks the kinds of all parts."""

    def __init__(self, text: str, schema: Mapping[str, pl.DataType] | None, source: str) -> None:
        self._text, self._schema, self._source = text, schema, source

    def parse(self) -> pl.Expr:
        if len(self._text) > _MAX_LENGTH:
            raise self._wrong(0, f"the filter has {len(self._text)} characters, at most {_MAX_LENGTH} are read")
        tokens = self._scan()
        end = _Token("end", "the end", len(self._text))
        self._tokens = {token.start: token for token in (*tokens, end)}
        # Operands become names of the same length, so that places in the tree are places in the text.
        shown = list(" " * len(self._text))
        for token in tokens:
            shown[token.start : token.start + len(token.text)] = (
                token.text if token.kind in ("word", "symbol") else "q" * len(token.text)
            )
        try:
            tree = ast.parse("".join(shown).rstrip() or "?", mode="eval").body if tokens else None
        except SyntaxError as error:
            raise self._explain(error, [*tokens, end]) from None
        except (RecursionError, MemoryError):
            raise self._wrong(0, _TOO_DEEP) from None
        if tree is None:
            raise self._wrong(len(self._text), "expected a column or a value, found 'the end'")
        return self._need(self._build(tree), "truth", tree).expression

    def _scan(self) -> list[_Token]:
        tokens: list[_Token] = []
        open_brackets: list[str] = []
        start = 0
        while self._text[start:].strip():
            match = _TOKEN.match(self._text, start)
            if match is None or match.lastgroup is None:
                start += len(self._text[start:]) - len(self._text[start:].lstrip())
                sign = self._text[start]
                hint = "the quote is not closed" if sign in "'\"`" else _HINTS.get(sign, "it has no meaning here")
                raise self._wrong(start, f"'{sign}' cannot be read; {hint}")
            kind, text = match.lastgroup, match[match.lastgroup]
            if kind == "name" and text.lower() in _WORDS | _LITERALS:
                kind, text = "word" if text.lower() in _WORDS else "literal", text.lower()
            token = _Token(kind, text, match.start(match.lastgroup))
            starts_operand = kind not in ("word", "symbol") or text in ("(", "[")
            if tokens and tokens[-1].ends_operand and starts_operand:
                if "[" in open_brackets[-1:]:
                    raise self._wrong(token.start, f"expected ',', found '{text}'")
                raise self._wrong(token.start, _UNEXPECTED.format(token.text))
            if text in ("(", "["):
                open_brackets.append(text)
            elif text in (")", "]") and open_brackets:
                open_brackets.pop()
            if len(open_brackets) > _MAX_DEPTH:
                raise self._wrong(token.start, _TOO_DEEP)
            tokens.append(token)
            start = match.end()
        return tokens

    def _explain(self, error: SyntaxError, tokens: list[_Token]) -> DataError:
        if "never closed" in error.msg:
            opened = self._text[(error.offset or 1) - 1]
            return self._wrong(len(self._text), f"expected '{')' if opened == '(' else ']'}', found 'the end'")
        place = (error.offset or len(self._text) + 1) - 1
        number, token = next(
            (n, token) for n, token in enumerate(tokens) if token.start >= place or token.kind == "end"
        )
        if number and tokens[number - 1].ends_operand:
            return self._wrong(token.start, _UNEXPECTED.format(token.text))
        is_not_in = number > 1 and tokens[number - 1].text == "not" and tokens[number - 2].ends_operand
        wanted = "'in'" if is_not_in else "a column or a value"
        return self._wrong(token.start, f"expected {wanted}, found '{token.text}'")

    def _build(self, node: ast.expr, depth: int = 0) -> _Typed:
        if depth > _MAX_DEPTH:
            raise self._wrong(node.col_offset, _TOO_DEEP)
        match node:
            case ast.Name():
                token = self._tokens[node.col_offset]
                value, kind = token.value()
                if kind is not None:
                    return _Typed(pl.lit(value), kind, token.text)
                name = token.text.strip("`")
                return _column(name, self._schema, self._message(token.start, f"no column '{name}'"))
            case ast.BoolOp():
                parts = [self._need(self._build(part, depth + 1), "truth", part).expression for part in node.values]
                join, word = (pl.all_horizontal, "and") if isinstance(node.op, ast.And) else (pl.any_horizontal, "or")
                return _Typed(join(parts), "truth", f"the part with '{word}'")
            case ast.UnaryOp(op=ast.Not()):
                inner = self._need(self._build(node.operand, depth + 1), "truth", node.operand)
                return _Typed(~inner.expression, "truth", "the part with 'not'")
            case ast.UnaryOp(op=ast.USub()):
                inner = self._need(self._build(node.operand, depth + 1), "number", node.operand)
                # polars cannot negate 128 bits, but subtract them.
                return _Typed(pl.lit(0) - inner.expression, "number", f"-{inner.label}")
            case ast.BinOp() if type(node.op) in _CALCULATE:
                return self._calculate(node, depth)
            case ast.Compare():
                return self._compare(node, depth)
        usable = "and, or, not, comparisons, in [..], is null, + - * /"
        raise self._wrong(node.col_offset, f"this is no part of the language of filters; use {usable}")

    def _calculate(self, node: ast.BinOp, depth: int) -> _Typed:
        # A long sum is a deep tree, but not a deep filter.
        steps = [node]
        while isinstance(steps[-1].left, ast.BinOp) and type(steps[-1].left.op) in _CALCULATE:
            steps.append(steps[-1].left)
        found = self._need(self._build(steps[-1].left, depth + 1), "number", steps[-1].left)
        for step in reversed(steps):
            right = self._need(self._build(step.right, depth + 1), "number", step.right)
            sign, calculate = _CALCULATE[type(step.op)]
            found = _Typed(
                calculate(found.expression, right.expression), "number", f"{found.label} {sign} {right.label}"
            )
        return found

    def _compare(self, node: ast.Compare, depth: int) -> _Typed:
        left = self._build(node.left, depth + 1)
        checks: list[pl.Expr] = []
        for operator, item in zip(node.ops, node.comparators, strict=True):
            if isinstance(operator, ast.Is | ast.IsNot):
                token = self._tokens[item.col_offset]
                if len(node.ops) > 1 or not isinstance(item, ast.Name) or token.text != "null":
                    raise self._wrong(item.col_offset, f"expected 'null', found '{token.text}'")
                is_null = left.expression.is_null()
                return _Typed(is_null if isinstance(operator, ast.Is) else ~is_null, "truth", "the part with 'is null'")
            if isinstance(operator, ast.In | ast.NotIn):
                if not isinstance(item, ast.List) or len(node.ops) > 1:
                    raise self._wrong(item.col_offset, f"expected '[', found '{self._tokens[item.col_offset].text}'")
                found = _is_one_of(left, [self._literal(element, left) for element in item.elts])
                return _Typed(found if isinstance(operator, ast.In) else ~found, "truth", "the part with 'in'")
            right = self._build(item, depth + 1)
            if "null" in (left.kind, right.kind):
                raise self._wrong(item.col_offset, "nothing compares with null; write 'is null' or 'is not null'")
            if _UNKNOWN not in (left.kind, right.kind) and (left.kind != right.kind or left.kind == "other"):
                parts = f"{left.label} ({_PLURAL[left.kind]}) and {right.label} ({_PLURAL[right.kind]})"
                raise self._wrong(item.col_offset, f"{parts} cannot be compared")
            checks.append(_COMPARE[type(operator)](left.expression, right.expression))
            left = right
        return _Typed(pl.all_horizontal(checks) if len(checks) > 1 else checks[0], "truth", "the comparison")

    def _literal(self, node: ast.expr, left: _Typed) -> Any:
        is_negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        leaf = node.operand if isinstance(node, ast.UnaryOp) and is_negative else node
        token = self._tokens[leaf.col_offset]
        value, kind = token.value() if isinstance(leaf, ast.Name) else (None, None)
        if kind is None or (is_negative and kind != "number"):
            raise self._wrong(token.start, f"expected a value in the list, found '{token.text}'")
        if kind != left.kind and left.kind != _UNKNOWN:
            raise self._wrong(token.start, f"{token.text} is {kind}, but {left.label} holds {_PLURAL[left.kind]}")
        number: Any = value
        return -number if is_negative else value

    def _need(self, found: _Typed, kind: str, node: ast.expr) -> _Typed:
        if found.kind not in (kind, _UNKNOWN):
            wanted = "a number" if kind == "number" else "a comparison, e.g. height >= 480"
            raise self._wrong(node.col_offset, f"{found.label} is {_PLURAL[found.kind]}; expected {wanted}")
        return found

    def _wrong(self, start: int, text: str) -> DataError:
        return DataError(self._message(start, text))

    def _message(self, start: int, text: str) -> str:
        shown = self._text if len(self._text) <= 200 else self._text[:200] + "..."
        return f'{self._source}: filter "{shown}", character {start + 1}: {text}'
