"""The gate in front of the page: who may ask, for what, and how much.

Order: Host and Origin, then the token, then a list of known routes, then sizes. A refusal is JSON with a `detail`
that the page shows; nothing of a refused request reaches Gradio.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frameloom.studio.access import Access
from frameloom.studio.bodies import BodyRefused, Upload, read_body
from frameloom.studio.context import Limits, StudioContext

_READ, _WRITE = ("GET", "HEAD"), ("POST",)
_UPLOAD = "/gradio_api/upload"
# What a browser that shows the page asks for. Gradio's other routes (API, documentation, monitoring, proxies,
# history, streams) are not part of the page.
_ROUTES = (
    (_READ, r"/"),
    (_READ, r"/(config|theme\.css|favicon\.ico|manifest\.json|robots\.txt)/?"),
    (_READ, r"/(assets|static|svelte)/.+"),
    (_READ, r"/files/.+"),
    (_READ, r"/thumbs/[0-9a-f]{24}/[0-9]{1,9}"),
    (_READ, r"/gradio_api/file=.+"),
    (_READ, r"/gradio_api/(app_id|startup-events|theme\.css|upload_progress|queue/data|login_check)/?"),
    (_READ, r"/gradio_api/heartbeat/[A-Za-z0-9]{1,64}"),
    (_WRITE, r"/gradio_api/(queue/join|cancel|reset|upload)/?"),
)
_KNOWN = tuple((methods, re.compile(pattern)) for methods, pattern in _ROUTES)
_PAGE_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass
class Guard:
    """An ASGI application around another one."""

    app: ASGIApp
    context: StudioContext
    access: Access
    num_open: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page uses no websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        request = Request(scope)
        answer = self.access.refuse(request) or refuse_route(request) or self._refuse_crowd()
        if answer is not None:
            await answer(scope, receive, _with_headers(send))
            return
        self.num_open += 1
        try:
            await self._pass_on(scope, receive, _with_headers(send))
        finally:
            self.num_open -= 1

    def _refuse_crowd(self) -> Response | None:
        limit = self.context.limits.open_requests
        if self.num_open < limit:
            return None
        return refuse(429, f"{limit} requests are open already; close other tabs or try again in a moment")

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if request.method in _READ:
            await self.app(scope, receive, send)
            return
        try:
            if request.url.path.rstrip("/") == _UPLOAD:
                await self._pass_upload(request, scope, receive, send)
            else:
                replayed = await read_body(request, receive, self.context.limits.body_bytes)
                await self.app(scope, replayed, send)
        except BodyRefused as error:
            await refuse(error.status, str(error))(scope, receive, send)

    async def _pass_upload(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        """Gradio answers after the last byte; what it says about an upload that was refused on the way is dropped."""
        upload = Upload(request, receive, self.context.limits, self.context.scratch)

        async def send_unless_refused(message: Message) -> None:
            if upload.refusal is None:
                await send(message)

        try:
            await self.app(scope, upload.receive, send_unless_refused)
        except Exception:
            if upload.refusal is None:
                raise
        if upload.refusal is not None:
            raise upload.refusal


def refuse(status: int, detail: str) -> Response:
    headers = {"connection": "close"} if status in (408, 413) else {}
    return JSONResponse({"detail": detail}, status_code=status, headers=headers)


def refuse_route(request: Request) -> Response | None:
    """404 for what the page never asks for, and for any spelling of a way upwards."""
    path = request.scope["path"]
    if _climbs(path):
        return refuse(403, "the path leads out of the folder")
    for methods, pattern in _KNOWN:
        if pattern.fullmatch(path):
            return None if request.method in methods else refuse(405, f"{request.method} is not used here")
    return refuse(404, "the page has no such address")


def _climbs(path: str) -> bool:
    """Whether a segment is `..`, in any of the encodings that a second or third decoding would open up."""
    for _ in range(4):
        if "\0" in path or any(part.strip() in ("..", "...") for part in re.split(r"[/\\]", path)):
            return True
        path = unquote(path)
    return False


def _with_headers(send: Send) -> Send:
    """Every answer says that nothing from elsewhere is loaded and that nobody else may frame or read it."""

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            added = {"content-security-policy": _PAGE_POLICY, **_HEADERS}
            message["headers"] = [
                *(pair for pair in message["headers"] if not pair[0].lower().startswith(b"access-control-")),
                *((name.encode(), value.encode()) for name, value in added.items() if name.encode() not in present),
            ]
        await send(message)

    return sender


__all__ = ["Access", "Guard", "Limits", "refuse", "refuse_route"]
