"""Bodies are counted however they are cut into pieces."""

from __future__ import annotations

import asyncio

import pytest

starlette = pytest.importorskip("starlette.requests", reason="the extra studio is not installed")

from frameloom.studio.server.context import Limits  # noqa: E402
from frameloom.studio.server.files import BodyRefused, Upload, read_body  # noqa: E402
from frameloom.studio.server.guard import Access  # noqa: E402

PART = b'--xyz\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n--xy--x-xy\r\n'


def make_request(**headers: str):
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return starlette.Request({"type": "http", "method": "POST", "path": "/", "headers": pairs, "query_string": b""})


def pieces(body: bytes, size: int):
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        return messages.pop(0)

    return receive


def upload(num_files: int, size: int, folder) -> int:
    """Send an upload in pieces; how many bytes came through."""
    request = make_request(content_type='multipart/form-data; boundary="xyz"')
    counted = Upload(request, pieces(PART * num_files + b"--xyz--\r\n", size), Limits(upload_files=3), folder)

    async def read_all() -> int:
        total, more = 0, True
        while more:
            message = await counted.receive()
            total, more = total + len(message["body"]), message["more_body"]
        return total

    return asyncio.run(read_all())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 100_000])
def test_files_of_an_upload_are_counted_across_pieces(size, tmp_path):
    assert upload(3, size, tmp_path) == len(PART) * 3 + len(b"--xyz--\r\n")
    with pytest.raises(BodyRefused, match="more than 3 files"):
        upload(4, size, tmp_path)


def test_a_body_is_given_again_whole(tmp_path):
    async def go() -> bytes:
        again = await read_body(make_request(), pieces(b"0123456789", 3), 10)
        return (await again())["body"]

    assert asyncio.run(go()) == b"0123456789"


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_body_that_is_too_large_is_refused_while_it_comes(size):
    with pytest.raises(BodyRefused, match="larger than 9 bytes"):
        asyncio.run(read_body(make_request(), pieces(b"0123456789", size), 9))


@pytest.mark.parametrize("declared", ["11", "-1", "1e3", "99999999999999999999"])
def test_a_declared_size_that_is_wrong_is_refused_at_once(declared):
    async def never():
        raise AssertionError("nothing is read")

    with pytest.raises(BodyRefused):
        asyncio.run(read_body(make_request(content_length=declared), never, 10))


def test_a_wide_address_without_a_token_cannot_be_made():
    with pytest.raises(ValueError, match="needs a token"):
        Access("0.0.0.0", 80)
    assert Access("127.0.0.1", 80).url == "http://127.0.0.1:80/"
    assert Access("::1", 80).url == "http://[::1]:80/"
