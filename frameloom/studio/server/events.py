"""Events of the page. Mistakes of the person become messages on it; ours keep their traceback in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from html import escape
from typing import Any, ParamSpec, TypeVar

import gradio as gr
from gradio.context import Context

from frameloom.core.errors import FrameloomError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_SHOWN_S = 12


def tell_errors(handler: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """An event handler whose FrameloomError is shown as a message instead of ending in a traceback."""

    @wraps(handler)
    def told(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return handler(*args, **kwargs)
        except FrameloomError as error:
            raise gr.Error(escape(str(error)), duration=_SHOWN_S, title="Not done", print_exception=False) from error

    return told


def on_page_load(handler: Callable[..., Any], inputs: Any, outputs: Any, **settings: Any) -> Any:
    """Call `handler` whenever a browser opens the page that is being built."""
    page = Context.root_block
    assert page is not None, "a place is built inside the page"
    return page.load(handler, inputs, outputs, **settings)
