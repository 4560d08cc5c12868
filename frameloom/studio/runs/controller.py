"""Event handlers of the Runs tab: list of runs, curves, samples by step, launches with their logs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from frameloom.config.loading.recipe import SHIPPED
from frameloom.core.errors import ConfigError
from frameloom.evaluate.charts import COLOURS, Axis, Line, draw_chart, format_value
from frameloom.studio.recipe.files import find_recipe_file, list_recipes
from frameloom.studio.runs.launches import Launches
from frameloom.studio.runs.run_list import RECIPE, RUNNING, STOPPED, Run, RunView, find_runs
from frameloom.studio.runs.samples import list_steps, read_step
from frameloom.studio.server.context import Listing, StudioContext
from frameloom.studio.server.markup import badge, bar, button, format_time, note, player, safe

_CHARTS = {
    "train/loss": "Training loss",
    "validation/validation_loss": "Validation loss",
    "validation/psnr_db": "Validation PSNR, dB",
    "validation/ssim": "Validation SSIM",
    "train/lr": "Learning rate",
    "train/tokens_per_s": "Tokens per second",
}
# Values that only count up are not offered as curves.
_NOT_OFFERED = ("train/epoch", *_CHARTS)
_SHOWN_LAUNCHES = 5
_REPORT = "report.html"
MAX_OVERLAID = len(COLOURS)


class RunsController:
    """Everything behind the tab; one for all pages of a studio."""

    def __init__(self, context: StudioContext) -> None:
        self.context = context
        self.launches = Launches(context.root, context.root / "studio" / "launches")
        self._known: dict[str, Run] = {}
        self.runs = Listing(self._find_runs)

    def _find_runs(self) -> dict[str, Run]:
        names, root = find_runs(self.context.root), self.context.root
        self._known = {name: self._known.get(name) or Run(name, root / name) for name in names}
        return self._known

    def views(self) -> list[RunView]:
        """Running ones first, then by name."""
        views = [run.view(self.launches.find_failure(name)) for name, run in self.runs.all().items()]
        return sorted(views, key=lambda view: (view.state != RUNNING, view.name))

    def choose(self) -> list[str]:
        """Default selection: the runs that are running, else the one that was written to last."""
        views = self.views()
        running = [view.name for view in views if view.state == RUNNING]
        written = {file.stat().st_mtime: view.name for view in views if (file := view.path / "metrics.jsonl").is_file()}
        return running[:MAX_OVERLAID] or ([written[max(written)]] if written else [view.name for view in views[:1]])

    def pick(self, names: Sequence[str] | None) -> list[Run]:
        """Runs by names that a page sent, with their latest metrics."""
        known = self.runs.all()
        runs = [known[name] for name in list(names or ())[:MAX_OVERLAID] if name in known]
        for run in runs:
            run.metrics.read()
        return runs

    def draw_table(self) -> str:
        views = self.views()
        if not views:
            return (
                '<p class="rg-empty">No runs in this folder yet. Start one below, or train from a terminal: '
                "<code>frameloom train my.yaml</code>. New runs appear automatically.</p>"
            )
        rows = []
        for view in views:
            total = view.num_steps
            step = f"{view.step:,}" + ("" if total is None else f" / {total:,} {bar(view.step, total)}")
            loss = "" if view.loss is None else format_value(view.loss)
            left = "" if view.seconds_left is None else format_time(view.seconds_left)
            message = f'<br><small class="rg-message">{safe(view.message)}</small>' if view.message else ""
            rows.append(
                f'<tr><td class="rg-name">{safe(view.name)}<br><small>{safe(view.about)}</small></td>'
                f'<td>{badge(view.state)}{message}</td><td class="rg-step" data-label="step">{step}</td>'
                f'<td data-label="loss">{loss}</td><td data-label="left">{left}</td>'
                f'<td class="rg-acts">{self._draw_acts(view)}</td></tr>'
            )
        head = "".join(f"<th>{name}</th>" for name in ("Run", "State", "Step", "Loss", "Time left", "<span></span>"))
        return f'<div class="rg-scroll"><table class="rg-table"><tr>{head}</tr>{"".join(rows)}</table></div>'

    def _draw_acts(self, view: RunView) -> str:
        """A link to the report of the run or of the folder around it, as in the demo; and a button."""
        parts = []
        for folder in (view.path, view.path.parent):
            file = folder / _REPORT
            if folder.is_relative_to(self.context.root) and file.is_file() and not file.is_symlink():
                url = safe(self.context.file_url(file))
                parts = [f'<a class="rg-link" href="{url}" target="_blank" rel="noopener">Report</a>']
                break
        if view.state == RUNNING:
            is_stopping = self.launches.is_stopping(view.name)
            hint = "end at once, without saving" if is_stopping else "finish the step, save and end"
            parts.append(button("stop", view.name, "End now" if is_stopping else "Stop", hint=f"{view.name}: {hint}"))
        elif view.state == STOPPED or view.message:
            hint = f"{view.name}: continue from the last checkpoint"
            parts.append(button("resume", view.name, "Resume", hint=hint))
        return "".join(parts)

    def other_metrics(self, names: Sequence[str] | None) -> list[str]:
        found = {name for run in self.pick(names) for name in run.metrics.names()}
        return sorted(name for name in found if name not in _NOT_OFFERED and not name.endswith("_ci95"))

    def draw_charts(
        self, names: Sequence[str] | None, *, strength: float, is_log: bool, more: Sequence[str] = ()
    ) -> str:
        """The usual curves of the chosen runs, overlaid, then the other chosen metrics."""
        runs = self.pick(names)
        if not runs:
            return '<p class="rg-empty">Choose one or more runs to see their curves.</p>'
        charts = []
        for metric, title in {**_CHARTS, **{name: name for name in more if name not in _CHARTS}}.items():
            lines = [Line(run.name, run.metrics.points(metric), COLOURS[number]) for number, run in enumerate(runs)]
            if any(line.points for line in lines):
                axis = Axis(is_log=is_log and "loss" in metric)
                chart = draw_chart(title, lines, y=axis, smoothing=strength, has_values=True)
                charts.append(f'<figure class="rg-chart">{chart}</figure>')
        if not charts:
            return '<p class="rg-empty">Nothing logged yet; the first record comes after train.log_every steps.</p>'
        return f'<div class="rg-charts">{"".join(charts)}</div>'

    def list_steps(self, names: Sequence[str] | None) -> list[int]:
        """Steps at which one of the first two runs has drawn something."""
        return sorted({step for run in self.pick(names)[:2] for step in list_steps(run.path)})

    def draw_samples(self, names: Sequence[str] | None, wanted: float) -> str:
        """The first two runs side by side, each at its step nearest to the wanted one."""
        sides = []
        for run in self.pick(names)[:2]:
            # Two runs that drew at different steps are compared at their nearest ones.
            step = min(list_steps(run.path), key=lambda step: (abs(step - wanted), step), default=None)
            shots = read_step(run.path, step)
            cards = "".join(
                f'<div class="rg-clip">{player(self.context, shot.path, shot.caption)}<div><p>{safe(shot.caption)}</p>'
                "</div></div>"
                for shot in shots
            )
            title = f"{run.name} · " + ("sampled from it" if step is None else f"step {step:,}")
            if shots:
                sides.append(f'<section><h4>{safe(title)}</h4><div class="rg-clips">{cards}</div></section>')
        if not sides:
            return (
                '<p class="rg-empty">No samples yet. A recipe with <code>validation.samples</code> draws some while it '
                "trains; Generate makes more from any checkpoint.</p>"
            )
        return f'<div class="rg-sides">{"".join(sides)}</div>'

    def list_recipes(self) -> list[str]:
        """Without those that runs have saved: these are resumed in the list of runs."""
        saved = {f"{name}/{RECIPE}" for name in self.runs.all()}
        return [name for name in list_recipes(self.context) if name not in saved]

    def check(self, recipe: str | None, overrides: str) -> str:
        loaded, run, _ = self.launches.check(self._recipe_argument(recipe), overrides or "")
        length = f"{loaded.train.epochs} epochs" if loaded.train.steps is None else f"{loaded.train.steps:,} steps"
        return note(f"ok: {loaded.name} would train {loaded.task} for {length} in {run}", kind="status")

    def start(self, recipe: str | None, overrides: str) -> str:
        launch = self.launches.start(self._recipe_argument(recipe), overrides or "")
        return note(f"started {launch.run}; it appears above with its first checkpoint", kind="status")

    def _recipe_argument(self, recipe: str | None) -> str:
        """What the command line calls a recipe of the list."""
        if not recipe:
            raise ConfigError("Recipe: choose one from the list")
        file = find_recipe_file(self.context, recipe)
        if file.is_relative_to(SHIPPED):
            return file.relative_to(SHIPPED).with_suffix("").as_posix()
        return self.context.name_of(file)

    def act(self, act: str, key: str) -> str:
        """A button in the list: stop or resume."""
        run = self.runs.all().get(key)
        if run is None:
            return note(f"{key}: no such run; it was moved or deleted", kind="status")
        if act == "stop":
            return note(self.launches.stop(run.name), kind="status")
        # The run may have been moved since its recipe was saved.
        folder = ["--run.folder", self.context.name_of(run.path.parent), "--name", run.path.name]
        return self.start(f"{run.name}/{RECIPE}", shlex.join([*folder, "--run.resume", "latest"]))

    def draw_launches(self) -> str:
        """The latest launches, with the ends of their logs."""
        parts = []
        for number, launch in enumerate(self.launches.recent()[:_SHOWN_LAUNCHES]):
            log = self.launches.read_log(launch) or "nothing written yet"
            parts.append(
                f'<details class="rg-start"{"" if number else " open"}><summary><b>{safe(launch.run)}</b> '
                f'<span class="rg-{launch.state}">{safe(launch.describe_end())}</span> '
                f'<span class="rg-soft">{safe(launch.recipe)} {safe(" ".join(launch.overrides))}</span></summary>'
                f'<pre class="rg-log" tabindex="0">{safe(log)}</pre></details>'
            )
        return "".join(parts)
