"""Shell scripts as lists of commands: words, variables, comments and continued lines. Nothing is ever run.

What can be read without running it is read: quotes, `\\` at the end of a line, `#`, `;`, `&&`, `|`, redirections,
`export A=b`, `A=b command`, `$A`, `${A}` and `${A:-b}`. Words inside `if`, `for` and functions are read as if these
were not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from frameloom.core.errors import ConfigError

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!])|\{([A-Za-z_][A-Za-z0-9_]*)(?::?-([^}]*))?\})")
_OUTPUT = re.compile(r"\$\([^)]*\)|`[^`]*`")
_REDIRECTION = re.compile(r"[0-9]*[<>]{1,2}(&[0-9-])?|&>")
_LEFT_OUT = re.compile(r"(\\\n[ \t]*\.\.\.)[ \t]*\n")
_ENDS, _SPACE = ";|&\n", " \t"
_SETTERS = ("export", "declare", "local", "readonly")
_KEYWORDS = (*_SETTERS, "then", "do", "else", "if", "while", "set", "nohup", "exec", "time")


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
                self.position = self._end_of_line()
            elif redirection := _REDIRECTION.match(self.text, self.position):
                self._skip_redirection(redirection.end(), redirection.group(1) is not None)
            elif character in _ENDS:
                self.position += 1
                if words:
                    return words, line
            else:
                line = line or self._line()
                # Assignments take effect from left to right, so a later word of the same line may use them.
                words.append(self._read_word(words))
        return (words, line) if words else None

    def _skip_redirection(self, end: int, is_whole: bool) -> None:
        self.position = end
        if not is_whole:
            while self.text[self.position : self.position + 1] in (" ", "\t"):
                self.position += 1
            self._read_word([])

    def _read_word(self, before: list[str]) -> str:
        parts: list[str] = []
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in _ENDS + _SPACE + "<>":
                break
            if character == "'":
                parts.append(self._read_quoted("'"))
            elif character == '"':
                parts.append(self._substitute(self._read_quoted('"'), before))
            elif character == "\\":
                if self.text.startswith("\\\n", self.position):
                    break
                parts.append(self.text[self.position + 1 : self.position + 2])
                self.position += 2
            else:
                parts.append(self._substitute(self._read_plain(), before))
        return "".join(parts)

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
        if found := _VARIABLE.match(self.text, start) or _OUTPUT.match(self.text, start):
            self.position = found.end()
            return found.group()
        self.position += 1
        while self.position < len(self.text) and self.text[self.position] not in _ENDS + _SPACE + "<>'\"\\$`":
            self.position += 1
        return self.text[start : self.position]

    def _substitute(self, text: str, before: list[str]) -> str:
        """Variables of the script by their values; what it does not set stays as it is written."""
        known = {**self.variables, **dict(word.split("=", 1) for word in before if _ASSIGNMENT.match(word))}

        def replace(match: re.Match[str]) -> str:
            name, fallback = match.group(1) or match.group(2), match.group(3)
            return known.get(name, match.group() if fallback is None else fallback)

        return _VARIABLE.sub(replace, text)

    def _end_of_line(self) -> int:
        end = self.text.find("\n", self.position)
        return len(self.text) if end < 0 else end

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1


def find_unset(words: Iterable[str]) -> str | None:
    """The first variable, or output of another program, among `words` that only a shell could fill in."""
    for word in words:
        if found := _VARIABLE.search(word) or _OUTPUT.search(word):
            return found.group()
    return None
