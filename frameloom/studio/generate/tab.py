"""Layout of the Generate tab."""

from __future__ import annotations

import secrets
from typing import Any

import gradio as gr

from frameloom.core.errors import FrameloomError
from frameloom.studio.generate.controller import OWN_SIZE, Form, GenerateDesk, form_values
from frameloom.studio.generate.models import ModelFacts
from frameloom.studio.generate.requests import FORMATS, Wish
from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.markup import BUTTONS_SCRIPT, STYLE, problem_list, status

_TICK_S = 1.0
_RATIOS = (OWN_SIZE, "1:1", "16:9", "9:16", "4:3", "3:4")
_PICTURES = [".png", ".jpg", ".jpeg", ".webp"]
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def build_generate(context: StudioContext) -> None:
    """A form on one side; the queue and all that was made on the other."""
    desk = GenerateDesk(context)
    context.on_close(desk.queue.close)
    gr.HTML(f"<style>{STYLE}</style>", padding=False, apply_default_css=False)
    seen = gr.State(dict)
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            fields = _build_form(context)
            go = gr.Button("Generate", variant="primary", elem_id="generate-go")
            told = gr.HTML(elem_id="generate-told", apply_default_css=False)
        with gr.Column(scale=3, min_width=320):
            gr.Markdown("### Queue")
            queue = gr.HTML(
                desk.draw_queue, elem_id="generate-queue", js_on_load=BUTTONS_SCRIPT, apply_default_css=False
            )
            gr.Markdown("### Made so far")
            history = gr.HTML(
                desk.draw_history, elem_id="generate-history", js_on_load=BUTTONS_SCRIPT, apply_default_css=False
            )
    model, prompt = fields["model"], fields["prompt"]
    shown = [fields[name] for name in fields if name != "model"]

    def look(chosen: str | None, last: dict[str, Any]) -> list[Any]:
        return _look(desk, chosen, last or {})

    follow: dict[str, Any] = {"inputs": [model, seen], "outputs": [queue, history, model, seen], **_QUIET}

    def fill_in(chosen: str | None, words: str | None, number: float | None) -> list[Any]:
        wish = Wish(chosen or "", words or "", seed=int(number or 0))
        return _show_fields(wish, desk.models.facts(chosen or ""))

    gr.on(None, lambda: _open(desk), None, model, **_QUIET).then(
        fill_in, [model, prompt, fields["seed"]], shown, **_QUIET
    )
    model.input(fill_in, [model, prompt, fields["seed"]], shown, **_QUIET)
    fields["dice"].click(lambda: secrets.randbelow(2**31), None, fields["seed"], **_QUIET)
    fields["ratio"].input(
        lambda ratio: [gr.Number(visible=ratio == OWN_SIZE)] * 2, fields["ratio"], [fields["width"], fields["height"]]
    )
    values = [fields[name] for name in Form.__dataclass_fields__]
    gr.on([go.click, prompt.submit], lambda *sent: desk.order(Form(*sent)), values, told, **_QUIET).then(look, **follow)
    gr.Timer(_TICK_S).tick(look, trigger_mode="always_last", concurrency_limit=8, **follow)

    def act_queue(event: gr.EventData) -> Any:
        act, key = _read_click(event)
        return desk.cancel(key) if act == "cancel" else gr.skip()

    def act_history(event: gr.EventData) -> list[Any]:
        act, key = _read_click(event)
        return _act_history(desk, act, key, num_fields=len(shown))

    queue.click(act_queue, None, told, **_QUIET).then(look, **follow)
    history.click(act_history, None, [told, model, *shown], **_QUIET)


def _build_form(context: StudioContext) -> dict[str, Any]:
    limits = context.limits
    fields: dict[str, Any] = {
        "model": gr.Dropdown(label="Model", info="runs with a checkpoint, exported folders", elem_id="generate-model"),
        "prompt": gr.Textbox(
            label="Prompt", lines=3, max_lines=8, placeholder="What to show", elem_id="generate-prompt", autofocus=True
        ),
        "negative": gr.Textbox(label="Negative prompt", info="what guidance leads away from", lines=1, max_lines=4),
    }
    with gr.Row():
        picture: dict[str, Any] = {"file_types": _PICTURES, "type": "filepath", "visible": False, "height": 120}
        fields["head"] = gr.File(label="First frame", elem_id="generate-head", **picture)
        fields["tail"] = gr.File(label="Last frame", elem_id="generate-tail", **picture)
    with gr.Row(equal_height=True):
        fields["seed"] = _number("Seed", 0, least=0, elem_id="generate-seed")
        fields["dice"] = gr.Button("Random seed", size="sm", min_width=110, elem_id="generate-dice")
        fields["num_samples"] = _number("Samples", 1, least=1, most=16)
    with gr.Row():
        fields["steps"] = _number("Steps", 30, least=1, most=limits.steps, elem_id="generate-steps")
        fields["guidance"] = gr.Number(label="Guidance", value=4, minimum=0, maximum=100, step=0.1, min_width=90)
        fields["sampler"] = gr.Dropdown(label="Sampler", min_width=120)
    with gr.Row():
        fields["ratio"] = gr.Dropdown(_RATIOS, value=OWN_SIZE, label="Shape", min_width=120)
        fields["width"] = _number("Width", 64, least=1, most=limits.side_px)
        fields["height"] = _number("Height", 64, least=1, most=limits.side_px)
    with gr.Row():
        fields["frames"] = _number("Frames", 9, least=1, most=limits.frames, elem_id="generate-frames")
        fields["fps"] = gr.Number(label="Frames a second", value=8, minimum=0.1, maximum=240, min_width=90)
        fields["format"] = gr.Dropdown(FORMATS, value=FORMATS[0], label="Format", min_width=90)
    return fields


def _number(label: str, value: int, *, least: int, most: int | None = None, elem_id: str | None = None) -> Any:
    """Whole numbers. The limits are told by the server, with all else that is wrong, so none is set here."""
    info = None if most is None else f"{least} to {most:,}"
    return gr.Number(label=label, value=value, precision=0, min_width=90, elem_id=elem_id, placeholder=info)


def _open(desk: GenerateDesk) -> Any:
    names = desk.model_names()
    return gr.Dropdown(choices=names, value=names[0] if names else None)


def _look(desk: GenerateDesk, chosen: str | None, last: dict[str, Any]) -> list[Any]:
    """What has changed since the last look, and nothing else: a player that is sent again would start again."""
    tickets, changed = desk.version()
    now: dict[str, Any] = {"models": desk.model_names(), "queue": tickets, "history": changed}

    def fresh(key: str, make: Any) -> Any:
        return gr.skip() if key in last and last[key] == now[key] else make()

    return [
        fresh("queue", desk.draw_queue),
        fresh("history", desk.draw_history),
        fresh("models", lambda: _offer(now["models"], chosen)),
        now,
    ]


def _offer(names: list[str], chosen: str | None) -> Any:
    """The model that is chosen stays, unless it is gone; a page that is still opening chooses for itself."""
    is_gone = chosen is not None and chosen not in names
    return gr.Dropdown(choices=names, value=None) if is_gone else gr.Dropdown(choices=names)


def _show_fields(wish: Wish, facts: ModelFacts) -> list[Any]:
    """All fields but the model, in their order: values, and those that the model does not know hidden."""
    values = form_values(wish, facts)
    clips, image, own = facts.makes_clips, facts.takes_image, values["ratio"] == OWN_SIZE
    takes_negative = bool(facts.family)
    return [
        gr.Textbox(value=values["prompt"]),
        gr.Textbox(value=values["negative"], visible=takes_negative),
        gr.File(value=values["head"] if image else None, visible=image),
        gr.File(value=values["tail"] if image and clips else None, visible=image and clips),
        gr.Number(value=values["seed"]),
        gr.skip(),
        gr.Number(value=values["num_samples"]),
        gr.Number(value=values["steps"]),
        gr.Number(value=values["guidance"]),
        gr.Dropdown(choices=list(facts.samplers), value=values["sampler"], visible=len(facts.samplers) > 1),
        gr.Dropdown(value=values["ratio"]),
        gr.Number(value=values["width"], visible=own),
        gr.Number(value=values["height"], visible=own),
        gr.Number(value=values["frames"], visible=clips, label=f"Frames ({facts.frame_rule})"),
        gr.Number(value=values["fps"], visible=clips),
        gr.Dropdown(value=values["format"], visible=clips),
    ]


def _read_click(event: gr.EventData) -> tuple[str, str]:
    """What a button of ours said; anything else is nothing."""
    data = event._data if isinstance(event._data, dict) else {}
    act, key = data.get("act"), data.get("key")
    return (act, key) if isinstance(act, str) and isinstance(key, str) else ("", "")


def _act_history(desk: GenerateDesk, act: str, key: str, *, num_fields: int) -> list[Any]:
    unchanged = [gr.skip()] * (num_fields + 1)
    if act == "convert":
        return [desk.convert(key), *unchanged]
    if act != "use":
        return [gr.skip(), *unchanged]
    try:
        wish = desk.read_settings(key)
    except FrameloomError as error:
        return [problem_list([str(error)]), *unchanged]
    if desk.models.get(wish.model) is None:
        return [problem_list([f"its model {wish.model} is not below this folder any more; choose another"]), *unchanged]
    return [
        status("Filled in; change what you like and press Generate."),
        gr.Dropdown(value=wish.model),
        *_show_fields(wish, desk.models.facts(wish.model)),
    ]
