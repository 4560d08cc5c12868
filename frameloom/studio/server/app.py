"""The Gradio page: four tabs behind the guard that every request passes."""

from __future__ import annotations

import importlib
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameloom.core.errors import MissingExtra
from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.files import add_file_route
from frameloom.studio.server.guard import Access, Guard
from frameloom.studio.server.markup import safe

if TYPE_CHECKING:
    from starlette.types import ASGIApp


# A tab's title, and the function that builds its content inside the tab.
TABS = {
    "Data": "frameloom.studio.data.tab:build_data",
    "Runs": "frameloom.studio.runs.tab:build_runs",
    "Recipe": "frameloom.studio.recipe.tab:build_recipe",
    "Generate": "frameloom.studio.generate.tab:build_generate",
}


def build_app(context: StudioContext, access: Access) -> ASGIApp:
    """The whole web application, not served yet."""
    clean_environment(context.scratch)
    try:
        import gradio
    except ModuleNotFoundError as error:
        raise MissingExtra("gradio", "studio") from error
    from fastapi import FastAPI

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
    """The Blocks with all tabs."""
    import gradio as gr

    with gr.Blocks(title="Frameloom", analytics_enabled=False, fill_width=True, delete_cache=(600, 3600)) as page:
        gr.HTML(f'<header class="fl-header"><h1>Frameloom</h1><p>{safe(context.root)}</p></header>')
        with gr.Tabs():
            for title, target in TABS.items():
                module, _, function = target.partition(":")
                with gr.Tab(title, id=title.lower(), elem_id=f"tab-{title.lower()}"):
                    getattr(importlib.import_module(module), function)(context)
    page.queue(max_size=context.limits.waiting_events, default_concurrency_limit=4, api_open=False)
    return page


_OUTER = Path(__file__).with_name("head.css").read_text(encoding="utf-8")
HEAD = f'<meta name="color-scheme" content="light dark"><style>{_OUTER}</style>'
CSS = Path(__file__).with_name("studio.css").read_text(encoding="utf-8")
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Liberation Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")


def build_theme() -> Any:
    """A theme with system fonts: Gradio downloads no font that is given as a plain string."""
    import gradio as gr

    theme = gr.themes.Base(
        primary_hue=gr.themes.colors.indigo,
        secondary_hue=gr.themes.colors.indigo,
        neutral_hue=gr.themes.colors.zinc,
        spacing_size=gr.themes.sizes.spacing_md,
        radius_size=gr.themes.sizes.radius_md,
        text_size=gr.themes.sizes.text_md,
        font=_SANS,
        font_mono=_MONO,
    )
    return theme.set(
        body_background_fill="#fafafa",
        body_background_fill_dark="#18181b",
        block_background_fill="#ffffff",
        block_background_fill_dark="#1f1f23",
        block_border_width="1px",
        block_border_color="#e4e4e7",
        block_border_color_dark="#34343a",
        block_shadow="none",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_label_border_width="0px",
        block_label_text_color="#52525b",
        block_label_text_color_dark="#a1a1aa",
        block_title_text_weight="550",
        block_title_text_size="13px",
        input_background_fill="#ffffff",
        input_background_fill_dark="#18181b",
        input_border_width="1px",
        input_border_color="#d4d4d8",
        input_border_color_dark="#3f3f46",
        button_primary_background_fill="#4f46e5",
        button_primary_background_fill_hover="#4338ca",
        button_primary_background_fill_dark="#6366f1",
        button_primary_background_fill_hover_dark="#818cf8",
        button_primary_text_color="#ffffff",
        button_secondary_background_fill="#ffffff",
        button_secondary_background_fill_hover="#f4f4f5",
        button_secondary_background_fill_dark="#27272a",
        button_secondary_background_fill_hover_dark="#34343a",
        button_secondary_border_color="#d4d4d8",
        button_secondary_border_color_dark="#3f3f46",
        button_border_width="1px",
        button_large_radius="8px",
        button_small_radius="7px",
        body_text_color_subdued="#63636e",
        body_text_color_subdued_dark="#a1a1aa",
    )


_PREFIXES = ("GRADIO_", "OAUTH_", "SPACE_", "OPENID_")
_NAMES = ("SYSTEM", "KAGGLE_KERNEL_RUN_TYPE")


def clean_environment(scratch: Path, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Remove every variable that Gradio reads and set our own; gives the names of those that are not honoured."""
    ignored = sorted(name for name in environment if name.startswith(_PREFIXES) or name in _NAMES)
    for name in ignored:
        del environment[name]
    environment["GRADIO_ANALYTICS_ENABLED"] = "False"
    environment["GRADIO_TEMP_DIR"] = str(scratch)
    environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    return ignored
