"""Layout of the Runs tab."""

from __future__ import annotations

from math import gcd
from typing import Any

import gradio as gr

from frameloom.studio.runs.controller import MAX_OVERLAID, RunsController
from frameloom.studio.server.context import QUIET, StudioContext, read_click, show_problems, updates
from frameloom.studio.server.markup import BUTTONS_SCRIPT

_TICK_S = 2.0
_SMOOTHING = 0.6


def build_runs(context: StudioContext) -> None:
    """List of runs, curves, samples and a form to start a run; refreshed from the files."""
    controller = RunsController(context)
    context.closers.callback(controller.launches.close)
    seen = gr.State(dict)
    table = gr.HTML(controller.draw_table, elem_id="runs-table", js_on_load=BUTTONS_SCRIPT, apply_default_css=False)
    acted = gr.HTML(elem_id="runs-acted", apply_default_css=False)
    with gr.Row():
        shown = gr.Dropdown(
            label="Runs shown",
            info="curves are overlaid; samples of the first two are shown side by side",
            multiselect=True,
            max_choices=MAX_OVERLAID,
            elem_id="runs-shown",
            scale=3,
        )
        more = gr.Dropdown(label="More curves", multiselect=True, max_choices=12, elem_id="runs-more", scale=2)
        strength = gr.Slider(0, 0.99, value=_SMOOTHING, step=0.01, label="Smoothing", elem_id="runs-smooth", scale=1)
        is_log = gr.Checkbox(label="Log scale of losses", elem_id="runs-log", scale=1)
    charts = gr.HTML(elem_id="runs-charts", apply_default_css=False)
    gr.Markdown("### Samples")
    step = gr.Slider(0, 1, value=0, step=1, label="Step", visible=False, elem_id="runs-step")
    samples = gr.HTML(elem_id="runs-samples", apply_default_css=False)
    gr.Markdown("### Start a run")
    with gr.Row():
        recipe = gr.Dropdown(
            label="Recipe", info="of this folder, or one that comes with Frameloom", elem_id="runs-recipe", scale=2
        )
        overrides = gr.Textbox(
            label="Overrides",
            info="recipe keys, as on the command line",
            placeholder="--name my-run --optim.lr 1e-4 --train.steps 2000",
            lines=2,
            elem_id="runs-overrides",
            scale=3,
        )
    with gr.Row():
        check = gr.Button("Check", elem_id="runs-check")
        start = gr.Button("Start", variant="primary", elem_id="runs-start")
    answer = gr.HTML(elem_id="runs-answer", apply_default_css=False)
    logs = gr.HTML(controller.draw_launches, elem_id="runs-logs", autoscroll=True, apply_default_css=False)

    def open_page() -> list[Any]:
        recipes = controller.list_recipes()
        return [
            gr.Dropdown(choices=[view.name for view in controller.views()], value=controller.choose()),
            gr.Dropdown(choices=recipes, value=recipes[0] if recipes else None),
        ]

    def refresh(*values: Any) -> list[Any]:
        return _refresh(controller, *values)

    def act(event: gr.EventData) -> Any:
        name, key = read_click(event)
        return show_problems(controller.act)(name, key) if name in ("stop", "resume") else gr.skip()

    follow: dict[str, Any] = {
        "inputs": [shown, more, strength, is_log, step, seen],
        "outputs": [table, shown, more, charts, step, samples, recipe, logs, seen],
        **QUIET,
    }
    gr.on(None, open_page, None, [shown, recipe], **QUIET).then(refresh, **follow)
    events = [gr.Timer(_TICK_S).tick, shown.input, more.input, strength.release, is_log.input, step.release]
    gr.on(events, refresh, trigger_mode="always_last", concurrency_limit=8, **follow)
    check.click(show_problems(controller.check), [recipe, overrides], answer, api_visibility="private")
    start.click(show_problems(controller.start), [recipe, overrides], answer, api_visibility="private").then(
        refresh, **follow
    )
    table.click(act, None, acted, **QUIET).then(refresh, **follow)


def _refresh(
    controller: RunsController,
    names: list[str] | None,
    more: list[str] | None,
    strength: float,
    is_log: bool,
    at: float,
    last: dict[str, Any] | None,
) -> list[Any]:
    """Updates of what has changed since the last refresh."""
    last, more = last or {}, more or []
    steps, others = controller.list_steps(names), controller.other_metrics(names)
    was_at_end = not last.get("steps") or at >= last["steps"][-1]
    step = steps[-1] if steps and was_at_end else at
    drawn, logs = controller.draw_table(), controller.draw_launches()
    runs, recipes = [view.name for view in controller.views()], controller.list_recipes()
    longest = max([1, last.get("longest", 1), *steps])
    now: dict[str, Any] = {
        "table": drawn,
        "names": runs,
        "others": others,
        "charts": [[[run.name, run.metrics.version] for run in controller.pick(names)], more, strength, is_log],
        "steps": steps,
        "samples": [names, steps, step],
        "recipes": recipes,
        "logs": logs,
        "longest": longest,
    }
    makers = {
        "table": lambda: drawn,
        "names": lambda: gr.Dropdown(choices=runs),
        "others": lambda: gr.Dropdown(choices=others),
        "charts": lambda: controller.draw_charts(names, strength=strength, is_log=is_log, more=more),
        "steps": lambda: _slide(steps, step, longest),
        "samples": lambda: controller.draw_samples(names, step),
        "recipes": lambda: gr.Dropdown(choices=recipes),
        "logs": lambda: logs,
    }
    return [*updates(last, now, makers), now]


def _slide(steps: list[int], step: float, longest: float) -> Any:
    """From 0 with the largest stride that reaches every step. It never becomes shorter: Gradio refuses a pending event
    with a value beyond the maximum.
    """
    if len(steps) < 2:
        return gr.Slider(visible=False)
    return gr.Slider(visible=True, maximum=longest, step=gcd(*steps) or 1, value=step, label="Step")
