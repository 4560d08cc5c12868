"""Which program a command starts: by the name of its script, or by the names of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from frameloom.config.arguments import SYSTEMS, load_system
from frameloom.config.imports.launch import Launch
from frameloom.config.imports.shell import explain_unset, find_unset
from frameloom.core.errors import ConfigError
from frameloom.core.spelling import suggest


class Program(NamedTuple):
    """A trainer that can be imported."""

    system: str
    name: str


# Scripts that tell the program by themselves; `train.py` alone does not.
PROGRAMS = {
    "scripts/diffusion/train.py": Program("opensora2", "scripts/diffusion/train.py"),
    "train_t2v_diffusers.py": Program("opensora_plan", "opensora/train/train_t2v_diffusers.py"),
    "train_causalvae.py": Program("opensora_plan", "opensora/train/train_causalvae.py"),
    "train_t2v.py": Program("latte", "opensora/train/train_t2v.py"),
    "train_lora.py": Program("cogvideox_fun", "scripts/train.py"),
    "scripts/train.py": Program("cogvideox_fun", "scripts/train.py"),
    "train.py": Program("sdxl", "train.py"),
}


def refuse_system(system: str | None) -> None:
    if system is not None and system not in SYSTEMS:
        raise ConfigError(f"--system {system}: no such system; {suggest(system, SYSTEMS, kind='systems')}")


def choose_launch(launches: Sequence[Launch], *, system: str | None, where: str) -> Launch:
    """The one command that trains; several are an error that names them, and so is none."""
    trainers = [launch for launch in launches if _match(launch, system) is not None]
    if len(trainers) == 1:
        launch = trainers[0]
        words = [word for values in (*launch.arguments.values(), launch.positional) for word in values]
        if unset := find_unset(words):
            raise ConfigError(f"{where}:{launch.line}: {explain_unset(unset)}")
        return launch
    if trainers:
        named = "; ".join(f"line {launch.line}: {launch.script or 'arguments alone'}" for launch in trainers)
        raise ConfigError(f"{where}: {len(trainers)} commands train ({named}); keep one of them in a file of its own")
    known = ", ".join(PROGRAMS)
    others = [_describe(launch) for launch in launches if launch.script]
    found = f"found {'; '.join(others)}" if others else "found no Python program"
    raise ConfigError(
        f"{where}: no command here trains: {found}; expected one of {known}, or a .py or .yaml configuration"
    )


def _describe(launch: Launch) -> str:
    """A command that does something else, with what does it here."""
    for system in SYSTEMS:
        for name, arguments in load_system(system).programs.items():
            if name.endswith(".py") and launch.script.endswith(name):
                keys = [key for argument in arguments.values() for key in argument.keys if key.startswith("frameloom ")]
                homes = {" ".join(word for word in key.split() if word.islower() and word[0] != "-") for key in keys}
                return f"{launch.script}, which here is `{'`, `'.join(sorted(homes))}`" if homes else launch.script
    return launch.script


def find_program(launch: Launch, system: str | None, *, where: str) -> Program:
    program = _match(launch, system)
    if program is None:
        known = ", ".join(name for name, program in PROGRAMS.items() if system in (None, program.system))
        raise ConfigError(f"{where}: {launch.script} is no program of {system or 'a known system'}; expected {known}")
    return program


def _match(launch: Launch, system: str | None) -> Program | None:
    for script, program in PROGRAMS.items():
        is_it = launch.script == script or launch.script.endswith(f"/{script}")
        if is_it and script not in ("train.py", "scripts/train.py") and system in (None, program.system):
            return program
    if launch.script and launch.name != "train.py":
        return None
    return _match_arguments(launch, system)


def _match_arguments(launch: Launch, system: str | None) -> Program | None:
    """The program that knows most of the arguments; a script's folder decides where several know as many."""
    ranked = []
    for place, program in enumerate(dict.fromkeys(PROGRAMS.values())):
        if system not in (None, program.system) or (launch.script and program.name.rpartition("/")[2] != "train.py"):
            continue
        known = load_system(program.system).programs[program.name]
        score = sum(name in known for name in launch.arguments)
        fits = bool(launch.script) and (f"/{launch.script}".endswith(f"/{program.name}"))
        ranked.append((score, fits, -place, program))
    best = max(ranked, default=None)
    return best[3] if best is not None and (best[0] or best[1]) else None
