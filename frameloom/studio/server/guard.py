"""Access control of the page: which requests pass, from whom, and how large.

Order: Host and Origin, then the token, then a list of known routes, then sizes. A refusal is JSON with a `detail`
that the page shows; nothing of a refused request reaches Gradio.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.files import BodyRefused, Upload, read_body

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


_COOKIE = "frameloom-token"
_LOGIN = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Frameloom</title><style>:root{color-scheme:light dark}body{font:16px system-ui,sans-serif;display:grid;
place-items:center;min-height:90vh;margin:0}form{display:grid;gap:12px;width:min(22rem,90vw)}input,button{font:inherit;
padding:10px 12px;border-radius:8px;border:1px solid #8888}</style><form method="get" action="/">
<h1>Frameloom</h1><label for="token">Token, as printed where the studio was started</label>
<input id="token" name="token" type="password" autofocus required><button>Open</button></form></html>"""


@dataclass(frozen=True)
class Access:
    """Where the server listens. Anything wider than loopback has a token."""

    host: str
    port: int
    token: str | None = None

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.token:
            raise ValueError(f"{self.host} is open to others; that needs a token")

    @property
    def url(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def refuse(self, request: Request) -> Response | None:
        """The refusal of a stranger, or the login page without a token; None for a request that may pass."""
        return self._refuse_stranger(request) or self._refuse_tokenless(request)

    def _refuse_stranger(self, request: Request) -> Response | None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return refuse(403, "the Host header does not name this server")
        origins = request.headers.getlist("origin")
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
            return refuse(403, "the request comes from another page")
        # Browsers say so when another site's page is behind a request; following a link is the one harmless case.
        site, mode, target = (request.headers.get(f"sec-fetch-{name}", "none") for name in ("site", "mode", "dest"))
        is_visit = request.method == "GET" and mode == "navigate" and target == "document"
        if site in ("cross-site", "same-site") and not is_visit:
            return refuse(403, "the request comes from another site")
        return None

    def _is_own(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            return False
        if port != self.port or parts.username is not None or parts.path or parts.query or parts.fragment:
            return False
        if is_loopback(self.host):
            return name == "localhost" or is_loopback(name)
        # The token guards a wide server; a name that is only an address, or the machine's own, cannot be rebound.
        return name in ("localhost", socket.gethostname().lower()) or _is_address(name)

    def _refuse_tokenless(self, request: Request) -> Response | None:
        if self.token is None or _matches(request.cookies.get(_COOKIE, ""), self.token):
            return None
        given = request.query_params.get("token")
        if given is not None and request.method == "GET" and _matches(given, self.token):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(_COOKIE, self.token, httponly=True, samesite="strict", path="/")
            return answer
        return HTMLResponse(_LOGIN, status_code=401, headers={"cache-control": "no-store"})


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _matches(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
