r"""Parse shell scripts into commands, each with its program, launcher and arguments; nothing is executed.

What can be read without running it is read: quotes, `\` at the end of a line, `#`, `;`, `&&`, `|`, redirections,
`export A=b`, `A=b command`, `$A`, `${A}`, `${A:-b}`, `${A:=b}`, `${A:?b}`, `${A:+b}`, and beginnings and ends cut off
as in `${A%/}` and `${A##*/}`. Other expansions stay as they are written, for `find_unset` to find. Words inside `if`,
`for` and functions are read as if these were not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from frameloom.config.loading.yaml_values import MAX_BYTES, shorten
from frameloom.core.errors import ConfigError

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_NAME = r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!]"
# An opening that is never closed, or holds more than three levels, is an expansion of its own: one that is not read.
_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\{"
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\("
_EXPANSION = re.compile(rf"\$(?:{_NAME}|{_BRACES}|{_PARENTHESES}|'[^']*')|`[^`]*`")
_VARIABLE = re.compile(rf"\$(?:({_NAME})|\{{({_NAME})(?:(:?[-=?+]|%%?|##?)(.*))?\}})", re.DOTALL)
# A fallback; quotes around blanks would keep these together, which is not read.
_FALLBACK = re.compile(r"\"([^\"\\ \t\n]*)\"|([^\"'\\]*)")
_HOME = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*=)?~(?=/|$)")
_BLANK = re.compile(r"[ \t\n]+")
_REDIRECTION = re.compile(r"[0-9]*[<>]{1,2}(&[0-9-])?|&>")
_LEFT_OUT = re.compile(r"(\\\n[ \t]*\.\.\.)[ \t]*\n")
_ENDS, _SPACE = ";|&\n", " \t"
_SETTERS = ("export", "declare", "local", "readonly")
_KEYWORDS = (*_SETTERS, "then", "do", "else", "if", "while", "set", "nohup", "exec", "time", "env")


@dataclass(frozen=True)
class Command:
    """The words of one command, the line it starts on, and the variables that were set when it came."""

    words: tuple[str, ...]
    line: int
    variables: dict[str, str] = field(default_factory=dict)


def parse_script(text: str, *, where: str) -> list[Command]:
    """Every command of a script in order; assignments alone are no commands."""
    # Documents print `...` for arguments that are left out, on a line of its own that should go on.
    reader = _Reader(_LEFT_OUT.sub("\\1 \\\\\n", text.replace("\r\n", "\n")), where)
    commands: list[Command] = []
    while (parsed := reader.read_command()) is not None:
        words, line = parsed
        own = _take_assignments(words, reader.variables)
        if words:
            commands.append(Command(tuple(words), line, {**reader.variables, **own}))
        else:
            reader.variables.update(own)
    return commands


def _take_assignments(words: list[str], variables: dict[str, str]) -> dict[str, str]:
    """Remove `A=b` and keywords from the front; what is exported stays for later commands."""
    own: dict[str, str] = {}
    while words and (words[0] in _KEYWORDS or _ASSIGNMENT.match(words[0])):
        word = words.pop(0)
        if word in _SETTERS:
            variables.update(dict(item.split("=", 1) for item in words if _ASSIGNMENT.match(item)))
            words.clear()
        elif word == "set":
            words.clear()
        elif word not in _KEYWORDS:
            name, value = word.split("=", 1)
            own[name] = value
    return own


class _Reader:
    """Reads characters; `variables` are those that the script has set so far."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.position = text, where, 0
        self.variables: dict[str, str] = {}

    def read_command(self) -> tuple[list[str], int] | None:
        """The words up to the end of a command, without redirections; None at the end of the script."""
        words: list[str] = []
        line = 0
        while self.position < len(self.text):
            character = self.text[self.position]
            if self.text.startswith("\\\n", self.position):
                self.position += 2
            elif character in _SPACE:
                self.position += 1
            elif character == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            elif redirection := _REDIRECTION.match(self.text, self.position):
                self.position = redirection.end()
                if redirection.group(1) is None:  # a file follows
                    while self.text[self.position : self.position + 1] in (" ", "\t"):
                        self.position += 1
                    self._read_words([])
            elif character in _ENDS:
                self.position += 1
                if words:
                    return words, line
            else:
                line = line or self._line()
                # Assignments take effect from left to right, so a later word of the same line may use them.
                words += self._read_words(words)
        return (words, line) if words else None

    def _read_words(self, before: list[str]) -> list[str]:
        """The next word as it is written; a variable outside quotes can make several of it, or none."""
        done: list[str] = []
        word: str | None = None
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in _ENDS + _SPACE + "<>" or self.text.startswith("\\\n", self.position):
                break
            pieces = self._read_pieces(character, word, before)
            if pieces[0] or character in "'\"":
                word = (word or "") + pieces[0]
            for piece in pieces[1:]:
                done += [] if word is None else [word]
                word = piece or None
        return done if word is None else [*done, word]

    def _read_pieces(self, character: str, word: str | None, before: list[str]) -> list[str]:
        """What stands here, cut at the blanks that a value outside quotes brings; an assignment is never cut."""
        if character == "'":
            return [self._read_quoted("'")]
        if character == '"':
            return [self._substitute(self._read_quoted('"'), before)]
        if character == "\\":
            self.position += 2
            return [self.text[self.position - 1 : self.position]]
        text = self._read_plain()
        value = self._substitute(_HOME.sub(r"\1$HOME", text) if word is None else text, before)
        is_assigned = _ASSIGNMENT.match(word or "") and all(
            item in _KEYWORDS or _ASSIGNMENT.match(item) for item in before
        )
        return [value] if is_assigned or find_unset([value]) else _BLANK.split(value)

    def _read_quoted(self, quote: str) -> str:
        start = self.position
        end = start + 1
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if quote == '"' and self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise ConfigError(f"{self.where}:{self._line()}: a quote is opened here and never closed; close it")
        self.position = end + 1
        inside = self.text[start + 1 : end]
        return inside if quote == "'" else inside.replace("\\\n", "").replace('\\"', '"').replace("\\\\", "\\")

    def _read_plain(self) -> str:
        start = self.position
        if found := _EXPANSION.match(self.text, start):
            self.position = found.end()
            return found.group()
        self.position += 1
        while self.position < len(self.text) and self.text[self.position] not in _ENDS + _SPACE + "<>'\"\\$`":
            self.position += 1
        return self.text[start : self.position]

    def _substitute(self, text: str, before: list[str]) -> str:
        """Variables of the script by their values; what it does not set or cannot read stays as it is written."""

        def replace(match: re.Match[str]) -> str:
            value = self._expand(match.group(), before)
            return match.group() if value is None else value

        result = _EXPANSION.sub(replace, text)
        if len(result) > MAX_BYTES:
            raise ConfigError(f"{self.where}:{self._line()}: a value of {len(result)} characters; expected far fewer")
        return result

    def _expand(self, text: str, before: list[str]) -> str | None:
        found = _VARIABLE.fullmatch(text)
        if found is None:
            return None
        name, operator, operand = found[1] or found[2], found[3], found[4]
        known = {**self.variables, **dict(word.split("=", 1) for word in before if _ASSIGNMENT.match(word))}
        value = known.get(name)
        # Of a value that is not known to its end, nothing can be cut or said; what is missing shows in it.
        if operator is None or (value is not None and find_unset([value])):
            return value
        if operator[0] in "%#":
            return None if value is None else _trim(value, operator, operand)
        # With a colon, an empty value counts as none.
        is_set = bool(value) if operator[0] == ":" else value is not None
        if operator[-1] == "+":
            return self._read_operand(operand, before) if is_set else ""
        if is_set or operator[-1] == "?":
            return value if is_set else None
        fallback = self._read_operand(operand, before)
        if operator[-1] == "=" and fallback is not None:
            self.variables[name] = fallback
        return fallback

    def _read_operand(self, operand: str, before: list[str]) -> str | None:
        found = _FALLBACK.fullmatch(operand)
        return None if found is None else self._substitute(found[1] if found[2] is None else found[2], before)

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1


def _trim(value: str, operator: str, pattern: str) -> str | None:
    """`${A%/}`, `${A#x}`, and with one `*` at the far end `${A%.*}`, `${A##*/}`; None for any other pattern."""
    is_end = operator[0] == "%"
    part = pattern.removesuffix("*") if is_end else pattern.removeprefix("*")
    if not part or any(sign in "*?[]\\'\"$`~" for sign in part):
        return None
    if part == pattern:
        return value.removesuffix(part) if is_end else value.removeprefix(part)
    takes_first = (len(operator) == 2) == is_end
    left, found, right = value.partition(part) if takes_first else value.rpartition(part)
    return value if not found else left if is_end else right


def find_unset(words: Iterable[str]) -> str | None:
    """The first expansion among `words` that only a shell could fill in."""
    for word in words:
        if found := _EXPANSION.search(word):
            return found.group()
    return None


def explain_unset(expansion: str) -> str:
    """What a person can do about one that `find_unset` found."""
    found = _VARIABLE.fullmatch(expansion)
    operator = found[3] if found else None
    is_trim = operator is not None and operator[0] in "%#"
    if found and operator not in ("+", ":+") and not (is_trim and _trim("", found[3], found[4]) is None):
        return f"{expansion} is not set in this file; write its value, or set it above"
    return f"{shorten(expansion)}: this expansion is not read; write its value"


# The words that name a launcher.
_LAUNCHERS = {
    ("accelerate", "launch"): "accelerate",
    ("colossalai", "run"): "colossalai",
    ("accelerate-launch",): "accelerate",
    ("-m", "accelerate.commands.launch"): "accelerate",
    ("torchrun",): "torchrun",
    ("-m", "torch.distributed.run"): "torchrun",
    ("-m", "torch.distributed.launch"): "torchrun",
    ("deepspeed",): "deepspeed",
    ("msrun",): "msrun",
    ("python",): "python",
    ("python3",): "python",
    ("mpirun",): "mpirun",
}
# These may start another launcher, which then counts.
_OUTER = ("python", "mpirun")
PLACEHOLDER = "..."


@dataclass(frozen=True)
class Launch:
    """A command taken apart. Names have no dashes in front, and `_` where a person may write `-`."""

    script: str
    launcher: str
    line: int
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    has_placeholder: bool = False
    variables: dict[str, str] = field(default_factory=dict)


def find_launches(commands: Sequence[Command]) -> list[Launch]:
    """The commands that start a Python program, and those that are nothing but arguments of one."""
    launches = []
    for command in commands:
        words = command.words
        index = _find_script(words)
        if index is None:
            # Documents often print the arguments alone.
            if words[0].startswith("--"):
                launches.append(_launch("", "", words, command, ()))
            continue
        script = words[index]
        launcher, front = _find_launcher(words[:index])
        if words[index - 1 : index] == ("-m",):
            front, script = front[:-1], script.replace(".", "/") + ".py"
        launches.append(_launch(script, launcher, words[index + 1 :], command, front))
    return launches


def _find_launcher(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """(the launcher, its options) among the words before a script; others such as `srun -N 2` may stand before it."""
    found = []
    for start, word in enumerate(words):
        for names, name in _LAUNCHERS.items():
            if (PurePosixPath(word).name, *words[start + 1 : start + len(names)]) == names:
                found.append((name in _OUTER, start, name, words[start + len(names) :]))
    return min(found)[2:] if found else ("", ())


def _find_script(words: Sequence[str]) -> int | None:
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] == "-m" and ("-m", word) not in _LAUNCHERS
        if word.endswith(".py") or is_module:
            return index
    return None


def _launch(script: str, launcher: str, words: Sequence[str], command: Command, front: Sequence[str]) -> Launch:
    positional, arguments = split_arguments(words)
    _, options = split_arguments(front)
    given = {name: values for name, values in arguments.items() if name != PLACEHOLDER}
    return Launch(
        script,
        launcher,
        command.line,
        options,
        tuple(word for word in positional if word != PLACEHOLDER),
        {name: tuple(word for word in values if word != PLACEHOLDER) for name, values in given.items()},
        PLACEHOLDER in words,
        command.variables,
    )


def split_arguments(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """(words before the first flag, each flag with its values); of a flag that comes twice, the last counts."""
    positional: list[str] = []
    arguments: dict[str, tuple[str, ...]] = {}
    name: str | None = None
    for word in words:
        if is_flag(word):
            flag, equals, value = word.partition("=")
            name = flag.lstrip("-").replace("-", "_")
            arguments[name] = (value,) if equals else ()
        elif name is None:
            positional.append(word)
        else:
            arguments[name] = (*arguments[name], word)
    return tuple(positional), arguments


def is_flag(word: str) -> bool:
    """A dash and a letter, or two dashes; `-1` and `-1e-5` are numbers."""
    return (word.startswith("--") and len(word) > 2) or (len(word) > 1 and word[0] == "-" and word[1].isalpha())
