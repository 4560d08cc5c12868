"""Row filters of recipes and commands: `score_motion > 2 and height >= 480`, or a mapping of columns to values.

The language has and, or, not, comparisons (also chained, 1 < x < 5), in [..], not in [..], is null, is not null,
+ - * /, parentheses, numbers, text in quotes, true and false. A column whose name is not a plain word is written in
back quotes. The text is parsed here and becomes a polars expression; nothing of it is ever executed. As in SQL, a
comparison with a missing value keeps no row; NaN counts as missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import polars as pl

from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import DataError
from frameloom.core.spelling import suggest

Where = str | Mapping[str, Any]

MAX_LENGTH = 10_000
_MAX_DEPTH = 30
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<quoted>`[^`]+`)|(?P<name>[^\W\d]\w*)|(?P<symbol><=|>=|==|!=|[-+*/()\[\],<>]))"
)
_WORDS = {"and", "or", "not", "in", "is", "null", "true", "false"}
_COMPARE: dict[str, Callable[[pl.Expr, pl.Expr], pl.Expr]] = {
    "<": pl.Expr.__lt__,
    "<=": pl.Expr.__le__,
    ">": pl.Expr.__gt__,
    ">=": pl.Expr.__ge__,
    "==": pl.Expr.__eq__,
    "!=": pl.Expr.__ne__,
}
_CALCULATE: dict[str, Callable[[pl.Expr, pl.Expr], pl.Expr]] = {
    "+": pl.Expr.__add__,
    "-": pl.Expr.__sub__,
    "*": pl.Expr.__mul__,
    "/": pl.Expr.__truediv__,
}
_HINTS = {"=": "write == to compare", "&": "write 'and'", "|": "write 'or'", "!": "write 'not'", "%": "use + - * /"}


class Condition(NamedTuple):
    """Rows for which `expression` is true are kept; `label` is the condition as written."""

    label: str
    expression: pl.Expr


def parse_where(where: Where, schema: Mapping[str, pl.DataType], *, source: str) -> list[Condition]:
    """The conditions of a filter on a table with these columns; DataError says what is wrong with it."""
    if isinstance(where, str):
        return [Condition(where, parse_filter(where, schema, source=source))] if where.strip() else []
    return [_match_values(name, value, schema, source) for name, value in where.items()]


def filter_table(table: pl.DataFrame, where: Where, *, source: str) -> pl.DataFrame:
    """The rows that fulfil `where`; DataError if there is none."""
    for condition in parse_where(where, table.schema, source=source):
        table = table.filter(condition.expression)
        if not table.height:
            raise no_rows(condition, source)
    return table


def no_rows(condition: Condition, source: str) -> DataError:
    return DataError(f"{source}: no row has {condition.label}; look at the values of its columns")


def parse_filter(text: str, schema: Mapping[str, pl.DataType], *, source: str) -> pl.Expr:
    """The expression for `text`; DataError names the place and the nearest column."""
    return _Parser(text, schema, source).parse()


def check_filter(text: str, *, source: str) -> None:
    """DataError if no table could be filtered like this; whether the columns exist is not checked."""
    if text.strip():
        _Parser(text, None, source).parse()


def check_recipe_filters(recipe: Recipe) -> None:
    """The filters of a recipe; they are a language of the data engine, which alone can read them."""
    data, validation = recipe.data, recipe.validation
    filters = [("data.where", data.where), *((f"data.sources[{n}].where", s.where) for n, s in enumerate(data.sources))]
    if validation is not None:
        filters.append(("validation.where", validation.where))
    for key, where in filters:
        if isinstance(where, str):
            check_filter(where, source=key)


def _match_values(name: str, value: Any, schema: Mapping[str, pl.DataType], source: str) -> Condition:
    column = _column(name, schema, f"{source}: cannot filter by '{name}'")
    values = list(value) if isinstance(value, list | tuple) else [value]
    for item in values:
        kind = "truth" if isinstance(item, bool) else "number" if isinstance(item, int | float) else "text"
        if kind != column.kind:
            raise DataError(f"{source}: cannot filter by {name}: {item!r}; the column holds {_PLURAL[column.kind]}")
    return Condition(f"{name} = {value!r}", _is_one_of(column, values))


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
    place: int


class _Parser:
    """Recursive descent, one method per level of precedence; every level checks the kinds of its parts."""

    def __init__(self, text: str, schema: Mapping[str, pl.DataType] | None, source: str) -> None:
        self._text = text
        self._schema = schema
        self._source = source
        self._depth = 0
        if len(text) > MAX_LENGTH:
            raise self._wrong(0, f"the filter has {len(text)} characters, at most {MAX_LENGTH} are read")
        self._tokens = self._scan()

    def parse(self) -> pl.Expr:
        found = self._either()
        if self._next.kind != "end":
            hint = _HINTS.get(self._next.text, "expected 'and', 'or' or the end")
            raise self._wrong(self._next.place, f"'{self._next.text}' is not expected here; {hint}")
        return self._need(found, "truth", 0).expression

    def _scan(self) -> list[_Token]:
        tokens: list[_Token] = []
        place = 0
        while self._text[place:].strip():
            match = _TOKEN.match(self._text, place)
            if match is None or match.lastgroup is None:
                place += len(self._text[place:]) - len(self._text[place:].lstrip())
                sign = self._text[place]
                hint = "the quote is not closed" if sign in "'\"`" else _HINTS.get(sign, "it has no meaning here")
                raise self._wrong(place, f"'{sign}' cannot be read; {hint}")
            kind, text = match.lastgroup, match[match.lastgroup]
            if kind == "name" and text.lower() in _WORDS:
                kind, text = "word", text.lower()
            tokens.append(_Token(kind, text, match.start(match.lastgroup)))
            place = match.end()
        return [*tokens, _Token("end", "the end", len(self._text))]

    @property
    def _next(self) -> _Token:
        return self._tokens[0]

    def _take(self, *texts: str) -> _Token | None:
        """The next token, if it is a word or a sign of `texts`."""
        if self._next.kind in ("word", "symbol") and self._next.text in texts:
            return self._tokens.pop(0)
        return None

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._wrong(self._next.place, f"expected '{text}', found '{self._next.text}'")

    def _either(self) -> _Typed:
        return self._join(self._both, "or", pl.any_horizontal)

    def _both(self) -> _Typed:
        return self._join(self._negation, "and", pl.all_horizontal)

    def _join(self, part: Callable[[], _Typed], word: str, join: Callable[[list[pl.Expr]], pl.Expr]) -> _Typed:
        place = self._next.place
        found = part()
        parts = [found]
        while token := self._take(word):
            parts.append(self._need(part(), "truth", token.place))
        if len(parts) == 1:
            return found
        self._need(found, "truth", place)
        return _Typed(join([item.expression for item in parts]), "truth", f"the part with '{word}'")

    def _negation(self) -> _Typed:
        if token := self._take("not"):
            inner = self._need(self._deeper(self._negation, token.place), "truth", token.place)
            return _Typed(~inner.expression, "truth", "the part with 'not'")
        return self._comparison()

    def _comparison(self) -> _Typed:
        place = self._next.place
        left = self._sum()
        if self._take("is"):
            negated = self._take("not") is not None
            self._expect("null")
            found = left.expression.is_not_null() if negated else left.expression.is_null()
            return _Typed(found, "truth", "the part with 'is null'")
        negated = self._take("not") is not None
        if negated or self._next.text == "in":
            self._expect("in")
            return self._membership(left, negated, place)
        checks: list[pl.Expr] = []
        while token := self._take(*_COMPARE):
            right = self._sum()
            self._comparable(left, right, token)
            checks.append(_COMPARE[token.text](left.expression, right.expression))
            left = right
        if not checks:
            return left
        return _Typed(pl.all_horizontal(checks) if len(checks) > 1 else checks[0], "truth", "the comparison")

    def _comparable(self, left: _Typed, right: _Typed, token: _Token) -> None:
        if "null" in (left.kind, right.kind):
            raise self._wrong(token.place, "nothing compares with null; write 'is null' or 'is not null'")
        if _UNKNOWN in (left.kind, right.kind):
            return
        if left.kind != right.kind or left.kind == "other":
            parts = f"{left.label} ({_PLURAL[left.kind]}) and {right.label} ({_PLURAL[right.kind]})"
            raise self._wrong(token.place, f"{parts} cannot be compared")

    def _membership(self, left: _Typed, negated: bool, place: int) -> _Typed:
        self._expect("[")
        values: list[Any] = []
        while not self._take("]"):
            if values:
                self._expect(",")
            values.append(self._literal(left))
        found = _is_one_of(left, values)
        return _Typed(~found if negated else found, "truth", "the part with 'in'")

    def _literal(self, left: _Typed) -> Any:
        token = self._tokens.pop(0)
        minus = token.kind == "symbol" and token.text == "-"
        if minus:
            token = self._tokens.pop(0)
        value, kind = _value(token)
        if kind is None or (minus and kind != "number"):
            raise self._wrong(token.place, f"expected a value in the list, found '{token.text}'")
        if kind != left.kind and left.kind != _UNKNOWN:
            raise self._wrong(token.place, f"{token.text} is {kind}, but {left.label} holds {_PLURAL[left.kind]}")
        return -value if minus else value

    def _sum(self) -> _Typed:
        return self._calculate(self._product, "+", "-")

    def _product(self) -> _Typed:
        return self._calculate(self._signed, "*", "/")

    def _calculate(self, part: Callable[[], _Typed], *signs: str) -> _Typed:
        place = self._next.place
        left = part()
        while token := self._take(*signs):
            self._need(left, "number", place)
            right = self._need(part(), "number", token.place)
            combined = _CALCULATE[token.text](left.expression, right.expression)
            left = _Typed(combined, "number", f"{left.label} {token.text} {right.label}")
        return left

    def _signed(self) -> _Typed:
        if token := self._take("-"):
            inner = self._need(self._deeper(self._signed, token.place), "number", token.place)
            # polars cannot negate 128 bits, but subtract them.
            return _Typed(pl.lit(0) - inner.expression, "number", f"-{inner.label}")
        return self._atom()

    def _atom(self) -> _Typed:
        if token := self._take("("):
            inner = self._deeper(self._either, token.place)
            self._expect(")")
            return inner
        token = self._tokens[0] if self._next.kind == "end" else self._tokens.pop(0)
        value, kind = _value(token)
        if kind is not None:
            return _Typed(pl.lit(value), kind, token.text)
        if token.kind in ("name", "quoted"):
            name = token.text.strip("`")
            return _column(name, self._schema, self._message(token.place, f"no column '{name}'"))
        raise self._wrong(token.place, f"expected a column or a value, found '{token.text}'")

    def _deeper(self, part: Callable[[], _Typed], place: int) -> _Typed:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._wrong(place, f"more than {_MAX_DEPTH} levels of brackets and signs")
        found = part()
        self._depth -= 1
        return found

    def _need(self, found: _Typed, kind: str, place: int) -> _Typed:
        if found.kind not in (kind, _UNKNOWN):
            wanted = "a number" if kind == "number" else "a comparison, e.g. height >= 480"
            raise self._wrong(place, f"{found.label} is {_PLURAL[found.kind]}; expected {wanted}")
        return found

    def _wrong(self, place: int, text: str) -> DataError:
        return DataError(self._message(place, text))

    def _message(self, place: int, text: str) -> str:
        shown = self._text if len(self._text) <= 200 else self._text[:200] + "..."
        return f'{self._source}: filter "{shown}", character {place + 1}: {text}'


def _value(token: _Token) -> tuple[Any, str | None]:
    """(value, its kind); the kind is None for a token that is no value."""
    if token.kind == "number":
        # polars knows no whole number of more than 38 digits.
        is_whole = token.text.isdecimal() and len(token.text) <= 38
        return (int(token.text) if is_whole else float(token.text)), "number"
    if token.kind == "text":
        return re.sub(r"\\(.)", r"\1", token.text[1:-1]), "text"
    if token.kind == "word" and token.text in ("true", "false"):
        return token.text == "true", "truth"
    if token.kind == "word" and token.text == "null":
        return None, "null"
    return None, None
