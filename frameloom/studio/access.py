"""Who may ask: only pages that this server served, on names that are its own, and with the token when it has one."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

LOOPBACK = "127.0.0.1"
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
        """The refusal of a stranger, the login of one who has the token; None for who may go on."""
        return self._refuse_stranger(request) or self._refuse_tokenless(request)

    def _refuse_stranger(self, request: Request) -> Response | None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return _forbid("the Host header does not name this server")
        origins = request.headers.getlist("origin")
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
            return _forbid("the request comes from another page")
        # Browsers say so when another site's page is behind a request; following a link is the one harmless case.
        site = request.headers.get("sec-fetch-site", "none")
        if site in ("cross-site", "same-site") and not _is_visit(request):
            return _forbid("the request comes from another site")
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


def make_token() -> str:
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_visit(request: Request) -> bool:
    mode, target = request.headers.get("sec-fetch-mode"), request.headers.get("sec-fetch-dest")
    return request.method == "GET" and mode == "navigate" and target == "document"


def _matches(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _forbid(detail: str) -> Response:
    return JSONResponse({"detail": detail}, status_code=403)
