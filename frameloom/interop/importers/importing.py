"""Import a command or configuration of another trainer: find the program it starts, and translate it to a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from frameloom.config.loading.problems import parse_recipe
from frameloom.config.loading.recipe import resolve
from frameloom.config.loading.yaml_values import parse_scalar, read_text
from frameloom.config.rules.check import check_rules
from frameloom.core.errors import ConfigError
from frameloom.core.spelling import suggest
from frameloom.interop.importers import causalvae, cogvideox_fun, latte, open_sora_plan, opensora2, sdxl
from frameloom.interop.importers.arguments import COMMAND, SYSTEMS, Argument, load_system
from frameloom.interop.importers.given import Given
from frameloom.interop.importers.job import Draft, Job, name_run, render_draft, tell_start
from frameloom.interop.importers.python_config import flatten, merge_over, read_python_config
from frameloom.interop.importers.sdxl import drop_structure, read_sdxl_yaml
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
    refuse_system(system)
    if path.suffix == ".py":
        launch = Launch("scripts/diffusion/train.py", "", 1, positional=(path.name,))
    elif path.suffix in (".yaml", ".yml"):
        launch = Launch("train.py", "", 1, arguments={"config": (path.name,)})
    else:
        text = read_text(path, shown=str(path))
        launch = choose_launch(find_launches(parse_script(text, where=str(path))), system=system, where=str(path))
    program = find_program(launch, system, where=str(path))
    import_ = _Import(path, launch, program)
    return import_.finish(is_lenient=is_lenient)


class _Import:
    """One file on its way; `problems` are told together at the end."""

    def __init__(self, path: Path, launch: Launch, program: Program) -> None:
        self.path, self.launch, self.program = path, launch, program
        self.arguments = load_system(program.system).programs[program.name]
        parents = list(path.absolute().parents)[:_PARENTS]
        launcher = Given(self._launcher_arguments(), launch.options, name=launch.launcher)
        self.job = Job(Given(self.arguments, dict(launch.arguments)), launcher, Draft({}), (*parents, Path.cwd()))
        self.sources = [self.job.given]

    def _launcher_arguments(self) -> Mapping[str, Argument]:
        system, program = _LAUNCHERS.get(self.launch.launcher, ("", ""))
        return load_system(system).programs[program] if system else {}

    def finish(self, *, is_lenient: bool) -> str:
        draft = self._translate()
        problems = [*self._list_unknown(draft, is_lenient=is_lenient), *self._list_missing(draft)]
        problems += [problem for source in self.sources for problem in source.problems]
        problems += self._list_unset()
        if problems:
            raise ConfigError([f"{self.path}:{self.launch.line}: {problem}" for problem in problems])
        started = tell_start(self.job.launcher)
        self._tell_rest(draft)
        self._check(draft, is_lenient=is_lenient)
        title = load_system(self.program.system).title
        script = f", {self.launch.script}" if self.launch.script and self.path.suffix not in (".py", ".yaml") else ""
        if started:
            draft.head.insert(0, started)
        draft.head.insert(0, f"Imported from {self.path.name}: {title}{script}")
        return render_draft(draft)

    def _translate(self) -> Draft:
        job, script = self.job, self.launch.script
        match self.program.name:
            case "scripts/train.py":
                return cogvideox_fun.translate(job, script=script)
            case "opensora/train/train_t2v.py":
                return latte.translate(job)
            case "opensora/train/train_t2v_diffusers.py":
                return open_sora_plan.translate(job)
            case "opensora/train/train_causalvae.py":
                return causalvae.translate(job)
            case "scripts/diffusion/train.py":
                return self._translate_opensora2()
        return self._translate_sdxl()

    def _translate_opensora2(self) -> Draft:
        if not self.launch.positional:
            raise ConfigError(
                f"{self.path}:{self.launch.line}: no configuration is named; expected one after the script"
            )
        name = self.launch.positional[0]
        stem = PurePosixPath(name).stem
        file = self.job.find_file(name)
        base = None if file else opensora2.PUBLISHED.get(stem)
        if file is None and base is None:
            known = ", ".join(f"{published}.py" for published in opensora2.PUBLISHED)
            text = f"the configuration '{name}' is not there; expected a file, or one that is published: {known}"
            raise ConfigError(f"{self.path}:{self.launch.line}: {text}")
        values: dict[str, Any] = {}
        whole = [key for key, argument in self.arguments.items() if argument.kind in ("mapping", "any")]
        if file is not None:
            settings = {key.partition(".")[0] for key in self.arguments} - set(opensora2.REPEATED)
            values = flatten(read_python_config(file, settings=settings), whole)
        values |= {key: _plain(words) for key, words in self.launch.arguments.items()}
        is_command = file is None or bool(self.launch.arguments)
        self.job.given = Given(self.arguments, values, "--" if is_command else "")
        self.sources = [self.job.given]
        draft = opensora2.translate(self.job, base=base, name=name_run("opensora2", stem))
        if base is not None:
            draft.head.append(f"{name} was not found; the published one is shipped as {base}")
        return draft

    def _translate_sdxl(self) -> Draft:
        name = self.job.given.get("config") or ""
        file = self.job.find_file(name) if name else None
        stem = PurePosixPath(name).stem
        if file is None:
            base = next((recipe for part, recipe in sdxl.PUBLISHED.items() if part in stem), None)
            if name and base is None:
                text = f"the configuration '{name}' is not there; name it as it is found from here"
                raise ConfigError(f"{self.path}:{self.launch.line}: {text}")
            base = base or "sdxl/finetune"
            draft = sdxl.translate(self.job, None, {}, base=base, name=f"{base.replace('/', '-')}-imported")
            draft.head.append(f"{name or 'the configuration'} was not found; the published one is shipped as {base}")
            return draft
        raw, has_placeholder = read_sdxl_yaml(file)
        rows = load_system("sdxl").programs["configuration"]
        whole = [key for key, argument in rows.items() if argument.kind == "any"]
        config = Given(rows, drop_structure(flatten(raw, whole)), "")
        self.sources.append(config)
        draft = sdxl.translate(self.job, config, raw, base=None, name=name_run("sdxl", stem))
        if has_placeholder:
            draft.head.append(f"{name} leaves parts out ('...'); they are as in sdxl/finetune")
        return draft

    def _list_unknown(self, draft: Draft, *, is_lenient: bool) -> Iterator[str]:
        for source in self.sources:
            for name, near in source.unknown():
                hint = f"did you mean {source.shown(near)}?" if near else "docs/arguments.md lists what is known"
                if is_lenient:
                    draft.left.append(f"{source.shown(name)} {source.written(name)}: unknown; {hint}")
                else:
                    yield f"{source.shown(name)} is unknown to {self.program.name}; {hint}"

    def _list_missing(self, draft: Draft) -> Iterator[str]:
        for name, argument in self.arguments.items():
            if not argument.required or name in self.job.given.values:
                continue
            if self.launch.has_placeholder:
                draft.head.append(f"--{name} is left out ('...'): fill in {argument.keys[0]}")
            else:
                yield f"--{name} is missing; expected {argument.means}"

    def _list_unset(self) -> Iterator[str]:
        """Variables in the launcher's options that a recipe depends on; addresses and process counts may stay."""
        for name, argument in self.job.launcher.arguments.items():
            decides = any(not key.startswith(COMMAND) for key in argument.keys)
            if decides and (unset := find_unset(self.launch.options.get(name, ()))):
                yield explain_unset(unset)

    def _tell_rest(self, draft: Draft) -> None:
        """Comments for all that was given and that nobody has read."""
        for source in (*self.sources, self.job.launcher):
            for argument in source.unread():
                told = f"{source.shown(argument.name)} {source.written(argument.name)}".rstrip()
                commands = [key for key in argument.keys if key.startswith(COMMAND)]
                home = argument.none or f"{'with' if commands else 'see'} {', '.join(commands or argument.keys)}"
                (draft.unused if argument.is_unused else draft.left).append(f"{told}: {home}")
            for name, other in source.overruled.items():
                draft.unused.append(f"{source.shown(name)} {source.written(name)}: {source.shown(other)} decides")
        for name in self.job.launcher.values:
            if name not in self.job.launcher.arguments:
                draft.left.append(f"{self.launch.launcher} --{name}: an option of the launcher; see torchrun's")
        known = load_system(self.program.system).programs.get("environment", {})
        for name, value in self.launch.variables.items():
            if name in known and known[name].none:
                draft.left.append(f"{name}={value}: {known[name].none}")

    def _check(self, draft: Draft, *, is_lenient: bool) -> None:
        """The recipe must be one: its problems are the person's to put right, in the command or in the recipe."""
        values: dict[str, Any] = {}
        if base := draft.values.get("_base_"):
            values = resolve(base)
        merge_over(values, {key: item for key, item in draft.values.items() if key != "_base_"})
        recipe, wrong = parse_recipe(values)
        if recipe is not None and recipe.task == "denoiser" and recipe.train.ema is None:
            draft.set("sample.weights", "raw")
        found = [*wrong, *(check_rules(recipe) if recipe is not None else ())]
        if found and not is_lenient:
            advice = "--lenient writes the recipe all the same"
            texts = [f"{self.path}:{self.launch.line}: the recipe would not do: {problem.text}" for problem in found]
            raise ConfigError([*texts, advice])
        draft.head += [f"TO PUT RIGHT: {problem.text}" for problem in found]


def _plain(words: tuple[str, ...]) -> Any:
    """A value of Open-Sora's command line, as its own parser would have it."""
    if not words:
        return True
    text = " ".join(words)
    if text.startswith(("(", "[")):
        return [parse_scalar(part.strip()) for part in text.strip("()[] ").split(",") if part.strip()]
    value = parse_scalar(text)
    return None if isinstance(value, str) and value.lower() == "none" else value


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
