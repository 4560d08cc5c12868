"""The page: four places in tabs, behind the guard that every request passes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from frameloom.studio.context import StudioContext
from frameloom.studio.environment import import_gradio
from frameloom.studio.guard import Access, Guard
from frameloom.studio.markup import safe
from frameloom.studio.served_files import add_file_route

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class Place(NamedTuple):
    """A tab; `module` has one function `build_<name>` that builds its content inside the tab."""

    name: str
    title: str
    module: str


PLACES = (
    Place("data", "Data", "frameloom.studio.data_place"),
    Place("runs", "Runs", "frameloom.studio.runs_place"),
    Place("recipe", "Recipe", "frameloom.studio.recipe_place"),
    Place("generate", "Generate", "frameloom.studio.generate_place"),
)


def build_app(context: StudioContext, access: Access) -> ASGIApp:
    """The whole web application; nothing listens yet."""
    gradio = import_gradio(context.scratch)
    from fastapi import FastAPI

    from frameloom.studio.theme import CSS, HEAD, build_theme

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page = build_page(context)
    add_file_route(app, context)
    for add_routes in context.routes:
        add_routes(app)
    gradio.mount_gradio_app(
        app,
        page,
        path="/",
        server_name=access.host,
        server_port=access.port,
        footer_links=[],
        run_history=False,
        app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None},
        allowed_paths=[],
        blocked_paths=[],
        show_error=True,
        max_file_size=context.limits.upload_bytes,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=build_theme(),
        css=CSS,
        head=HEAD,
    )
    return Guard(app, context, access)


def build_page(context: StudioContext):  # type: ignore[no-untyped-def]  # Gradio has no types to name here
    """The Blocks with a tab for each place."""
    import gradio as gr

    with gr.Blocks(title="Frameloom", analytics_enabled=False, fill_width=True, delete_cache=(600, 3600)) as page:
        gr.HTML(f'<header class="fl-header"><h1>Frameloom</h1><p>{safe(context.root)}</p></header>')
        with gr.Tabs():
            for place, build in find_places():
                with gr.Tab(place.title, id=place.name, elem_id=f"place-{place.name}"):
                    build(context)
    page.queue(max_size=context.limits.waiting_events, default_concurrency_limit=4, api_open=False)
    return page


def find_places() -> list[tuple[Place, Callable[[StudioContext], None]]]:
    """Each place with the function that builds it."""
    found = []
    for place in PLACES:
        if importlib.util.find_spec(place.module) is not None:
            found.append((place, getattr(importlib.import_module(place.module), f"build_{place.name}")))
    return found
