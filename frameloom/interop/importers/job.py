"""State of an import: the given values, the recipe drafted from them, and translations that several systems share."""

from __future__ import annotations

import copy
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from frameloom.config.loading.schema_tree import kind_at
from frameloom.config.loading.yaml_values import KeyPath, format_key, format_value
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.section import Section
from frameloom.interop.importers.given import Given

PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "no": "fp32", "float32": "fp32", "bfloat16": "bf16"}
_LAUNCH_FLAGS = {
    "--nproc": ("nproc_per_node", "local_worker_num", "worker_num", "num_processes"),
    "--hostfile": ("hostfile",),
    "--port": ("master_port", "main_process_port"),
}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([GM])B?", re.IGNORECASE)


@dataclass
class Job:
    """`folders` are where files that the command names are looked for; they are only read, and need not be there."""

    given: Given
    launcher: Given
    draft: Draft
    folders: tuple[Path, ...]

    def copy(self, dotted: str, *names: str, values: Mapping[str, Any] | None = None) -> Any:
        """Set a key to the value of the first name that is given, or to its default; None leaves the key alone."""
        value = self.given.first(*names)
        if values is not None and value is not None:
            if value not in values:
                known = ", ".join(values)
                self.given.problems.append(f"{self.told(self._chosen(names))}: unknown; known: {known}")
                return None
            value = values[value]
        if value is not None:
            self.draft.set(dotted, value, self.default_note(*names))
        return value

    def copy_pair(self, name: str, values: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
        """Two values that one word stands for; a word that is not known is a problem, and the first one's are taken."""
        word = self.given.get(name)
        if word not in values:
            self.given.problems.append(f"{self.told(name)}: unknown; known: {', '.join(values)}")
        return values.get(word, next(iter(values.values())))

    def _chosen(self, names: Sequence[str]) -> str:
        return next((name for name in names if name in self.given.values), names[0])

    def default_note(self, *names: str) -> str:
        argument = self.given.arguments[self._chosen(names)]
        if argument.name in self.given.values or argument.program is None:
            return ""
        shown, own = format_value(argument.default), format_value(argument.program)
        return f"{self.given.shown(argument.name)} is not given: {shown} as documented; the program itself takes {own}"

    def told(self, name: str, given: Given | None = None) -> str:
        """The argument as it was written, for a comment."""
        source = given or self.given
        return f"{source.shown(name)} {source.written(name)}".rstrip()

    def leave(self, name: str, why: str) -> None:
        """Say that an argument found no place; nothing is said of one that was not given."""
        if self.given.has(name):
            self.draft.left.append(f"{self.told(name)}: {why}")

    def ignore(self, name: str, why: str) -> None:
        """Say that an argument has no effect in the original; nothing is said of one that was not given."""
        if self.given.has(name):
            self.draft.unused.append(f"{self.told(name)}: {why}")

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


def set_output(draft: Draft, folder: str | None) -> None:
    """The run is written to run.folder/name: the last part of the original's folder becomes the name."""
    path = PurePosixPath(folder or ".")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._")[:80]
    if not name:
        return
    draft.set("name", name)
    draft.set("run.folder", str(path.parent) if str(path.parent) != "." else "runs")
    if str(path.parent) == ".":
        draft.note("run.folder", f"the original writes to {folder}; runs lie together in one folder here")


def set_resume(job: Job, name: str = "resume_from_checkpoint") -> None:
    """`latest` and True go on, False does not; another folder's checkpoint is none of ours."""
    value = job.given.get(name)
    if not job.given.has(name) or value is None:
        return
    word = value.lower()
    if word in ("latest", "true"):
        job.draft.set("run.resume", "latest")
    elif word in ("false", ""):
        job.draft.set("run.resume", "never")
    else:
        text = f"{job.told(name)}: a run goes on from its own folder; to start from those weights, name them as weights"
        job.draft.set("run.resume", "latest", text)


def set_length(job: Job, steps: int | None, epochs: int | None) -> None:
    """Steps, or epochs where the original counts those."""
    job.draft.drop("train.steps")
    if steps is not None:
        job.draft.set("train.steps", steps)
    elif epochs is not None:
        job.draft.set("train.epochs", epochs)


def set_keep(job: Job, name: str) -> None:
    """How many checkpoints are kept; two at least, since the newest may be damaged."""
    if (number := job.given.get(name)) is not None:
        job.draft.set("train.keep", max(2, number))


def set_memory(job: Job, name: str) -> None:
    """An amount such as 59GB."""
    text = job.given.get(name)
    match = _MEMORY.fullmatch(text) if text else None
    if text and match is None:
        job.given.problems.append(f"{job.told(name)}: expected an amount such as 59GB")
    elif match is not None:
        job.draft.set("train.max_device_memory", f"{match[1]}{match[2].upper()}iB")


def set_stride(job: Job, name: str) -> None:
    """Every how many frames of a file one is taken; a recipe thins clips by their rate."""
    stride = job.given.get(name)
    if stride < 1:
        job.given.problems.append(f"{job.told(name)}: expected 1 or more")
    elif stride == 1:
        job.draft.set("data.fps_max", 1000)
    else:
        slowest = 30 * (stride - 1) // stride + 1
        text = f"{job.given.shown(name)} {stride}: clips are thinned by their rate here; this is for files of "
        # Rounded up: a rate that is a hair too low would take one frame fewer.
        rate = math.ceil(300_000 / stride) / 10_000
        job.draft.set("data.fps_max", rate, f"{text}{slowest} to 30 frames a second")


def set_zero(job: Job, stage: int, shown: str) -> None:
    """ZeRO; an optimizer that looks at whole weights cannot have more than its state split."""
    name = job.draft.get("optim.name") or "adamw"
    allowed = stage if name in ("adamw", "lion") else min(stage, 0 if name == "prodigy" else 1)
    note = f"{shown}: {name} looks at whole weights, so only its state is split" if allowed != stage else ""
    if stage or allowed:
        job.draft.set("parallel.zero", allowed, note)


def tell_start(launcher: Given) -> str | None:
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


def set_deepspeed(job: Job) -> None:
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


def _read_stage(job: Job, name: str) -> int | None:
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


_RUNNING = ("run", "seed", "parallel", "validation", "lora")
_WIDTH = 118
_MOST_IN_LINE = 90


@dataclass
class Draft:
    """`head` are lines of the head comment; `left` says what found no place, `unused` what the original ignores."""

    values: dict[str, Any]
    head: list[str] = field(default_factory=list)
    notes: dict[KeyPath, list[str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, template: Mapping[str, Any]) -> Draft:
        """What a shipped recipe knows of a model and its data; how it is run is the command's own."""
        return cls({key: copy.deepcopy(value) for key, value in template.items() if key not in _RUNNING})

    def set(self, dotted: str, value: Any, note: str = "") -> None:
        """Set one key; `note` becomes a comment above it."""
        *sections, last = self._path(dotted)
        target: Any = self.values
        for key in sections:
            target = self._step(target, key)
        if isinstance(target, list):
            target[int(last)] = value
        else:
            target[last] = value
        if note:
            self.note(dotted, note)

    def get(self, dotted: str) -> Any:
        value: Any = self.values
        for key in self._path(dotted):
            if isinstance(value, list) and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                return None
        return value

    def drop(self, dotted: str) -> None:
        *sections, last = self._path(dotted)
        target = self.get(".".join(sections)) if sections else self.values
        if isinstance(target, dict):
            target.pop(last, None)

    def note(self, dotted: str, text: str) -> None:
        path = self._path(dotted)
        # Lists are printed item by item, so a comment on something inside stands above the list.
        place = next((depth for depth, key in enumerate(path) if key.isdecimal()), len(path))
        self.notes.setdefault(path[:place], []).append(text)

    def _path(self, dotted: str) -> KeyPath:
        path = tuple(dotted.split("."))
        if kind_at(path) is None:
            raise KeyError(f"an import sets {dotted}, which no recipe has")
        return path

    def _step(self, target: Any, key: str) -> Any:
        if isinstance(target, list):
            return target[int(key)]
        if not isinstance(target.get(key), dict | list):
            target[key] = {}
        return target[key]


def render_draft(draft: Draft) -> str:
    """The recipe as YAML; reading it back gives the values of the draft."""
    lines = [line for text in draft.head for line in _comment(text, "")]
    lines += _render_section(Recipe, draft.values, (), draft.notes)
    for title, texts in (("Without a key here:", draft.left), ("Without effect in the original:", draft.unused)):
        if texts:
            lines += ["", f"# {title}"]
            lines += [line for text in texts for line in _comment(text, "", bullet="- ")]
    return "\n".join(lines) + "\n"


def _render_section(
    section: type[Section] | None, values: Mapping[str, Any], path: KeyPath, notes: Mapping[KeyPath, list[str]]
) -> Iterator[str]:
    indent = "  " * len(path)
    order = list(section.model_fields) if section else []
    names = sorted(values, key=lambda name: order.index(name) if name in order else -1) if order else list(values)
    for name in names:
        value, here = values[name], (*path, name)
        for text in notes.get(here, ()):
            yield from _comment(text, indent)
        key = f"{indent}{format_key(name)}:"
        kind = kind_at(here)
        has_notes = any(place[: len(here)] == here != place for place in notes)
        line = f"{key} {format_value(value)}"
        if isinstance(value, dict) and value and (has_notes or len(line) > _MOST_IN_LINE or len(here) == 1):
            yield key
            yield from _render_section(kind.section if kind else None, value, here, notes)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield key
            yield from (f"{indent}  - {format_value(item)}" for item in value)
        else:
            yield line


def _comment(text: str, indent: str, *, bullet: str = "") -> list[str]:
    lead = f"{indent}# {bullet}"
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=f"{indent}# " + " " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
