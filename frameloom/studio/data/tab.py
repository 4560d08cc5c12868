"""Layout of the Data tab: clips with thumbnails, buckets, broken files, caption editing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from frameloom.studio.data.clip_table import ClipFilter
from frameloom.studio.data.clips import add_thumb_route
from frameloom.studio.data.controller import OWN_SHAPES, DataDesk, Edits, describe_edits
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


@dataclass(frozen=True)
class _Clips:
    """The components of the tab Clips."""

    filters: list[Any]
    grid: Any
    place: Any
    back: Any
    forward: Any
    viewer: Any
    caption: Any
    facts: Any
    keep: Any
    waiting: Any
    target: Any
    write: Any


def build_data(context: StudioContext) -> None:
    """Build the tab."""
    desk = DataDesk(context)
    context.routes.append(lambda app: add_thumb_route(app, desk.media))
    names = list_manifests(context)
    with gr.Row(equal_height=True, elem_classes="fl-pick"):
        manifest = gr.Dropdown(
            names, value=next(iter(names), None), label="Manifest", scale=8, min_width=280, elem_id="manifest"
        )
        again = gr.Button("Look again", scale=1, min_width=120)
    totals = gr.HTML(elem_id="data-totals")
    with gr.Tabs():
        with gr.Tab("Clips", id="clips"):
            clips = _build_clips()
        with gr.Tab("Buckets", id="buckets"):
            policy = gr.Dropdown([OWN_SHAPES, *list_recipes(context)], value=OWN_SHAPES, label="Grouped by")
            buckets = gr.HTML(elem_id="bucket-chart")
        with gr.Tab("Broken files", id="broken"):
            broken = gr.HTML(elem_id="broken-files")

    gr.on(None, show_errors(desk.summarize), [manifest], [totals, broken, clips.target], show_progress="hidden")
    gr.on(None, show_errors(desk.group), [manifest, policy], [buckets], show_progress="minimal")
    again.click(lambda chosen: _look_again(context, chosen), [manifest], [manifest])
    _wire_clips(desk, clips, manifest)


def _look_again(context: StudioContext, chosen: str | None) -> Any:
    names = list_manifests(context)
    return gr.Dropdown(choices=names, value=chosen if chosen in names else next(iter(names), None))


def _build_clips() -> _Clips:
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
                place = gr.HTML(elem_id="clip-place")
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
    return _Clips(
        [text, kind, *bounds, where], grid, place, back, forward, viewer, caption, facts, keep, waiting, target, write
    )


def _make_filter(text: str, kind: str, *rest: Any) -> ClipFilter:
    low_frames, high_frames, low_side, high_side, low_fps, high_fps, where = rest
    return ClipFilter(
        text or "", kind, (low_frames, high_frames), (low_side, high_side), (low_fps, high_fps), where or ""
    )


def _wire_clips(desk: DataDesk, clips: _Clips, manifest: Any) -> None:
    number, chosen, edits = gr.State(0), gr.State(None), gr.State({})
    shown = [clips.grid, clips.place, number]
    asked = [manifest, number, edits, chosen, *clips.filters]

    def show(name: str, page: int, changed: Edits, row: int | None, *filters: Any) -> tuple[str, str, int]:
        return desk.show(name, _make_filter(*filters), page, changed, row)

    def first(name: str, page: int, *rest: Any) -> tuple[str, str, int]:
        return show(name, 0, *rest)

    def turn(step: int) -> Any:
        return show_errors(lambda name, page, *rest: show(name, page + step, *rest))

    def pick(name: str, changed: Edits, event: gr.EventData) -> tuple[str, str, str, int]:
        row = int(event.row)
        return (*desk.choose(name, row, changed), row)

    def forget() -> tuple[str, str, str, None, Edits, str]:
        return _NOTHING_CHOSEN, "", "", None, {}, describe_edits({})

    def keep(name: str, row: int | None, text: str, changed: Edits) -> tuple[Edits, str]:
        kept = desk.keep(name, row, text, changed)
        return kept, describe_edits(kept)

    def write(name: str, changed: Edits, target: str) -> tuple[Any, Edits]:
        written = desk.write(name, changed, target)
        gr.Info(f"Written: {written}")
        return gr.Dropdown(choices=list_manifests(desk.context), value=written), {}

    quiet: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
    manifest.change(
        forget, None, [clips.viewer, clips.caption, clips.facts, chosen, edits, clips.waiting], show_progress="hidden"
    ).then(show_errors(first), asked, shown, **quiet)
    on_page_load(show_errors(first), asked, shown, **quiet)
    gr.on([part.change for part in clips.filters], show_errors(first), asked, shown, **quiet)
    clips.back.click(turn(-1), asked, shown, **quiet)
    clips.forward.click(turn(1), asked, shown, **quiet)
    clips.grid.click(
        show_errors(pick), [manifest, edits], [clips.viewer, clips.caption, clips.facts, chosen], show_progress="hidden"
    ).then(show_errors(show), asked, shown, **quiet)
    clips.keep.click(
        show_errors(keep), [manifest, chosen, clips.caption, edits], [edits, clips.waiting], show_progress="hidden"
    ).then(show_errors(show), asked, shown, **quiet)
    clips.write.click(show_errors(write), [manifest, edits, clips.target], [manifest, edits])
