"""Layout of the Runs tab."""

from __future__ import annotations

from typing import Any

import gradio as gr

from frameloom.studio.runs.controller import MAX_OVERLAID, RunsDesk
from frameloom.studio.runs.samples import slider_stride
from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.markup import BUTTONS_SCRIPT, STYLE

_TICK_S = 2.0
_SMOOTHING = 0.6


def build_runs(context: StudioContext) -> None:
    """The list, the curves, the samples and the starting of runs; all of it follows the files by itself."""
    desk = RunsDesk(context)
    context.on_close(desk.launches.close)
    gr.HTML(f"<style>{STYLE}</style>", padding=False, apply_default_css=False)
    seen = gr.State(dict)
    table = gr.HTML(desk.draw_table, elem_id="runs-table", js_on_load=BUTTONS_SCRIPT, apply_default_css=False)
    told = gr.HTML(elem_id="runs-told", apply_default_css=False)
    with gr.Row():
        shown = gr.Dropdown(
            label="Runs shown",
            info="several are drawn over one another; the first two have their samples side by side",
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
    recipe, overrides, check, start, answer, logs = _build_start(desk)

    def look(
        names: list[str] | None, others: list[str] | None, smoothing: float, logs_scale: bool, at: float, last: Any
    ) -> list[Any]:
        return _look(desk, names, others or [], smoothing, logs_scale, at, last)

    inputs = [shown, more, strength, is_log, step, seen]
    outputs = [table, shown, more, charts, step, samples, recipe, logs, seen]
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    gr.on(None, lambda: _open(desk), None, [shown, recipe], **quiet).then(look, inputs, outputs, **quiet)
    timer = gr.Timer(_TICK_S)
    gr.on(
        [timer.tick, shown.input, more.input, strength.release, is_log.input, step.release],
        look,
        inputs,
        outputs,
        trigger_mode="always_last",
        concurrency_limit=8,
        **quiet,
    )
    check.click(desk.check, [recipe, overrides], answer, api_visibility="private")
    start.click(desk.start, [recipe, overrides], answer, api_visibility="private").then(look, inputs, outputs, **quiet)

    def act(event: gr.EventData) -> Any:
        data = event._data if isinstance(event._data, dict) else {}
        name, key = data.get("act"), data.get("key")
        if name not in ("stop", "resume") or not isinstance(key, str):
            return gr.skip()
        return desk.act(name, key)

    table.click(act, None, told, **quiet).then(look, inputs, outputs, **quiet)


def _build_start(desk: RunsDesk) -> tuple[Any, ...]:
    gr.Markdown("### Start a run")
    with gr.Row():
        recipe = gr.Dropdown(
            label="Recipe", info="of this folder, or one that comes with Frameloom", elem_id="runs-recipe", scale=2
        )
        overrides = gr.Textbox(
            label="Changes",
            info="any keys, as on the command line",
            placeholder="--name my-run --optim.lr 1e-4 --train.steps 2000",
            lines=2,
            elem_id="runs-overrides",
            scale=3,
        )
    with gr.Row():
        check = gr.Button("Check", elem_id="runs-check")
        start = gr.Button("Start", variant="primary", elem_id="runs-start")
    answer = gr.HTML(elem_id="runs-answer", apply_default_css=False)
    logs = gr.HTML(desk.draw_launches, elem_id="runs-logs", autoscroll=True, apply_default_css=False)
    return recipe, overrides, check, start, answer, logs


def _open(desk: RunsDesk) -> list[Any]:
    """A page that has just been opened: what there is to choose from."""
    recipes = desk.list_recipes()
    return [
        gr.Dropdown(choices=desk.names(), value=desk.choose()),
        gr.Dropdown(choices=recipes, value=recipes[0] if recipes else None),
    ]


def _look(
    desk: RunsDesk,
    names: list[str] | None,
    more: list[str],
    strength: float,
    is_log: bool,
    at: float,
    last: dict[str, Any] | None,
) -> list[Any]:
    """What has changed since the last look, and nothing else: a player that is sent again would start again."""
    last = last or {}
    steps, others = desk.list_steps(names), desk.other_metrics(names)
    was_at_end = not last.get("steps") or at >= last["steps"][-1]
    place = steps[-1] if steps and was_at_end else at
    now: dict[str, Any] = {
        "table": desk.draw_table(),
        "names": desk.names(),
        "others": others,
        "charts": [desk.version(names), more, strength, is_log],
        "steps": steps,
        "most": max([1, last.get("most", 1), *steps]),
        "samples": [names, steps, place],
        "recipes": desk.list_recipes(),
        "logs": desk.draw_launches(),
    }

    def fresh(key: str, make: Any) -> Any:
        return gr.skip() if key in last and last[key] == now[key] else make()

    return [
        fresh("table", lambda: now["table"]),
        fresh("names", lambda: gr.Dropdown(choices=now["names"])),
        fresh("others", lambda: gr.Dropdown(choices=others)),
        fresh("charts", lambda: desk.draw_charts(names, strength=strength, is_log=is_log, more=more)),
        fresh("steps", lambda: _slide(steps, place, now["most"])),
        fresh("samples", lambda: desk.draw_samples(names, place)),
        fresh("recipes", lambda: gr.Dropdown(choices=now["recipes"])),
        fresh("logs", lambda: now["logs"]),
        now,
    ]


def _slide(steps: list[int], place: float, most: float) -> Any:
    """From 0, and never shorter than it was: a look that is still on its way would be refused for its old place."""
    if len(steps) < 2:
        return gr.Slider(visible=False)
    return gr.Slider(visible=True, maximum=most, step=slider_stride(steps), value=place, label="Step")
