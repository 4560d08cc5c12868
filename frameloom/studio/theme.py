"""How the page looks: one quiet theme with the fonts of the system, light or dark as the system is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Gradio puts its own container before every selector of `css`; rules about the container itself stand in the head.
_OUTER = """
.gradio-container { width: 100% !important; max-width: 1280px !important; margin: 0 auto !important;
  padding: 0 clamp(10px, 2vw, 24px) 56px !important; }
.gradio-container > .main.fillable { padding: 8px clamp(0px, 1vw, 8px) !important; }
@media (max-width: 640px) {
  .tab-container button[role="tab"] { padding: 0 10px !important; }
}
"""
HEAD = f'<meta name="color-scheme" content="light dark"><style>{_OUTER}</style>'
CSS = Path(__file__).with_name("studio.css").read_text(encoding="utf-8")
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Liberation Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")


def build_theme() -> Any:
    """A theme without any font of its own: plain strings are not looked up anywhere."""
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
