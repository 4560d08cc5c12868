"""The studio listens on loopback whatever it is told, serves nothing from elsewhere, and has its limits."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from frameloom.studio.server.context import Limits
from tests.studio.studio_process import Answer, Studio, read_answer
from tests.studio.tiny_run import RUN, make_root

pytest.importorskip("gradio", reason="the extra studio is not installed")

SECRET = b"outside-bytes-7d1f"
ODD = {
    "GRADIO_SERVER_NAME": "0.0.0.0",
    "GRADIO_SERVER_PORT": "1",
    "GRADIO_SHARE": "True",
    "GRADIO_ALLOWED_PATHS": "/",
    "GRADIO_TEMP_DIR": "/",
    "GRADIO_ROOT_PATH": "/elsewhere",
    "GRADIO_ANALYTICS_ENABLED": "True",
    "GRADIO_MCP_SERVER": "True",
    "GRADIO_SSR_MODE": "True",
    "GRADIO_VIBE_MODE": "1",
    "GRADIO_LOCAL_DEV_MODE": "1",
    "GRADIO_WATCH_DIRS": "/",
    "SYSTEM": "spaces",
    "SPACE_ID": "someone/else",
    "HOST": "0.0.0.0",
    "UVICORN_HOST": "0.0.0.0",
    "FORWARDED_ALLOW_IPS": "*",
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures that nobody below the root may see."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret.png").write_bytes(SECRET)
    return folder


@pytest.fixture(scope="module")
def root(shared_world: Path, outside: Path) -> Path:
    """A real folder with a trained run, and every kind of entry that leads somewhere else."""
    folder = make_root(shared_world)
    (folder / "shown.png").write_bytes(b"shown " + SECRET)
    (folder / ".hidden.png").write_bytes(SECRET)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "secret.png").write_bytes(SECRET)
    (folder / "notes.txt").write_bytes(SECRET)
    (folder / "link.png").symlink_to(outside / "secret.png")
    (folder / "linked").symlink_to(outside)
    os.mkfifo(folder / "pipe.png")
    (folder / "large.mp4").write_bytes(b"\0" * (24 << 20))
    return folder


@pytest.fixture(scope="module")
def studio(root: Path) -> Iterator[Studio]:
    started = Studio(root, environment=ODD)
    yield started
    started.close()


@pytest.fixture(scope="module")
def config(studio: Studio) -> dict[str, Any]:
    """What the page itself is told about its parts and events."""
    return json.loads(studio.ask("/config").body)


def spell_traversals(root: Path, outside: Path) -> list[str]:
    """Addresses that would lead to the secret if any part of the server decoded, joined or followed carelessly."""
    target = str(outside / "secret.png")
    climb = len(root.parts) + 2
    ups = [
        *("../", "..%2f", "%2e%2e/", "%2e%2e%2f", ".%2e/", "%2e./", "..%5c", "..\\", "%2e%2e%5c"),
        *("%252e%252e%252f", "..%252f", "%25252e%25252e%25252f", "..%c0%af", "%c0%ae%c0%ae/", "%e0%80%ae%e0%80%ae/"),
        *("..;/", "....//", "..%00/", "..%2e/", "%ef%bc%8e%ef%bc%8e/", "..%ef%bc%8f", "..//", "./../", "%u002e%u002e/"),
    ]
    routes = ["/files/", "/gradio_api/file=", "/gradio_api/file/", "/static/", "/assets/", "/svelte/", "/"]
    climbing = [f"{route}{up * climb}{target[1:]}" for route, up in itertools.product(routes, ups)]
    plain = [target, f"/{target}", quote(target, safe=""), f"file://{target}", f"~/../..{target}", target + "%00.png"]
    direct = [f"{route}{name}" for route, name in itertools.product(routes, plain)]
    inside = ["link.png", "linked/secret.png", ".hidden.png", ".hidden/secret.png", "%2ehidden.png", "notes.txt"]
    inside += ["pipe.png", "shown.png/../link.png", "linked/./secret.png", "linked//secret.png"]
    links = [f"/files/{name}" for name in inside] + [f"/gradio_api/file={root}/{name}" for name in inside]
    proxies = [f"/gradio_api/proxy=http://127.0.0.1/{target}", f"/files/http:/{target}", f"//{target}"]
    return [*climbing, *direct, *links, *proxies]


def test_34_it_listens_on_loopback_alone_whatever_the_environment_says(studio, tally) -> None:
    tally.inject(len(ODD))
    opened = psutil.Process(studio.process.pid).net_connections(kind="inet")
    listening = [one.laddr for one in opened if one.status == psutil.CONN_LISTEN]
    assert [(place.ip, place.port) for place in listening] == [("127.0.0.1", studio.port)]
    assert all(one.raddr.ip == "127.0.0.1" for one in opened if one.raddr)
    page = studio.ask("/")
    assert page.status == 200 and b"elsewhere" not in page.body
    assert "connect-src 'self'" in page.headers["content-security-policy"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "127.0.0.1:1"},
        {"Host": "localhost@evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_34_another_host_or_origin_is_refused(studio, tally, headers) -> None:
    tally.inject(2)
    assert studio.ask("/", headers=headers).status == 403
    join = {"Content-Type": "application/json", **headers}
    assert studio.ask("/gradio_api/queue/join", method="POST", headers=join, body=b"{}").status == 403


def test_34_its_own_host_and_origin_are_served(studio) -> None:
    """The control."""
    assert studio.ask("/", headers={"Origin": f"http://{studio.own}"}).status == 200
    assert studio.ask("/", headers={"Host": f"localhost:{studio.port}"}).status == 200
    assert studio.ask("/", headers={"Sec-Fetch-Site": "same-origin"}).status == 200


def test_34_no_spelling_of_a_path_gives_a_byte_from_outside(studio, root, outside, tally) -> None:
    paths = spell_traversals(root, outside)
    assert len(set(paths)) >= 60
    tally.inject(len(paths))
    leaked = []
    for path in paths:
        # A byte that is no ASCII goes out as it is; a browser would have encoded it.
        answer = studio.ask(path)
        if SECRET in answer.body or answer.status == 200:
            leaked.append((path, answer.status))
    assert not leaked


def test_34_a_file_below_the_root_is_served(studio) -> None:
    """The control: the same content, where it may be seen; a part of it too."""
    answer = studio.ask("/files/shown.png")
    assert (answer.status, answer.body) == (200, b"shown " + SECRET)
    assert answer.headers["x-content-type-options"] == "nosniff"
    part = studio.ask("/files/shown.png", headers={"Range": "bytes=6-12"})
    assert (part.status, part.body) == (206, SECRET[:7])


@pytest.mark.parametrize(
    "path",
    [
        *("/docs", "/redoc", "/openapi.json", "/gradio_api/openapi.json", "/gradio_api/info", "/monitoring"),
        *("/gradio_api/mcp", "/gradio_api/vibe-code", "/gradio_api/runs", "/gradio_api/token", "/login"),
        "/gradio_api/stream/a/b/1/playlist.m3u8",
    ],
)
def test_34_what_the_page_does_not_need_is_not_there(studio, tally, path) -> None:
    tally.inject()
    assert studio.ask(path).status == 404


@pytest.mark.parametrize("path", ["/gradio_api/run/predict", "/gradio_api/call/x", "/gradio_api/vibe-edit", "/config"])
def test_34_nothing_but_the_page_can_call_it(studio, tally, path) -> None:
    tally.inject()
    assert studio.post(path, {"data": []}).status in (404, 405)


def test_34_a_wider_address_needs_the_token(root, tally) -> None:
    tally.inject(4)
    studio = Studio(root, "--host", "0.0.0.0")
    try:
        assert studio.token and len(studio.token) >= 24
        own = {"Host": f"127.0.0.1:{studio.port}"}
        assert studio.ask("/", headers=own).status == 401
        assert studio.ask("/?token=wrong", headers=own).status == 401
        assert studio.ask("/files/shown.png", headers=own).status == 401
        entered = studio.ask(f"/?token={studio.token}", headers=own)
        assert entered.status == 303 and "HttpOnly" in entered.headers["set-cookie"]
        cookie = {"Cookie": entered.headers["set-cookie"].split(";")[0], **own}
        assert studio.ask("/files/shown.png", headers=cookie).status == 200
        assert studio.ask("/", headers={**cookie, "Host": f"evil.example:{studio.port}"}).status == 403
    finally:
        code = studio.close(signal.SIGTERM)
    assert code == 128 + signal.SIGTERM


def test_35_a_huge_prompt_is_refused_before_it_is_sent(studio, tally) -> None:
    tally.inject(2)
    head = f"POST /gradio_api/queue/join HTTP/1.1\r\nHost: {studio.own}\r\nContent-Type: application/json\r\n"
    with studio.connect() as connection:
        connection.sendall(f"{head}Content-Length: {10 << 20}\r\n\r\n".encode())
        declared = read_answer(connection)
    assert declared.status == 413 and "larger than 1,048,576 bytes" in declared.detail
    with studio.connect() as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        connection.sendall(chunk * 17)
        assert read_answer(connection).status == 413


def test_35_large_and_many_uploads_are_refused(studio, tally) -> None:
    tally.inject(3)
    kind = {"Content-Type": "multipart/form-data; boundary=xyz"}
    limit = Limits()
    large = str(limit.upload_bytes * (limit.upload_files + 1))
    with studio.connect() as connection:
        lines = [f"{name}: {value}" for name, value in {"Host": studio.own, **kind, "Content-Length": large}.items()]
        connection.sendall("\r\n".join(["POST /gradio_api/upload HTTP/1.1", *lines, "", ""]).encode())
        assert read_answer(connection).status == 413
    part = '--xyz\r\nContent-Disposition: form-data; name="files"; filename="{}.png"\r\n\r\nx\r\n'
    many = "".join(part.format(number) for number in range(50)) + "--xyz--\r\n"
    refused = studio.ask("/gradio_api/upload", method="POST", headers=kind, body=many.encode())
    assert refused.status == 413 and "more than 4 files" in refused.detail
    assert studio.post("/gradio_api/upload", {}).status == 415
    one = studio.ask(
        "/gradio_api/upload", method="POST", headers=kind, body=(part.format("a") + "--xyz--\r\n").encode()
    )
    assert one.status == 200


class Visitor:
    """A page that was opened: its events are sent as a browser sends them."""

    def __init__(self, studio: Studio, config: dict[str, Any]) -> None:
        self.studio, self.config = studio, config
        self.parts = {part["id"]: part for part in config["components"]}
        self.ids = {part["props"].get("elem_id"): number for number, part in self.parts.items()}
        model = self.ids["generate-model"]
        # What may be chosen is told when the page is opened.
        self.send(next(one for one in config["dependencies"] if one["outputs"] == [model]), [])

    def send(self, event: dict[str, Any], data: list[Any]) -> str:
        joined = self.studio.post(
            "/gradio_api/queue/join", {"data": data, "fn_index": event["id"], "session_hash": "visitor"}
        )
        assert joined.status == 200, joined.body
        told = self.studio.ask("/gradio_api/queue/data?session_hash=visitor")
        messages = [json.loads(line[6:]) for line in told.body.decode().splitlines() if line.startswith("data: ")]
        return json.dumps(next(message for message in messages if message["msg"] == "process_completed"))

    def order(self, **values: object) -> str:
        """Press Generate with these values; what the page is told."""
        button = [self.ids["generate-go"], "click"]
        event = next(one for one in self.config["dependencies"] if button in [list(pair) for pair in one["targets"]])
        sent = {self.ids[f"generate-{name}"]: value for name, value in values.items()}
        return self.send(
            event, [sent.get(number, self.parts[number]["props"].get("value")) for number in event["inputs"]]
        )


def test_35_a_million_frames_are_refused_in_words(studio, config, tally) -> None:
    tally.inject(3)
    visitor = Visitor(studio, config)
    asked = {"model": RUN, "prompt": "a red circle"}
    assert "Frames: 1,000,000 is out of range; choose 1 to 1,025" in visitor.order(**asked, frames=10**6)
    assert "Steps: 1,000,000 is out of range" in visitor.order(**asked, steps=10**6)
    assert "Prompt: has 5,000 characters" in visitor.order(**{**asked, "prompt": "x" * 5000})


def ask_at_once(count: int, ask: Callable[[int], Answer]) -> list[Answer]:
    found: list[Answer] = []
    threads = [threading.Thread(target=lambda number=number: found.append(ask(number))) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_35_a_hundred_requests_at_once_leave_it_answering_and_small(studio, config, tally) -> None:
    tally.inject(200)
    process = psutil.Process(studio.process.pid)
    studio.ask("/")
    before = process.memory_info().rss
    held: list[socket.socket] = []
    statuses = []
    for number in range(100):
        connection = studio.connect()
        connection.sendall(f"GET /gradio_api/heartbeat/h{number} HTTP/1.1\r\nHost: {studio.own}\r\n\r\n".encode())
        statuses.append(int(connection.recv(4096).split()[1]))
        held.append(connection)
    for connection in held:
        connection.close()
    limit = Limits().open_requests
    assert statuses.count(200) <= limit and set(statuses) == {200, 429}
    slow = next(one["id"] for one in config["dependencies"] if one["inputs"])
    body = {"data": [None] * 20, "fn_index": slow}
    answers = ask_at_once(
        100, lambda number: studio.post("/gradio_api/queue/join", {**body, "session_hash": f"many{number}"})
    )
    assert {answer.status for answer in answers} <= {200, 429, 503}
    assert all(answer.detail for answer in answers if answer.status != 200)
    assert studio.ask("/").status == 200
    assert process.memory_info().rss - before < 100 << 20


def test_35_clients_that_leave_in_mid_download_do_no_harm(studio, tally) -> None:
    tally.inject(20)
    process = psutil.Process(studio.process.pid)
    before = process.memory_info().rss
    for _ in range(20):
        with studio.connect() as connection:
            connection.sendall(f"GET /files/large.mp4 HTTP/1.1\r\nHost: {studio.own}\r\n\r\n".encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    whole = studio.ask("/files/large.mp4")
    assert len(whole.body) == 24 << 20
    assert process.memory_info().rss - before < 100 << 20
