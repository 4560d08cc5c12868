"""Layout of the Generate tab."""

from __future__ import annotations

import secrets
from typing import Any

import gradio as gr

from frameloom.config.loading.schema_tree import field_kind
from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import FrameloomError
from frameloom.studio.generate.controller import GenerateController, form_values
from frameloom.studio.generate.models import StudioModel
from frameloom.studio.generate.requests import FIELDS, FORMATS, OWN_SIZE, ROWS, bounds_of, label_of
from frameloom.studio.server.context import (
    QUIET,
    Limits,
    StudioContext,
    read_click,
    show_problems,
    updates,
)
from frameloom.studio.server.markup import BUTTONS_SCRIPT, note, problem_list

_TICK_S = 1.0
_RATIOS = (OWN_SIZE, "1:1", "16:9", "9:16", "4:3", "3:4")
_PICTURES = [".png", ".jpg", ".jpeg", ".webp"]
_CHOICES = {"ratio": _RATIOS, "format": FORMATS, "sampler": None}


def build_generate(context: StudioContext) -> None:
    """A form on one side; the queue and earlier results on the other."""
    controller = GenerateController(context)
    context.closers.callback(controller.queue.close)
    seen = gr.State(dict)
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            model = gr.Dropdown(
                label="Model", info="runs with a checkpoint, exported folders", elem_id="generate-model"
            )
            fields, dice = _build_form(context.limits)
            go = gr.Button("Generate", variant="primary", elem_id="generate-go")
            answer = gr.HTML(elem_id="generate-answer", apply_default_css=False)
        with gr.Column(scale=3, min_width=320):
            gr.Markdown("### Queue")
            drawn: dict[str, Any] = {"js_on_load": BUTTONS_SCRIPT, "apply_default_css": False}
            queue = gr.HTML(controller.draw_queue, elem_id="generate-queue", **drawn)
            gr.Markdown("### Results")
            history = gr.HTML(controller.draw_history, elem_id="generate-history", **drawn)
    prompt, shown = fields["prompt"], list(fields.values())

    def refresh(chosen: str | None, last: dict[str, Any] | None) -> list[Any]:
        (jobs, changed), names = controller.version(), list(controller.models.all())
        # The chosen model stays, unless it is gone; a page that is still opening chooses for itself.
        is_gone = chosen is not None and chosen not in names
        now: dict[str, Any] = {"queue": jobs, "history": changed, "models": names}
        makers = {
            "queue": controller.draw_queue,
            "history": controller.draw_history,
            "models": lambda: gr.Dropdown(choices=names, value=None) if is_gone else gr.Dropdown(choices=names),
        }
        return [*updates(last, now, makers), now]

    def open_page() -> Any:
        names = list(controller.models.all())
        return gr.Dropdown(choices=names, value=names[0] if names else None)

    def fill_in(chosen: str | None, text: str | None, seed: float | None) -> list[Any]:
        found = controller.models.all().get(chosen or "", StudioModel())
        request = SampleRequest(prompt=text or "", seed=int(seed or 0))
        return _show_fields(form_values(request, found), found)

    def submit(chosen: str | None, *values: Any) -> str:
        return controller.submit(chosen, dict(zip(FIELDS, values, strict=True)))

    def act_queue(event: gr.EventData) -> Any:
        act, key = read_click(event)
        if act != "cancel":
            return gr.skip()
        return note(controller.queue.cancel(int(key)) if key.isdecimal() else "no such job", kind="status")

    def act_history(event: gr.EventData) -> list[Any]:
        act, key = read_click(event)
        unchanged = [gr.skip()] * (len(shown) + 1)
        try:
            if act == "convert":
                return [controller.convert(key), *unchanged]
            if act == "use":
                found, values = controller.read_settings(key)
                filled = note("Filled in; change what you like and press Generate.", kind="status")
                return [filled, gr.Dropdown(value=found.name), *_show_fields(values, found)]
        except FrameloomError as error:
            return [problem_list(error), *unchanged]
        return [gr.skip(), *unchanged]

    follow: dict[str, Any] = {"inputs": [model, seen], "outputs": [queue, history, model, seen], **QUIET}
    gr.on(None, open_page, None, model, **QUIET).then(fill_in, [model, prompt, fields["seed"]], shown, **QUIET)
    model.input(fill_in, [model, prompt, fields["seed"]], shown, **QUIET)
    dice.click(lambda: secrets.randbelow(2**31), None, fields["seed"], **QUIET)
    fields["ratio"].input(
        lambda ratio: [gr.Number(visible=ratio == OWN_SIZE)] * 2, fields["ratio"], [fields["width"], fields["height"]]
    )
    gr.on([go.click, prompt.submit], show_problems(submit), [model, *shown], answer, **QUIET).then(refresh, **follow)
    gr.Timer(_TICK_S).tick(refresh, trigger_mode="always_last", concurrency_limit=8, **follow)
    queue.click(act_queue, None, answer, **QUIET).then(refresh, **follow)
    history.click(act_history, None, [answer, model, *shown], **QUIET)


def _build_form(limits: Limits) -> tuple[dict[str, Any], Any]:
    """A widget for each field in rows, and the button of the seed."""
    fields: dict[str, Any] = {}
    for row in ROWS:
        with gr.Row(equal_height=True):
            for name in row:
                fields[name] = _build_widget(name, limits)
            if "seed" in row:
                dice = gr.Button("Random seed", size="sm", min_width=110, elem_id="generate-dice")
    return fields, dice


def _build_widget(name: str, limits: Limits) -> Any:
    """Numbers have no bounds of their own: the server reports them, with everything else that is wrong."""
    shown: dict[str, Any] = {"label": label_of(name), "elem_id": f"generate-{name}"}
    if name == "prompt":
        return gr.Textbox(lines=3, max_lines=8, placeholder="What to show", autofocus=True, **shown)
    if name == "negative_prompt":
        return gr.Textbox(info="what not to show", lines=1, max_lines=4, **shown)
    if name in ("image", "last_image"):
        return gr.File(file_types=_PICTURES, type="filepath", visible=False, height=120, **shown)
    if name in _CHOICES:
        return gr.Dropdown(_CHOICES[name], min_width=90, **shown)
    is_whole = name == "num" or field_kind(SampleRequest.model_fields[name]).accepts(int)
    default = 1 if name == "num" else SampleRequest.model_fields[name].default
    least, most = bounds_of(limits)[name]
    info = f"{least:,g} to {most:,g}" if name != "seed" else None
    number: dict[str, Any] = {"precision": 0} if is_whole else {"step": 0.1}
    return gr.Number(value=default, min_width=90, placeholder=info, **number, **shown)


def _show_fields(values: dict[str, Any], model: StudioModel) -> list[Any]:
    """Updates of all fields, in their order: values, and those that the model does not have hidden."""
    of_clips = dict.fromkeys(("frames", "fps", "format"), model.makes_clips)
    is_own = values["ratio"] == OWN_SIZE
    visible = {
        **of_clips,
        **{"negative_prompt": bool(model.family), "image": model.takes_image},
        **{"last_image": model.takes_image and model.makes_clips, "sampler": len(model.samplers) > 1},
        **{"width": is_own, "height": is_own},
    }
    more: dict[str, dict[str, Any]] = {
        "sampler": {"choices": list(model.samplers)},
        "frames": {"label": f"Frames ({model.frame_rule})"},
    }
    return [gr.update(value=values[name], visible=visible.get(name, True), **more.get(name, {})) for name in FIELDS]
