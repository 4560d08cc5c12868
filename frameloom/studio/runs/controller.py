"""Event handlers of the Runs tab: list of runs, curves, samples by step, launches with their logs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from frameloom.config.loading.recipe import SHIPPED
from frameloom.core.errors import ConfigError, FrameloomError
from frameloom.evaluate.charts import COLOURS, Axis, Line, draw_chart, format_value
from frameloom.studio.recipe.files import find_recipe_file, list_recipes
from frameloom.studio.runs import samples as run_samples
from frameloom.studio.runs.launches import Launches, describe_end, has_failed
from frameloom.studio.runs.run_list import RECIPE, RUNNING, STOPPED, Run, RunIndex, RunView
from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.markup import badge, bar, button, format_time, player, problem_list, safe, status

_CHARTS = {
    "train/loss": "Training loss",
    "validation/validation_loss": "Validation loss",
    "validation/psnr_db": "Validation PSNR, dB",
    "validation/ssim": "Validation SSIM",
    "train/lr": "Learning rate",
    "train/tokens_per_s": "Tokens per second",
}
# Counting up is no curve to look at.
_NOT_OFFERED = ("train/epoch", *_CHARTS)
_SHOWN_LAUNCHES = 5
_REPORT = "report.html"
MAX_OVERLAID = len(COLOURS)


class RunsDesk:
    """Everything behind the place; one for all pages of a studio."""

    def __init__(self, context: StudioContext) -> None:
        self.context = context
        self.launches = Launches(context.root, context.root / "studio" / "launches")
        self.index = RunIndex(context.root, self.launches.find_failure)

    def names(self) -> list[str]:
        return [view.name for view in self.index.views()]

    def choose(self) -> list[str]:
        """What a fresh page shows: the runs that go on, else the one that was written to last."""
        views = self.index.views()
        running = [view.name for view in views if view.state == RUNNING]
        return running[:MAX_OVERLAID] or [view.name for view in sorted(views, key=_last_written, reverse=True)[:1]]

    def pick(self, names: Sequence[str] | None) -> list[Run]:
        """Runs by names that a page sent."""
        found = [self.index.get(name) for name in list(names or ())[:MAX_OVERLAID]]
        return [run for run in found if run is not None]

    def version(self, names: Sequence[str] | None) -> list[object]:
        """Changes when there is something new to draw of these runs."""
        runs = self.pick(names)
        for run in runs:
            run.metrics.look()
        return [[run.name, run.metrics.version] for run in runs]

    def draw_table(self) -> str:
        views = self.index.views()
        if not views:
            return (
                '<p class="rg-empty">No runs below this folder yet. Start one below, or train from a terminal: '
                "<code>frameloom train my.yaml</code>. What is written here appears by itself.</p>"
            )
        rows = "".join(self._draw_row(view) for view in views)
        head = "".join(f"<th>{name}</th>" for name in ("Run", "State", "Step", "Loss", "Time left", "<span></span>"))
        return f'<div class="rg-scroll"><table class="rg-table"><tr>{head}</tr>{rows}</table></div>'

    def _draw_row(self, view: RunView) -> str:
        total = view.facts.num_steps
        step = f"{view.step:,}" + ("" if total is None else f" / {total:,} {bar(view.step, total)}")
        loss = "" if view.loss is None else format_value(view.loss)
        about = view.facts.problem or f"{view.facts.task} · {view.facts.model}"
        message = f'<br><small class="rg-message">{safe(view.message)}</small>' if view.message else ""
        return (
            f'<tr><td class="rg-name">{safe(view.name)}<br><small>{safe(about)}</small></td>'
            f'<td>{badge(view.state)}{message}</td><td class="rg-step" data-label="step">{step}</td>'
            f'<td data-label="loss">{loss}</td><td data-label="left">{format_time(view.seconds_left)}</td>'
            f'<td class="rg-acts">{self._draw_acts(view)}</td></tr>'
        )

    def _draw_acts(self, view: RunView) -> str:
        parts = []
        report = self._find_report(view.path)
        if report is not None:
            url = safe(self.context.file_url(report))
            parts.append(f'<a class="rg-link" href="{url}" target="_blank" rel="noopener">Report</a>')
        if view.state == RUNNING:
            is_asked = self.launches.is_asked(view.name)
            hint = "end at once, without saving" if is_asked else "finish the step, save and end"
            parts.append(button("stop", view.name, "End now" if is_asked else "Stop", hint=f"{view.name}: {hint}"))
        elif view.state == STOPPED or view.message:
            parts.append(button("resume", view.name, "Resume", hint=f"{view.name}: go on from the last checkpoint"))
        return "".join(parts)

    def _find_report(self, run: Path) -> Path | None:
        """A report of the run, or of the whole that it is a part of, as the demo writes one."""
        for folder in (run, run.parent):
            file = folder / _REPORT
            if folder.is_relative_to(self.context.root) and file.is_file() and not file.is_symlink():
                return file
        return None

    def other_metrics(self, names: Sequence[str] | None) -> list[str]:
        found = {name for run in self.pick(names) for name in run.metrics.names()}
        return sorted(name for name in found if name not in _NOT_OFFERED and not name.endswith("_ci95"))

    def draw_charts(
        self, names: Sequence[str] | None, *, strength: float, is_log: bool, more: Sequence[str] = ()
    ) -> str:
        """The usual curves of the chosen runs over one another, then those that were asked for besides."""
        runs = self.pick(names)
        if not runs:
            return '<p class="rg-empty">Choose one or more runs to see their curves.</p>'
        for run in runs:
            run.metrics.look()
        colours = {run.name: COLOURS[number] for number, run in enumerate(runs)}
        charts = []
        for metric, title in {**_CHARTS, **{name: name for name in more if name not in _CHARTS}}.items():
            lines = [Line(run.name, list(run.metrics.series(metric).points()), colours[run.name]) for run in runs]
            if any(line.points for line in lines):
                axis = Axis(is_log=is_log and "loss" in metric)
                chart = draw_chart(title, lines, y=axis, smoothing=strength, has_values=True)
                charts.append(f'<figure class="rg-chart">{chart}</figure>')
        if not charts:
            return '<p class="rg-empty">Nothing logged yet; the first record comes after train.log_every steps.</p>'
        return f'<div class="rg-charts">{"".join(charts)}</div>'

    def list_steps(self, names: Sequence[str] | None) -> list[int]:
        """Steps at which one of the first two runs has drawn something."""
        return sorted({step for run in self.pick(names)[:2] for step in run_samples.list_steps(run.path)})

    def draw_samples(self, names: Sequence[str] | None, step: float) -> str:
        """The first two runs side by side, each at its step nearest to the one that is asked for."""
        runs = self.pick(names)[:2]
        sides = [side for run in runs if (side := self._draw_side(run, step))]
        if not sides:
            return (
                '<p class="rg-empty">No samples yet. A recipe with <code>validation.samples</code> draws some while it '
                "trains; Generate makes more from any checkpoint.</p>"
            )
        return f'<div class="rg-sides">{"".join(sides)}</div>'

    def _draw_side(self, run: Run, wanted: float) -> str:
        step = run_samples.nearest_step(run_samples.list_steps(run.path), wanted)
        shots = run_samples.read_later(run.path) if step is None else run_samples.read_step(run.path, step)
        if not shots:
            return ""
        title = f"{run.name} · " + ("sampled from it" if step is None else f"step {step:,}")
        cards = "".join(self._draw_card(shot) for shot in shots)
        return f'<section><h4>{safe(title)}</h4><div class="rg-clips">{cards}</div></section>'

    def _draw_card(self, shot: run_samples.Shot) -> str:
        media = player(self.context, shot.path, shot.caption)
        return f'<div class="rg-clip">{media}<div><p>{safe(shot.caption)}</p></div></div>'

    def list_recipes(self) -> list[str]:
        """Without those that runs have saved: these are gone on with in the list of runs."""
        saved = {f"{name}/{RECIPE}" for name in self.index.runs()}
        return [name for name in list_recipes(self.context) if name not in saved]

    def check(self, recipe: str | None, overrides: str) -> str:
        try:
            loaded, _ = self.launches.check(self._word(recipe), overrides or "")
        except FrameloomError as error:
            return _tell(error)
        length = f"{loaded.train.epochs} epochs" if loaded.train.steps is None else f"{loaded.train.steps:,} steps"
        return status(f"ok: {loaded.name} would train {loaded.task} for {length} in {loaded.run.folder}/{loaded.name}")

    def start(self, recipe: str | None, overrides: str) -> str:
        try:
            launch = self.launches.start(self._word(recipe), overrides or "")
        except FrameloomError as error:
            return _tell(error)
        return status(f"started {launch.run}; it appears above with its first checkpoint")

    def _word(self, recipe: str | None) -> str:
        """What the command line calls a recipe of the list."""
        if not recipe:
            raise ConfigError("Recipe: choose one from the list")
        file = find_recipe_file(self.context, recipe)
        if file.is_relative_to(SHIPPED):
            return file.relative_to(SHIPPED).with_suffix("").as_posix()
        return self.context.name_of(file)

    def act(self, act: str, key: str) -> str:
        """A button in the list: stop or resume."""
        run = self.index.get(key)
        if run is None:
            return status(f"{key}: no such run any more")
        if act == "stop":
            return status(self.launches.stop(run.name))
        # Where the run lies now, which its recipe does not know if it was moved.
        place = ["--run.folder", self.context.name_of(run.path.parent), "--name", run.path.name]
        return self.start(f"{run.name}/{RECIPE}", shlex.join([*place, "--run.resume", "latest"]))

    def draw_launches(self) -> str:
        """The last starts from here, with the ends of their logs."""
        launches = self.launches.recent()[:_SHOWN_LAUNCHES]
        parts = []
        for number, launch in enumerate(launches):
            is_open = " open" if number == 0 else ""
            state = "failed" if has_failed(launch) else "running" if launch.is_running else "stopped"
            log = self.launches.read_log(launch) or "nothing written yet"
            parts.append(
                f'<details class="rg-start"{is_open}><summary><b>{safe(launch.run)}</b> <span class="rg-{state}">'
                f'{safe(describe_end(launch))}</span> <span class="rg-soft">{safe(launch.recipe)} '
                f'{safe(" ".join(launch.overrides))}</span></summary><pre class="rg-log" tabindex="0">{safe(log)}</pre>'
                "</details>"
            )
        return "".join(parts)


def _last_written(view: RunView) -> float:
    try:
        return (view.path / "metrics.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def _tell(error: FrameloomError) -> str:
    return problem_list(error.problems if isinstance(error, ConfigError) else str(error).splitlines())
