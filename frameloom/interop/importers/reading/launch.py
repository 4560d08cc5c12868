"""Which program a command starts, through which launcher, and with which arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from frameloom.interop.importers.reading.shell import Command

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

    @property
    def name(self) -> str:
        return PurePosixPath(self.script).name


def find_launches(commands: Sequence[Command]) -> list[Launch]:
    """The commands that start a Python program, and those that are nothing but arguments of one."""
    found = [_take_apart(command) for command in commands]
    return [launch for launch in found if launch is not None]


def _take_apart(command: Command) -> Launch | None:
    words = command.words
    place = _find_script(words)
    if place is None:
        # Documents often print the arguments alone.
        return _launch("", "", words, command, ()) if words[0].startswith("--") else None
    script = words[place]
    launcher, front = _find_launcher(words[:place])
    if words[place - 1 : place] == ("-m",):
        front, script = front[:-1], script.replace(".", "/") + ".py"
    return _launch(script, launcher, words[place + 1 :], command, front)


def _find_launcher(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """(the launcher, its options) among the words before a script; others such as `srun -N 2` may stand before it."""
    found = []
    for start, word in enumerate(words):
        for names, name in _LAUNCHERS.items():
            if (PurePosixPath(word).name, *words[start + 1 : start + len(names)]) == names:
                found.append((name in _OUTER, start, name, words[start + len(names) :]))
    return min(found)[2:] if found else ("", ())


def _find_script(words: Sequence[str]) -> int | None:
    for place, word in enumerate(words):
        is_module = place > 0 and words[place - 1] == "-m" and ("-m", word) not in _LAUNCHERS
        if word.endswith(".py") or is_module:
            return place
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
