"""The studio as a person starts it: a process of its own, asked over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_S = 240.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def detail(self) -> str:
        return str(json.loads(self.body)["detail"])


class Studio:
    """`frameloom studio FOLDER` until `close`; requests go out as they are written, nothing is tidied up."""

    def __init__(self, folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frameloom", "studio", str(folder), *flags],
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.printed = b""
        self.url = self._wait_for_address()
        found = re.match(r"http://([^/:]+):(\d+)/(?:\?token=(.+))?$", self.url)
        assert found, self.url
        self.host, self.port, self.token = found[1], int(found[2]), found[3]
        self.own = f"{self.host}:{self.port}"

    def _wait_for_address(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        while b"Ctrl-C" not in self.printed:
            assert time.monotonic() < deadline, f"no address: {self.printed.decode()}"
            if select.select([stdout], [], [], 1.0)[0]:
                chunk = os.read(stdout.fileno(), 65536)
                assert chunk, f"ended: {self.printed.decode()}"
                self.printed += chunk
        return next(word for word in self.printed.decode().split() if word.startswith("http://"))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def ask(
        self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """One request and its whole answer."""
        sent = {"Host": self.own, "Connection": "close", **(headers or {})}
        if method == "POST":
            sent.setdefault("Content-Length", str(len(body)))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items() if value), "", ""]
        with self.connect() as connection:
            connection.sendall("\r\n".join(lines).encode("latin-1") + body)
            return read_answer(connection)

    def post(self, path: str, value: Any) -> Answer:
        return self.ask(
            path, method="POST", headers={"Content-Type": "application/json"}, body=json.dumps(value).encode()
        )

    def close(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


def read_answer(connection: socket.socket) -> Answer:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    try:
        body = answer.read()
    finally:
        answer.close()
    return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)
