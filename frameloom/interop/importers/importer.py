"""Import a command or configuration of another trainer: find the program it starts, and translate it to a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from frameloom.config.loading.problems import parse_recipe
from frameloom.config.loading.recipe import resolve
from frameloom.config.loading.yaml_values import parse_scalar, read_text
from frameloom.config.rules.check import check_rules
from frameloom.core.errors import ConfigError
from frameloom.core.spelling import nearest, suggest
from frameloom.interop.importers import cogvideox_fun, open_sora_plan, opensora2, sdxl
from frameloom.interop.importers.arguments import COMMAND, SYSTEMS, load_system
from frameloom.interop.importers.job import ImportJob, format_start, name_run
from frameloom.interop.importers.parsed_arguments import ParsedArguments
from frameloom.interop.importers.python_config import flatten, merge_over, read_python_config
from frameloom.interop.importers.shell import Launch, explain_unset, find_launches, find_unset, parse_script

_LAUNCHERS = {
    "accelerate": ("cogvideox_fun", "accelerate launch"),
    "torchrun": ("opensora2", "torchrun"),
    "colossalai": ("opensora2", "colossalai run"),
    "msrun": ("opensora_plan", "msrun"),
}
_PARENTS = 4


def import_command(path: Path, *, system: str | None = None, is_lenient: bool = False) -> str:
    """The text of the recipe that equals the command or configuration in `path`; ConfigError lists all that is wrong.

    A lenient import keeps what it does not understand as comments.
    """
    if system is not None and system not in SYSTEMS:
        raise ConfigError(f"--system {system}: no such system; {suggest(system, SYSTEMS, kind='systems')}")
    if path.suffix == ".py":
        launch = Launch("scripts/diffusion/train.py", "", 1, positional=(path.name,))
    elif path.suffix in (".yaml", ".yml"):
        launch = Launch("train.py", "", 1, arguments={"config": (path.name,)})
    else:
        text = read_text(path, shown=str(path))
        launch = choose_launch(find_launches(parse_script(text, where=str(path))), system=system, where=str(path))
    program = _match(launch, system)
    if program is None:
        known = ", ".join(name for name, (own, _) in PROGRAMS.items() if system in (None, own))
        raise ConfigError(f"{path}: {launch.script} is no program of {system or 'a known system'}; expected {known}")
    return _Import(path, launch, program, is_lenient).run()


class _Import:
    """One file on its way; all problems are reported together at the end."""

    def __init__(self, path: Path, launch: Launch, program: tuple[str, str], is_lenient: bool) -> None:
        self.path, self.launch, self.is_lenient = path, launch, is_lenient
        self.system, self.program = program
        self.where = f"{path}:{launch.line}"
        self.arguments = load_system(self.system).programs[self.program]
        launcher_system, options = _LAUNCHERS.get(launch.launcher, ("", ""))
        launcher = ParsedArguments(
            load_system(launcher_system).programs[options] if launcher_system else {},
            launch.options,
            name=launch.launcher,
        )
        folders = (*list(path.absolute().parents)[:_PARENTS], Path.cwd())
        self.job = ImportJob(ParsedArguments(self.arguments, dict(launch.arguments)), launcher, folders)
        self.recipe = self.job.recipe
        self.sources = [self.job.given]

    def run(self) -> str:
        self._translate()
        problems = [*self._list_unknown(), *self._list_missing()]
        problems += [problem for source in self.sources for problem in source.problems]
        # Variables in the launcher's options that a recipe depends on; addresses and process counts may stay.
        for name, argument in self.job.launcher.arguments.items():
            decides = any(not key.startswith(COMMAND) for key in argument.keys)
            if decides and (unset := find_unset(self.launch.options.get(name, ()))):
                problems.append(explain_unset(unset))
        if problems:
            raise ConfigError([f"{self.where}: {problem}" for problem in problems])
        started = format_start(self.job.launcher)
        self._note_unread()
        self._check()
        title = load_system(self.system).title
        script = f", {self.launch.script}" if self.launch.script and self.path.suffix not in (".py", ".yaml") else ""
        self.recipe.head[:0] = [f"Imported from {self.path.name}: {title}{script}", *([started] if started else ())]
        return self.recipe.render()

    def _translate(self) -> None:
        match self.program:
            case "scripts/train.py":
                cogvideox_fun.translate(self.job, is_lora=self.launch.script.endswith("train_lora.py"))
            case "opensora/train/train_t2v.py":
                open_sora_plan.translate_latte(self.job)
            case "opensora/train/train_t2v_diffusers.py":
                open_sora_plan.translate(self.job)
            case "opensora/train/train_causalvae.py":
                open_sora_plan.translate_vae(self.job)
            case "scripts/diffusion/train.py":
                self._translate_opensora2()
            case _:
                self._translate_sdxl()

    def _translate_opensora2(self) -> None:
        if not self.launch.positional:
            raise ConfigError(f"{self.where}: no configuration is named; expected one after the script")
        name = self.launch.positional[0]
        stem = PurePosixPath(name).stem
        file = self.job.find_file(name)
        base = None if file else opensora2.PUBLISHED.get(stem)
        if file is None and base is None:
            known = ", ".join(f"{published}.py" for published in opensora2.PUBLISHED)
            text = f"the configuration '{name}' is not there; expected a file, or one that is published: {known}"
            raise ConfigError(f"{self.where}: {text}")
        values: dict[str, Any] = {}
        whole = [key for key, argument in self.arguments.items() if argument.kind in ("mapping", "any")]
        if file is not None:
            settings = {key.partition(".")[0] for key in self.arguments} - set(opensora2.REPEATED)
            values = flatten(read_python_config(file, settings=settings), whole)
        values |= {key: _plain(words) for key, words in self.launch.arguments.items()}
        is_command = file is None or bool(self.launch.arguments)
        self.job.given = ParsedArguments(self.arguments, values, "--" if is_command else "")
        self.sources = [self.job.given]
        opensora2.translate(self.job, base=base, name=name_run("opensora2", stem))
        if base is not None:
            self.recipe.head.append(f"{name} was not found; the published one is shipped as {base}")

    def _translate_sdxl(self) -> None:
        name = self.job.given.get("config") or ""
        file = self.job.find_file(name) if name else None
        stem = PurePosixPath(name).stem
        if file is None:
            base = next((recipe for part, recipe in sdxl.PUBLISHED.items() if part in stem), None)
            if name and base is None:
                text = f"the configuration '{name}' is not there; name it as it is found from here"
                raise ConfigError(f"{self.where}: {text}")
            base = base or "sdxl/finetune"
            sdxl.translate(self.job, None, {}, base=base, name=f"{base.replace('/', '-')}-imported")
            text = f"{name or 'the configuration'} was not found; the published one is shipped as {base}"
            self.recipe.head.append(text)
            return
        raw, has_placeholder = sdxl.read_sdxl_yaml(file)
        rows = load_system("sdxl").programs["configuration"]
        whole = [key for key, argument in rows.items() if argument.kind == "any"]
        config = ParsedArguments(rows, sdxl.drop_structure(flatten(raw, whole)), "")
        self.sources.append(config)
        sdxl.translate(self.job, config, raw, base=None, name=name_run("sdxl", stem))
        if has_placeholder:
            self.recipe.head.append(f"{name} leaves parts out ('...'); they are as in sdxl/finetune")

    def _list_unknown(self) -> Iterator[str]:
        for source in self.sources:
            for name in source.values.keys() - source.arguments.keys():
                near = nearest(name, source.arguments)
                hint = f"did you mean {source.dashes}{near}?" if near else "docs/arguments.md lists what is known"
                if self.is_lenient:
                    self.recipe.unsupported.append(f"{source.dashes}{name} {source.written(name)}: unknown; {hint}")
                else:
                    yield f"{source.dashes}{name} is unknown to {self.program}; {hint}"

    def _list_missing(self) -> Iterator[str]:
        for name, argument in self.arguments.items():
            if not argument.required or name in self.job.given.values:
                continue
            if self.launch.has_placeholder:
                self.recipe.head.append(f"--{name} is left out ('...'): fill in {argument.keys[0]}")
            else:
                yield f"--{name} is missing; expected {argument.means}"

    def _note_unread(self) -> None:
        """Comments for all that was given and that nothing has translated: nothing is left out in silence."""
        recipe, launcher = self.recipe, self.job.launcher
        for source in (*self.sources, launcher):
            for name in source.values:
                if name not in source.arguments or name in source.used:
                    continue
                argument = source.arguments[name]
                commands = [key for key in argument.keys if key.startswith(COMMAND)]
                here = argument.none or f"{'with' if commands else 'see'} {', '.join(commands or argument.keys)}"
                texts = recipe.unused if argument.is_unused else recipe.unsupported
                texts.append(f"{source.quote(name)}: {here}")
            for name, other in source.overruled.items():
                text = f"{source.dashes}{name} {source.written(name)}: {source.dashes}{other} decides"
                recipe.unused.append(text)
        for name in launcher.values:
            if name not in launcher.arguments:
                text = f"{self.launch.launcher} --{name}: an option of the launcher; see torchrun's"
                recipe.unsupported.append(text)
        known = load_system(self.system).programs.get("environment", {})
        for name, value in self.launch.variables.items():
            if name in known and known[name].none:
                recipe.unsupported.append(f"{name}={value}: {known[name].none}")

    def _check(self) -> None:
        """The recipe must be one: its problems are the user's to put right, in the command or in the recipe."""
        values: dict[str, Any] = {}
        if base := self.recipe.values.get("_base_"):
            values = resolve(base)
        merge_over(values, {key: item for key, item in self.recipe.values.items() if key != "_base_"})
        recipe, wrong = parse_recipe(values)
        if recipe is not None and recipe.task == "denoiser" and recipe.train.ema is None:
            self.recipe.set("sample.weights", "raw")
        found = [*wrong, *(check_rules(recipe) if recipe is not None else ())]
        if found and not self.is_lenient:
            texts = [f"{self.where}: the recipe would not do: {problem.text}" for problem in found]
            raise ConfigError([*texts, "--lenient writes the recipe all the same"])
        self.recipe.head += [f"TO PUT RIGHT: {problem.text}" for problem in found]


def _plain(words: tuple[str, ...]) -> Any:
    """A value of Open-Sora's command line, as its own parser would have it."""
    if not words:
        return True
    text = " ".join(words)
    if text.startswith(("(", "[")):
        return [parse_scalar(part.strip()) for part in text.strip("()[] ").split(",") if part.strip()]
    value = parse_scalar(text)
    return None if isinstance(value, str) and value.lower() == "none" else value


# Scripts that name the program by themselves, with its system and its name there; `train.py` alone does not.
PROGRAMS = {
    "scripts/diffusion/train.py": ("opensora2", "scripts/diffusion/train.py"),
    "train_t2v_diffusers.py": ("opensora_plan", "opensora/train/train_t2v_diffusers.py"),
    "train_causalvae.py": ("opensora_plan", "opensora/train/train_causalvae.py"),
    "train_t2v.py": ("latte", "opensora/train/train_t2v.py"),
    "train_lora.py": ("cogvideox_fun", "scripts/train.py"),
    "scripts/train.py": ("cogvideox_fun", "scripts/train.py"),
    "train.py": ("sdxl", "train.py"),
}


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
    others = [_format_other(launch) for launch in launches if launch.script]
    found = f"found {'; '.join(others)}" if others else "found no Python program"
    raise ConfigError(
        f"{where}: no command here trains: {found}; expected one of {known}, or a .py or .yaml configuration"
    )


def _format_other(launch: Launch) -> str:
    """A command that does something else, with what does it here."""
    for system in SYSTEMS:
        for name, arguments in load_system(system).programs.items():
            if name.endswith(".py") and launch.script.endswith(name):
                keys = [key for argument in arguments.values() for key in argument.keys if key.startswith("frameloom ")]
                homes = {" ".join(word for word in key.split() if word.islower() and word[0] != "-") for key in keys}
                return f"{launch.script}, which here is `{'`, `'.join(sorted(homes))}`" if homes else launch.script
    return launch.script


def _match(launch: Launch, system: str | None) -> tuple[str, str] | None:
    """(system, program)"""
    for script, program in PROGRAMS.items():
        is_it = launch.script == script or launch.script.endswith(f"/{script}")
        if is_it and script not in ("train.py", "scripts/train.py") and system in (None, program[0]):
            return program
    if launch.script and PurePosixPath(launch.script).name != "train.py":
        return None
    # The program that knows most of the arguments; a script's folder decides where several know as many.
    ranked = []
    for index, (own, name) in enumerate(dict.fromkeys(PROGRAMS.values())):
        if system not in (None, own) or (launch.script and name.rpartition("/")[2] != "train.py"):
            continue
        score = len(load_system(own).programs[name].keys() & launch.arguments.keys())
        fits = bool(launch.script) and (f"/{launch.script}".endswith(f"/{name}"))
        ranked.append((score, fits, -index, (own, name)))
    best = max(ranked, default=None)
    return best[3] if best is not None and (best[0] or best[1]) else None
