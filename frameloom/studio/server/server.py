"""The HTTP server of the studio: start, listen, and stop with all child processes."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from frameloom.core.errors import ConfigError, MissingExtra
from frameloom.core.logging import get_logger
from frameloom.studio.server.context import StudioContext

_log = get_logger(__name__)
DEFAULT_PORT = 7860
_SHUTDOWN_S = 2
_BACKLOG = 128


def serve(root: Path, *, host: str, port: int | None) -> None:
    """Serve the page until a signal ends it; `port` None: 7860, or a free one when that is taken."""
    try:
        import uvicorn

        from frameloom.studio.server.app import build_app
        from frameloom.studio.server.guard import Access, is_loopback
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "studio") from error

    with open_context(root) as context, _listen(host, port) as listener:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        access = Access(host, listener.getsockname()[1], token)
        # Relative paths in recipes start from the folder a command runs in; for the studio that is its root.
        os.chdir(context.root)
        app = build_app(context, access)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        print(f"Frameloom studio of {context.root}: {access.url}", flush=True)
        print("Press Ctrl-C to stop it.", flush=True)
        # Ctrl-C is the normal end of a server.
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def open_context(root: Path) -> Iterator[StudioContext]:
    """A context with a private scratch folder; everything that the tabs have started ends with it."""
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; name the folder that holds your runs, data and recipes")
    scratch = Path(tempfile.mkdtemp(prefix="frameloom-studio-")).resolve()
    context = StudioContext(root.resolve(), scratch)
    try:
        yield context
    finally:
        context.closers.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _listen(host: str, port: int | None) -> socket.socket:
    """The address is bound here and handed over, so that no environment variable can choose another."""
    for number in (DEFAULT_PORT, 0) if port is None else (port,):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, number))
            # Two servers can bind one port before either listens; who listens first has it.
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if port is None and number == DEFAULT_PORT and error.errno == errno.EADDRINUSE:
                continue
            reason = error.strerror or str(error)
            raise ConfigError(
                f"--host {host} --port {number}: cannot listen there ({reason}); give an address of this machine "
                "and a free port, or leave both out"
            ) from error
    raise AssertionError("one of the ports is returned or refused")
