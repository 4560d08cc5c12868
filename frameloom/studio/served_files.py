"""Files for the browser: media below the root, and what the page itself made in its scratch folder."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, JSONResponse, Response

from frameloom.core.errors import DataError
from frameloom.studio.context import FILES_ROUTE, SERVED_SUFFIXES, StudioContext

# A report may run its own few lines of script, in a sandbox that cannot reach the page or anything else.
_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: 'self'; media-src data: 'self'"
)


def add_file_route(app: FastAPI, context: StudioContext) -> None:
    """Our routes stand before Gradio's and answer for its `file=` too, so that one rule decides what leaves."""

    @app.api_route(FILES_ROUTE + "{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    def send_below_root(name: str) -> Response:
        try:
            return _send(context.resolve(name, where="file"))
        except (DataError, OSError, ValueError):
            return _missing()

    @app.api_route("/gradio_api/file={name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    def send_from_scratch(name: str) -> Response:
        try:
            path = Path(name).resolve()
            is_ours = Path(name).is_absolute() and path.is_relative_to(context.scratch)
        except (OSError, RuntimeError, ValueError):
            return _missing()
        return _send(path) if is_ours else _missing()


def _send(path: Path) -> Response:
    """`path` has been resolved: no link is followed after the check."""
    if path.suffix.lower() not in SERVED_SUFFIXES or path.is_symlink() or not path.is_file():
        return _missing()
    if not os.access(path, os.R_OK):
        return _missing()
    headers = {"content-security-policy": _REPORT_POLICY} if path.suffix.lower() == ".html" else {}
    return FileResponse(path, headers=headers)


def _missing() -> Response:
    # The same words for absent and for forbidden: an answer must not tell what lies outside.
    return JSONResponse({"detail": "no such file, or not one that the page shows"}, status_code=404)
