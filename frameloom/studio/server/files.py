"""Request bodies with a size limit, and files served from below the root."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Message, Receive

from frameloom.core.errors import DataError
from frameloom.studio.server.context import FILES_ROUTE, SERVED_SUFFIXES, Limits, StudioContext

_TIMEOUT_S = 30.0
_MULTIPART = re.compile(r'multipart/form-data;.*?boundary="?([^";,]{1,200})"?', re.IGNORECASE)
_FORM_OVERHEAD = 1 << 16
_SCRATCH_BYTES = 1 << 30


class BodyRefused(Exception):
    """The body is too large, too slow, or not what the route takes; `status` is the answer's."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


async def read_body(request: Request, receive: Receive, max_bytes: int) -> Receive:
    """Read the whole body; the result is a `receive` that returns it again."""
    _check_declared(request, max_bytes)
    body = bytearray()
    more = True
    while more:
        try:
            message = await asyncio.wait_for(receive(), _TIMEOUT_S)
        except TimeoutError:
            raise BodyRefused(408, f"the request did not arrive within {_TIMEOUT_S:.0f} s") from None
        if message["type"] == "http.disconnect":
            raise BodyRefused(400, "the client went away")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class Upload:
    """An upload on its way through: its bytes and its files are counted; `refusal` is set when they are too many."""

    def __init__(self, request: Request, receive: Receive, limits: Limits, scratch: Path) -> None:
        self._max_bytes = limits.upload_bytes * limits.upload_files + _FORM_OVERHEAD
        _check_declared(request, self._max_bytes)
        found = _MULTIPART.match(request.headers.get("content-type", ""))
        if found is None:
            raise BodyRefused(415, "an upload is a multipart form")
        if sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file()) > _SCRATCH_BYTES:
            raise BodyRefused(
                413, f"uploads of more than {_SCRATCH_BYTES >> 20} MB are waiting; they expire in an hour"
            )
        self._receive = receive
        self._mark = b"--" + found[1].encode("latin-1")
        self._max_files = limits.upload_files
        self._num_bytes = self._num_marks = 0
        self._tail = b""
        self.refusal: BodyRefused | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        chunk = message.get("body", b"")
        window = self._tail + chunk
        self._num_bytes += len(chunk)
        self._num_marks += window.count(self._mark)
        # What is kept for the next chunk must not hold a mark that was counted.
        after_last = window.rfind(self._mark) + len(self._mark) if self._mark in window else 0
        self._tail = window[max(after_last, len(window) - len(self._mark) + 1, 0) :]
        if self._num_bytes > self._max_bytes:
            self.refusal = _too_large(self._max_bytes)
        elif self._num_marks > self._max_files + 1:
            self.refusal = BodyRefused(413, f"more than {self._max_files} files at once; send fewer")
        if self.refusal is not None:
            raise self.refusal
        return message


def _check_declared(request: Request, max_bytes: int) -> None:
    declared = request.headers.get("content-length")
    if declared is not None and (not declared.isdigit() or int(declared) > max_bytes):
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> BodyRefused:
    return BodyRefused(413, f"the request is larger than {max_bytes:,} bytes; send less")


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
    # The same words for absent and for forbidden: an answer must not reveal what lies outside.
    return JSONResponse({"detail": "no such file, or not one that the page shows"}, status_code=404)
