"""Entry point of the command line: the table of commands, global flags, and how errors are printed."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NoReturn

import typer

from frameloom.cli.lazy import Entry, build_group
from frameloom.core.errors import FrameloomError, PeerFailed
from frameloom.core.logging import CONTROL
from frameloom.core.version import VERSION

# File errors that a user can fix, and how; any other one is a bug and keeps its traceback.
_OTHER_PLACE, _RIGHT = "choose another place", "give yourself the right to use it, or choose another place"
_REMEDIES = {
    errno.ENOSPC: "make room there, and start the same command again",
    errno.EDQUOT: "make room there, and start the same command again",
    errno.EACCES: _RIGHT,
    errno.EPERM: _RIGHT,
    errno.EROFS: _OTHER_PLACE,
    errno.EISDIR: f"there is a folder of this name; {_OTHER_PLACE}",
    errno.ENOTDIR: f"a folder above it is a file; {_OTHER_PLACE}",
    errno.EEXIST: f"there is a file of this name; {_OTHER_PLACE}",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "allow more open files: ulimit -n 65536",
    errno.EIO: "the disk may be failing",
}
_SWITCHES, _WITH_VALUE = ("--debug",), ("--log-level",)

# A target is module:function, relative to this package; an example of each command is in its docstring.
_RECIPE = {
    "check": Entry("report all problems of a recipe", ".recipe:check", takes_overrides=True),
    "show": Entry("print a recipe with every default filled in and explained", ".recipe:show", takes_overrides=True),
    "list": Entry("list the recipes that come with the package", ".recipe:list_recipes"),
    "schema": Entry("print the JSON schema, for editors", ".recipe:schema"),
    "reference": Entry("print the reference of all keys (Markdown)", ".recipe:reference"),
    "arguments": Entry("print which key each argument of other trainers becomes (Markdown)", ".recipe:arguments"),
}

_DATA = {
    "scan": Entry("read the headers of a source's files and write a manifest", ".data:scan"),
    "check": Entry("find rows that should not be trained on, write a manifest without them", ".data:check"),
    "verify": Entry("compare files with the digests of their manifest", ".data:verify"),
    "report": Entry(
        "write a page about a manifest: sizes, lengths, buckets, thumbnails, broken files",
        ".data:report",
        takes_overrides=True,
    ),
    "shard": Entry("cut a manifest into shards whose captions stay on disk", ".data:shard"),
    "ledger": Entry("account for every row of a run's manifest: used, waiting, skipped and why", ".data:ledger"),
    "shapes": Entry("make the Moving Shapes set", ".demo:shapes"),
    "score": Entry("score a run on held-out prompts of Moving Shapes", ".demo:score", takes_overrides=True),
    "cache": Entry("encode latents and captions once, before training", ".data:cache", takes_overrides=True),
}

_VAE = {
    "reconstruct": Entry("encode and decode clips with an autoencoder, with metrics", ".vae:reconstruct"),
    "stats": Entry("measure the latents of a set, and the scale to use", ".vae:stats"),
}

COMMANDS = {
    "demo": Entry("make clips, train a tiny model on them, sample and report", ".demo:demo", takes_overrides=True),
    "train": Entry("train or resume a run", ".train:train", takes_overrides=True),
    "launch": Entry(
        "start a run on several processes: this machine, a hostfile, Slurm", ".train:launch", takes_overrides=True
    ),
    "sample": Entry("make videos from prompts", ".sample:sample", takes_overrides=True),
    "refine": Entry("make short prompts long", ".sample:refine"),
    "data": Entry("make, encode and inspect data", commands=_DATA, example="frameloom data shapes data/shapes"),
    "recipe": Entry("check, show and list recipes", commands=_RECIPE, example="frameloom recipe check my.yaml"),
    "import": Entry(
        "turn a training command or configuration of another system into a recipe", ".recipe:import_command"
    ),
    "objective": Entry(
        "show which noise levels a recipe trains on, and their weights", ".recipe:objective", takes_overrides=True
    ),
    "plan": Entry("estimate memory and time of a recipe before a run", ".plan:plan", takes_overrides=True),
    "vae": Entry(
        "reconstruct clips with an autoencoder, measure its latents",
        commands=_VAE,
        example="frameloom vae reconstruct clips/ out/ --vae runs/my-vae",
    ),
    "eval": Entry("measure generated clips, alone or against references", ".evaluate:evaluate_clips"),
    "compare": Entry(
        "write a page with the samples of two or more runs side by side, and their metrics", ".evaluate:compare"
    ),
    "convert": Entry("convert weights between files, folders and published layouts", ".export:convert"),
    "export": Entry("export the model of a run: diffusers, one file, LoRA, original layout", ".export:export"),
    "replay": Entry("repeat the run behind an export", ".train:replay", takes_overrides=True),
    "studio": Entry("open a page on this machine: data, runs, recipes, generation", ".studio:studio"),
}

ROOT = Entry(
    "One training system for open image and video diffusion models.", commands=COMMANDS, example="frameloom demo"
)


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"frameloom {VERSION}")
        raise typer.Exit


def _set_up(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="messages from this level on")] = LogLevel.info,
) -> None:
    """Flags of every command, accepted anywhere on the line."""
    from frameloom.core.device import avoid_amx_in_virtual_machines
    from frameloom.core.logging import set_up_logging

    set_up_logging(log_level.value)
    avoid_amx_in_virtual_machines()


def hoist_flags(arguments: Sequence[str]) -> list[str]:
    """Move the flags of all commands to the front, where the parser wants them; nothing behind `--` moves."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    front: list[str] = []
    rest: list[str] = []
    words = list(arguments[:end])
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if word in _SWITCHES or (name in _WITH_VALUE and equals):
            front.append(word)
        elif name in _WITH_VALUE and words:
            front += [word, words.pop(0)]
        else:
            rest.append(word)
    return [*front, *rest, *arguments[end:]]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 on success, 2 for an error that the user can fix, 130 when interrupted."""
    words = hoist_flags(sys.argv[1:] if arguments is None else arguments)
    try:
        build_group("frameloom", ROOT, _set_up).main(words, prog_name="frameloom")
    except FrameloomError as error:
        if "--debug" in words:
            traceback.print_exc()
        if not isinstance(error, PeerFailed):
            _print_error(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        if "--debug" in words:
            traceback.print_exc()
        place = "" if error.filename is None else f"{error.filename}: "
        _print_error(f"{place}{error.strerror}; {_REMEDIES[error.errno]}")
        sys.exit(FrameloomError.exit_code)
    sys.exit(0)


def _print_error(message: str) -> None:
    print(CONTROL.sub("?", message), file=sys.stderr)
