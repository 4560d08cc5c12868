"""Layout of the Data tab: clips with thumbnails, buckets, broken files, caption editing."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradio as gr

from frameloom.studio.data.clips import add_thumb_route
from frameloom.studio.data.controller import OWN_SHAPES, DataController, Edits, describe_edits
from frameloom.studio.recipe.files import list_manifests, list_recipes
from frameloom.studio.server.context import StudioContext, on_page_load, show_errors
from frameloom.studio.server.markup import note

# One listener for the whole table: its content is replaced with every page.
_PICK_ROW = """
element.addEventListener('click', (event) => {
  const row = event.target.closest('[data-row]');
  if (!row) { return; }
  trigger('click', {row: Number(row.dataset.row)});
  // On a narrow window the player is below the table.
  if (window.innerWidth <= 640) { document.querySelector('#clip-viewer')?.scrollIntoView({behavior: 'smooth'}); }
});
"""
_NOTHING_CHOSEN = note("Choose a clip to play it and to change its caption.")


def build_data(context: StudioContext) -> None:
    """Build the tab."""
    controller = DataController(context)
    context.routes.append(lambda app: add_thumb_route(app, controller.media))
    names = list_manifests(context)
    with gr.Row(equal_height=True, elem_classes="fl-pick"):
        manifest = gr.Dropdown(
            names, value=next(iter(names), None), label="Manifest", scale=8, min_width=280, elem_id="manifest"
        )
        refresh = gr.Button("Refresh", scale=1, min_width=120)
    totals = gr.HTML(elem_id="data-totals")
    with gr.Tabs():
        with gr.Tab("Clips", id="clips"):
            target = _build_clips(controller, manifest)
        with gr.Tab("Buckets", id="buckets"):
            policy = gr.Dropdown([OWN_SHAPES, *list_recipes(context)], value=OWN_SHAPES, label="Grouped by")
            buckets = gr.HTML(elem_id="bucket-chart")
        with gr.Tab("Broken files", id="broken"):
            broken = gr.HTML(elem_id="broken-files")

    def list_again(chosen: str | None) -> Any:
        found = list_manifests(context)
        return gr.Dropdown(choices=found, value=chosen if chosen in found else next(iter(found), None))

    gr.on(None, show_errors(controller.summarize), [manifest], [totals, broken, target], show_progress="hidden")
    gr.on(None, show_errors(controller.group), [manifest, policy], [buckets], show_progress="minimal")
    refresh.click(list_again, [manifest], [manifest])


def _build_clips(controller: DataController, manifest: Any) -> Any:
    """The table with its filters, the player and the editor of captions; gives the field with the next name."""
    number, chosen, edits = gr.State(0), gr.State(None), gr.State({})
    with gr.Row(elem_classes="fl-filters"):
        text = gr.Textbox(label="Search captions and file names", max_length=200, scale=5, elem_id="clip-search")
        kind = gr.Radio(["all", "video", "image"], value="all", label="Kind", scale=3)
    with gr.Accordion("More filters", open=False):
        with gr.Row():
            bounds = [
                gr.Number(label=f"{name} {word}", value=None, minimum=0, min_width=110)
                for name in ("Frames", "Short side", "fps")
                for word in ("from", "to")
            ]
        where = gr.Textbox(
            label="Filter on any column, as in a recipe", placeholder='split == "train" and height >= 480'
        )
    with gr.Row(elem_classes="fl-split"):
        with gr.Column(scale=5, min_width=320):
            grid = gr.HTML(js_on_load=_PICK_ROW, elem_id="clip-table")
            with gr.Row(elem_classes="fl-paging"):
                back = gr.Button("Previous", size="sm", min_width=90)
                position = gr.HTML(elem_id="clip-position")
                forward = gr.Button("Next", size="sm", min_width=90)
        with gr.Column(scale=3, min_width=300, elem_classes="fl-side"):
            viewer = gr.HTML(_NOTHING_CHOSEN, elem_id="clip-viewer")
            caption = gr.Textbox(label="Caption", lines=3, max_lines=8, elem_id="clip-caption")
            keep = gr.Button("Keep this caption", size="sm")
            waiting = gr.HTML(describe_edits({}), elem_id="clip-edits")
            with gr.Row(equal_height=True, elem_classes="fl-pick"):
                target = gr.Textbox(label="New manifest, beside the old one", scale=3, min_width=180)
                write = gr.Button("Write", variant="primary", scale=1, min_width=90, elem_id="write-manifest")
            facts = gr.HTML(elem_id="clip-facts")

    def choose(name: str, changed: Edits, event: gr.EventData) -> tuple[str, str, str, int]:
        return controller.choose(name, changed, int(event.row))

    def write_manifest(name: str, changed: Edits, new: str) -> tuple[Any, Edits]:
        written = controller.write(name, changed, new)
        gr.Info(f"Written: {written}")
        return gr.Dropdown(choices=list_manifests(controller.context), value=written), {}

    filters: list[Any] = [text, kind, *bounds, where]
    shown: dict[str, Any] = {
        "inputs": [manifest, number, edits, chosen, *filters],
        "outputs": [grid, position, number],
        "show_progress": "hidden",
        "trigger_mode": "always_last",
    }
    show, first = show_errors(controller.show), show_errors(partial(controller.show, turn=None))
    quiet: dict[str, Any] = {"show_progress": "hidden"}
    nothing: tuple[Any, ...] = (_NOTHING_CHOSEN, "", "", None, {}, describe_edits({}))
    manifest.change(lambda: nothing, None, [viewer, caption, facts, chosen, edits, waiting], **quiet).then(
        first, **shown
    )
    on_page_load(first, **shown)
    gr.on([part.change for part in filters], first, **shown)
    back.click(show_errors(partial(controller.show, turn=-1)), **shown)
    forward.click(show_errors(partial(controller.show, turn=1)), **shown)
    grid.click(show_errors(choose), [manifest, edits], [viewer, caption, facts, chosen], **quiet).then(show, **shown)
    keep.click(show_errors(controller.edit), [manifest, chosen, caption, edits], [edits, waiting], **quiet).then(
        show, **shown
    )
    write.click(show_errors(write_manifest), [manifest, edits, target], [manifest, edits])
    return target
