"""An import on its way: the table of its system applied, and translations that several systems share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from frameloom.config.loading.yaml_values import format_value
from frameloom.interop.importers.arguments import Argument
from frameloom.interop.importers.imported_recipe import ImportedRecipe
from frameloom.interop.importers.parsed_arguments import ParsedArguments

PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "no": "fp32", "float32": "fp32", "bfloat16": "bf16"}
# Tables of values that rows of several systems name.
_VALUES: dict[str, Mapping[Any, Any]] = {
    "precisions": PRECISIONS,
    "ema": {"true": {"decay": 0.9999}, "false": None},
    "trackers": {"tensorboard": ["jsonl", "tensorboard"], "wandb": ["jsonl", "wandb"]},
    "optimizers": {"adamw": "adamw", "adamw_re": "adamw", "adam": "adamw", "adamw_exp": "adamw", "came": "came"},
}
_LAUNCH_FLAGS = {
    "--nproc": ("nproc_per_node", "local_worker_num", "worker_num", "num_processes"),
    "--hostfile": ("hostfile",),
    "--port": ("master_port", "main_process_port"),
}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([GM])B?", re.IGNORECASE)


@dataclass
class ImportJob:
    """`folders` are where files that the command names are looked for; they are only read, and need not be there."""

    given: ParsedArguments
    launcher: ParsedArguments
    folders: tuple[Path, ...]
    recipe: ImportedRecipe = field(default_factory=lambda: ImportedRecipe({}))

    def apply_table(self, sections: Container[str] | None = None) -> None:
        """Translate the arguments whose row says how; those of a configuration only where it has their `sections`."""
        for name, argument in self.given.arguments.items():
            if sections is None or name.partition(".")[0] in sections:
                self._apply(name, argument)

    def _apply(self, name: str, argument: Argument) -> None:
        if argument.is_implied:
            self.given.has(name)
        if argument.otherwise and not self._holds(argument.when):
            self.ignore(name, argument.otherwise)
            return
        if argument.unsupported and not (argument.if_set and not self.given.get(name)):
            self.unsupported(name, argument.unsupported)
        if (argument.if_given and not self.given.has(name)) or (argument.if_set and not self.given.get(name)):
            return
        values = _VALUES[argument.values] if isinstance(argument.values, str) else argument.values
        if values and not argument.copy:
            self._is_known(name, self.given.get(name), values)
        for key in argument.copy:
            self.copy(key, name, values)

    def _is_known(self, name: str, value: Any, values: Mapping[Any, Any] | None) -> bool:
        """A word that is not known is a problem."""
        is_known = values is None or value in values
        if values is not None and not is_known:
            self.given.problems.append(f"{self.given.quote(name)}: unknown; known: {', '.join(values)}")
        return is_known

    def _holds(self, condition: str) -> bool:
        """`name`, `not name` or `name=value`."""
        name, equals, wanted = condition.removeprefix("not ").partition("=")
        value = self.given.get(name)
        holds = str(value) == wanted if equals else bool(value)
        return holds != condition.startswith("not ")

    def copy(self, dotted: str, name: str, values: Mapping[Any, Any] | None = None) -> Any:
        """Set a key to the value of an argument, or to its default; None leaves the key alone."""
        argument = self.given.arguments[name]
        value = self.given.get(name)
        if argument.kind == "switch":
            value = bool(value)
            if values is not None:  # there may be one for one of its states only
                key = str(value).lower()
                if key in values:
                    self.recipe.set(dotted, values[key], self.default_note(name))
                return value
        if value is None:
            return None
        if not self._is_known(name, value, values):
            return None
        if argument.convert == "keep":
            value = max(2, value)  # the newest checkpoint may be damaged
        elif argument.convert == "memory":
            match = _MEMORY.fullmatch(value)
            if match is None:
                self.given.problems.append(f"{self.given.quote(name)}: expected an amount such as 59GB")
                return None
            value = f"{match[1]}{match[2].upper()}iB"
        self.recipe.set(dotted, value if values is None else values[value], self.default_note(name))
        return value

    def choose(self, name: str, values: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
        """Two values that one word stands for; a word that is not known is a problem, and the first one's are taken."""
        word = self.given.get(name)
        if word not in values:
            self.given.problems.append(f"{self.given.quote(name)}: unknown; known: {', '.join(values)}")
        return values.get(word, next(iter(values.values())))

    def default_note(self, name: str) -> str:
        argument = self.given.arguments[self.given.find(name)]
        if argument.name in self.given.values or argument.program is None:
            return ""
        shown, own = format_value(argument.default), format_value(argument.program)
        return f"{self.given.dashes}{argument.name} is not given: {shown} as documented; the program itself takes {own}"

    def unsupported(self, name: str, why: str) -> None:
        """Say that an argument found no key; nothing is said of one that was not given."""
        if self.given.has(name):
            self.recipe.unsupported.append(f"{self.given.quote(name)}: {why}")

    def ignore(self, name: str, why: str) -> None:
        """Say that an argument has no effect in the original; nothing is said of one that was not given."""
        if self.given.has(name):
            self.recipe.unused.append(f"{self.given.quote(name)}: {why}")

    @property
    def is_torch(self) -> bool:
        """Whether a launcher of PyTorch starts it: the original rather than a port of it."""
        return self.launcher.name in ("accelerate", "torchrun", "deepspeed")

    def find_file(self, name: str) -> Path | None:
        return next((folder / name for folder in self.folders if (folder / name).is_file()), None)


def name_run(system: str, stem: str) -> str:
    """A run's name from that of a configuration."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", stem).strip("-.") or "imported"
    return plain if plain.startswith(system) else f"{system}-{plain}"[:80]


def set_output(recipe: ImportedRecipe, folder: str | None) -> None:
    """The run is written to run.folder/name: the last part of the original's folder becomes the name."""
    path = PurePosixPath(folder or ".")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._")[:80]
    if not name:
        return
    recipe.set("name", name)
    recipe.set("run.folder", str(path.parent) if str(path.parent) != "." else "runs")
    if str(path.parent) == ".":
        recipe.note("run.folder", f"the original writes to {folder}; runs lie together in one folder here")


def set_resume(job: ImportJob) -> None:
    """`latest` and True go on, False does not; another folder's checkpoint is none of ours."""
    name = "resume_from_checkpoint"
    value = job.given.get(name)
    if not job.given.has(name) or value is None:
        return
    word = value.lower()
    if word in ("latest", "true"):
        job.recipe.set("run.resume", "latest")
    elif word in ("false", ""):
        job.recipe.set("run.resume", "never")
    else:
        text = "a run goes on from its own folder; to start from those weights, name them as weights"
        job.recipe.set("run.resume", "latest", f"{job.given.quote(name)}: {text}")


def set_length(job: ImportJob, steps: int | None, epochs: int | None) -> None:
    """Steps, or epochs where the original counts those."""
    job.recipe.drop("train.steps")
    if steps is not None:
        job.recipe.set("train.steps", steps)
    elif epochs is not None:
        job.recipe.set("train.epochs", epochs)


def set_stride(job: ImportJob, name: str) -> None:
    """Every how many frames of a file one is taken; a recipe thins clips by their rate."""
    stride = job.given.get(name)
    if stride < 1:
        job.given.problems.append(f"{job.given.quote(name)}: expected 1 or more")
    elif stride == 1:
        job.recipe.set("data.fps_max", 1000)
    else:
        slowest = 30 * (stride - 1) // stride + 1
        text = f"--{name} {stride}: clips are thinned by their rate here; this is for files of {slowest} to 30 frames"
        # Rounded up: a rate that is a hair too low would take one frame fewer.
        job.recipe.set("data.fps_max", math.ceil(300_000 / stride) / 10_000, f"{text} a second")


def set_zero(job: ImportJob, stage: int, shown: str) -> None:
    """ZeRO; an optimizer that looks at whole weights cannot have more than its state split."""
    name = job.recipe.get("optim.name") or "adamw"
    allowed = stage if name in ("adamw", "lion") else min(stage, 0 if name == "prodigy" else 1)
    note = f"{shown}: {name} looks at whole weights, so only its state is split" if allowed != stage else ""
    if stage or allowed:
        job.recipe.set("parallel.zero", allowed, note)


def format_start(launcher: ParsedArguments) -> str | None:
    """The command that starts as many processes as the original's launcher; None where it says nothing of them."""
    flags = []
    for flag, names in _LAUNCH_FLAGS.items():
        given = [name for name in names if name in launcher.arguments and launcher.has(name)]
        value = launcher.get(given[0]) if given else None
        if value is not None:
            if flag == "--nproc" and given[0] == "num_processes" and launcher.has("num_machines"):
                value = max(1, value // max(1, launcher.get("num_machines") or 1))
            flags.append(f"{flag} {value}")
    return f"Started as the original is: frameloom launch RECIPE {' '.join(flags)}" if flags else None


def set_deepspeed(job: ImportJob) -> None:
    """The stage of accelerate's DeepSpeed options: its file where it can be read, else the number in its name."""
    launcher = job.launcher
    if "deepspeed_config_file" not in launcher.arguments:
        return
    name, stage = launcher.get("deepspeed_config_file"), launcher.get("zero_stage")
    own = launcher.get("config_file") or ""
    if not launcher.get("use_deepspeed") and name is None and "deepspeed" not in own:
        return
    if name is None and stage is None and "deepspeed" in own:
        name = own
    if stage is None and name is not None:
        stage = _read_stage(job, name)
    set_zero(job, 2 if stage is None else stage, f"DeepSpeed {name or ''}".rstrip())


def _read_stage(job: ImportJob, name: str) -> int | None:
    file = job.find_file(name) if name.endswith(".json") else None
    if file is not None:
        try:
            stage = json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]["stage"]
        except (OSError, ValueError, KeyError, TypeError):
            stage = None
        if stage in (0, 1, 2, 3):
            return int(stage)
        job.given.problems.append(f"{file}: no zero_optimization.stage from 0 to 3; expected DeepSpeed's JSON")
    found = re.search(r"(?:zero|stage)[_-]?(?:stage)?[_-]?([0-3])", name)
    return int(found[1]) if found else None
