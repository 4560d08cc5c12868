"""Groups of commands that are imported only when they run, and commands that take overrides of a recipe.

A group knows its commands from a table of names, targets and help lines, so `--help` imports none of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from frameloom.core.spelling import nearest


@dataclass(frozen=True)
class Entry:
    """One command with a `target` (module:function, .module in `frameloom.cli`), or a group of `commands`."""

    help: str
    target: str = ""
    takes_overrides: bool = False
    commands: Mapping[str, Entry] = field(default_factory=dict)
    example: str = ""


class RecipeCommand(TyperCommand):
    """Flags that the command does not declare are overrides of the recipe; the function finds them in `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags: dict[str, int] = {}
        for parameter in self.get_params(ctx):
            is_switch = getattr(parameter, "is_flag", False) or getattr(parameter, "count", False)
            names = (*parameter.opts, *parameter.secondary_opts)
            flags |= {name: 0 if is_switch else int(parameter.nargs) for name in names if name.startswith("-")}
        own, overrides = split_overrides(args, flags)
        for word in overrides:
            _refuse_misspelt_flag(word, flags, ctx)
        rest = super().parse_args(ctx, own)
        ctx.args = overrides
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Flags of a `rich_help_panel` follow the others under its name."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                other = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or other, []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[--KEY VALUE]..."]


def split_overrides(args: Sequence[str], flags: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """The command's own words and the overrides among them; `flags` is each own flag with its number of values."""
    own: list[str] = []
    overrides: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if word == "--":
            return [*own, word, *rest], overrides
        if name in flags:
            num_values = 0 if equals else flags[name]
            own += [word, *rest[:num_values]]
            del rest[:num_values]
        elif word.startswith("--"):
            overrides.append(word)
            if not equals and rest and not rest[0].startswith("--") and rest[0] not in flags:
                overrides.append(rest.pop(0))
        else:
            own.append(word)
    return own, overrides


def _refuse_misspelt_flag(word: str, flags: Iterable[str], ctx: Any) -> None:
    """`--promt` is a slip of the command's own flag rather than a key of the recipe, which seldom has no dot."""
    name = word.partition("=")[0]
    near = nearest(name, flags) if name.startswith("--") and "." not in name else None
    if near is None:
        return
    from frameloom.config.schema.recipe import Recipe

    if name.removeprefix("--") not in Recipe.model_fields:
        ctx.fail(f"no such flag: {name}; did you mean {near}?")


# Earlier names of commands, which still work.
_RENAMED = {"import-command": "import"}


class LazyGroup(TyperGroup):
    """A group whose commands come from `entries`; set by `build_group`."""

    entries: Mapping[str, Entry] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self.entries.get(cmd_name)
        return build_command(cmd_name, entry) if entry else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        args = [_RENAMED.get(args[0], args[0]), *args[1:]]
        if args[0] not in self.entries:
            near = nearest(args[0], self.entries)
            hint = f"did you mean '{near}'?" if near else f"known commands: {', '.join(self.entries)}"
            ctx.fail(f"{ctx.command_path} has no command '{args[0]}'; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.entries.items()])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


def build_group(name: str, entry: Entry, callback: Callable[..., None]) -> LazyGroup:
    """A group of commands; `callback` holds its own flags and runs before any command of it."""
    app = typer.Typer(cls=LazyGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True)
    # The backspace keeps the help formatter from joining the lines.
    app.callback(help=entry.help, epilog=f"\b\nExample:\n  {entry.example}")(callback)
    group = get_command(app)
    assert isinstance(group, LazyGroup)
    group.name = name
    group.entries = entry.commands
    return group


def build_command(name: str, entry: Entry) -> Any:
    """Import the command's module and make it a command; its help is the function's docstring."""
    if entry.commands:
        return build_group(name, entry, lambda: None)
    module_name, _, function_name = entry.target.partition(":")
    function = getattr(importlib.import_module(module_name, "frameloom.cli"), function_name)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    kind = RecipeCommand if entry.takes_overrides else TyperCommand
    app.command(name, cls=kind, help=function.__doc__)(function)
    return get_command(app)
