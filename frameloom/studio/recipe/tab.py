"""Layout of the Recipe tab: a form and the text beside it, checked while typing, with an estimate of the cost."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradio as gr

from frameloom.config.loading.schema_tree import field_at
from frameloom.core.errors import ConfigError
from frameloom.studio.recipe.controller import Checked, RecipeController, describe_check, show_plan
from frameloom.studio.recipe.files import SHIPPED_MARK, list_manifests, list_recipes
from frameloom.studio.recipe.form import FormField, sizes_for
from frameloom.studio.server.context import StudioContext, on_page_load, show_errors

_DEVICES = ("h100", "h200", "a100", "4090", "910b", "cpu")
_MAX_DEVICES = 65_536
_TITLE_CHARS = 64
_LATEST: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}


def build_recipe(context: StudioContext) -> None:
    """Build the tab."""
    controller = RecipeController(context)
    names = list_recipes(context)
    # A file of the user, or the smallest of the shipped ones.
    demo = next((name for name in names if name.endswith("shapes/demo")), None)
    first = names[0] if names and not names[0].startswith(SHIPPED_MARK) else demo
    with gr.Row(equal_height=True, elem_classes="fl-pick"):
        pick = gr.Dropdown(names, value=first, label="Recipe", scale=8, min_width=280, elem_id="recipe-pick")
        refresh = gr.Button("Refresh", scale=1, min_width=120)
    widgets: list[tuple[FormField, Any]] = []
    with gr.Row(elem_classes="fl-split"):
        with gr.Column(scale=4, min_width=320):
            for section, fields in controller.fields.items():
                about = field_at((section,)) if section else None
                title = (f"{section}: {about.description}" if about else "The run").split(";")[0]
                title = title if len(title) <= _TITLE_CHARS else f"{title[: _TITLE_CHARS - 1].rstrip()}…"
                with gr.Accordion(title, open=not section), gr.Row(elem_classes="fl-fields"):
                    widgets += [(field, _build_widget(field, context)) for field in fields]
        with gr.Column(scale=5, min_width=320, elem_classes="fl-side"):
            text = gr.Code(
                language="yaml", label="The recipe", lines=14, max_lines=28, elem_id="recipe-text", interactive=True
            )
            answer = gr.HTML(elem_id="recipe-answer")
            with gr.Row(equal_height=True, elem_classes="fl-pick"):
                name = gr.Textbox(label="Save as a new file", scale=4, min_width=180, elem_id="recipe-name")
                save = gr.Button("Save", variant="primary", scale=1, min_width=90, elem_id="recipe-save")
    _build_plan(controller, text, name)

    def check(written: str, target: str) -> list[Any]:
        found = controller.check(written or "", target or "")
        return [describe_check(found), *_fill(found, [field for field, _ in widgets])]

    def open_picked(chosen: str | None) -> tuple[str, str]:
        return controller.open(chosen) if chosen else ("name: my-run\n", controller.free_name("my-run.yaml"))

    def write_field(field: FormField, written: str, target: str, shown: Any) -> list[Any]:
        changed = controller.set_field(written or "", target or "", field.path, field.read(shown))
        found = controller.check(written if changed is None else changed, target or "")
        return [gr.skip() if changed is None else changed, describe_check(found), *_offer_sizes(controller, found)]

    def write(written: str, target: str) -> Any:
        saved = controller.save(written or "", target or "")
        gr.Info(f"Saved: {saved}")
        return gr.Dropdown(choices=list_recipes(context), value=saved)

    everything: dict[str, Any] = {
        "inputs": [text, name],
        "outputs": [answer, *(widget for _, widget in widgets)],
        **_LATEST,
    }
    for opened in (pick.change, on_page_load):
        opened(show_errors(open_picked), [pick], [text, name], show_progress="hidden").then(check, **everything)
    # Only typing in the text fills the form: an answer that comes late must not undo what is typed in a field.
    text.input(check, **everything)
    name.input(lambda written, target: check(written, target)[0], [text, name], answer)
    sizes = [widget for field, widget in widgets if field.follows]
    for field, widget in widgets:
        # Text that is pasted, or filled in by the browser, raises no event until the field is left.
        events = [widget.input, *([widget.blur, widget.submit] if isinstance(widget, gr.Textbox) else [])]
        handler = show_errors(partial(write_field, field))
        gr.on(events, handler, [text, name, widget], [text, answer, *sizes], **_LATEST)
    refresh.click(lambda: gr.Dropdown(choices=list_recipes(context)), None, pick)
    save.click(show_errors(write), [text, name], [pick])


def _build_widget(field: FormField, context: StudioContext) -> Any:
    shown: dict[str, Any] = {"label": field.path[-1], "info": field.info, "elem_id": f"field-{'-'.join(field.path)}"}
    if field.is_switch:
        return gr.Checkbox(**shown, min_width=200)
    if field.choices:
        choices = list_manifests(context) if field.path == ("data", "manifest") else list(field.choices)
        return gr.Dropdown(choices, value=None, allow_custom_value=field.is_open, min_width=200, **shown)
    return gr.Textbox(max_lines=1, max_length=1000, min_width=200, **shown)


def _build_plan(controller: RecipeController, text: Any, name: Any) -> None:
    gr.HTML('<h2 class="fl-title">Memory and time</h2>')
    with gr.Row(equal_height=True, elem_classes="fl-pick"):
        device = gr.Dropdown(list(_DEVICES), value="h100", label="Device", min_width=140)
        count = gr.Number(1, label="How many", precision=0, minimum=1, maximum=_MAX_DEVICES, min_width=120)
        memory = gr.Textbox(label="Memory of each", placeholder="as the device has, e.g. 80GB", min_width=180)
        estimate = gr.Button("Estimate cost", min_width=140, elem_id="plan-button")
    result = gr.HTML(elem_id="plan-result")

    def plan(written: str, target: str, kind: str, num_devices: int, size: str) -> str:
        found = controller.check(written, target)
        if found.recipe is None:
            raise ConfigError([f"no estimate yet, {len(found.problems)} to fix first:", *found.problems[:3]])
        return show_plan(controller.context, found.recipe, kind, int(num_devices), size or "")

    estimate.click(show_errors(plan), [text, name, device, count, memory], result, concurrency_limit=1)


def _fill(found: Checked, fields: list[FormField]) -> list[Any]:
    """What each field shows for the recipe; the form stays as it is while the text cannot be read."""
    if found.values is None:
        return [gr.skip()] * len(fields)
    updates = []
    for field in fields:
        sizes, shown = sizes_for(field, found.values), field.show(found.values[field.path])
        updates.append(shown if sizes is None else gr.Dropdown(choices=sizes, value=shown))
    return updates


def _offer_sizes(controller: RecipeController, found: Checked) -> list[Any]:
    """The sizes to choose from follow the family and the autoencoder."""
    fields = [field for group in controller.fields.values() for field in group if field.follows]
    if found.values is None:
        return [gr.skip()] * len(fields)
    return [gr.Dropdown(choices=sizes_for(field, found.values)) for field in fields]
