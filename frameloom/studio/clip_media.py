"""Pictures and playback of the clips of a manifest, always through our own bounded reader or from below the root."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from frameloom.core.errors import DataError
from frameloom.core.files import digest_value
from frameloom.data.decode import open_video, read_clip
from frameloom.data.media import write_video
from frameloom.data.members import Member, find_media
from frameloom.data.report import make_thumb
from frameloom.data.scan import fold_members, member_of
from frameloom.studio.clip_table import ClipShelf, ClipTable
from frameloom.studio.context import StudioContext

THUMBS_ROUTE = "/thumbs/"
_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif"})
_CONTAINERS, _CODECS = frozenset({".mp4", ".webm"}), frozenset({"h264", "vp8", "vp9", "av1"})
_PREVIEW_PX, _PREVIEW_FRAMES, _NUM_PREVIEWS = 480, 240, 20


class ClipMedia:
    """Thumbnails and playable addresses for the open manifests of a shelf."""

    def __init__(self, context: StudioContext, shelf: ClipShelf) -> None:
        self._context = context
        self._shelf = shelf
        # Two decoders at a time: a page asks for two dozen pictures at once.
        self._slots = threading.BoundedSemaphore(2)
        self._thumb = lru_cache(maxsize=1024)(self._make_thumb)

    def thumb_url(self, table: ClipTable, row: int) -> str:
        return f"{THUMBS_ROUTE}{table.key}/{row}"

    def thumb(self, key: str, row: int) -> bytes | None:
        """A JPEG; None when the manifest is not open or the file cannot be read."""
        table = self._shelf.find(key)
        return None if table is None or not 0 <= row < table.table.height else self._thumb(key, row)

    def _make_thumb(self, key: str, row: int) -> bytes | None:
        table = self._shelf.find(key)
        if table is None:
            return None
        facts = _folded(table, row)
        with self._slots:
            try:
                self._find(table, facts)
                return make_thumb(facts, table.source.root).jpeg
            except (DataError, TypeError):  # sizes that are still null: the file was not scanned
                return None

    def play_url(self, table: ClipTable, row: int) -> tuple[str, bool]:
        """(address, whether it is a video); DataError says why a clip cannot be shown."""
        facts = _folded(table, row)
        media = self._find(table, facts)
        suffix = media.suffix.lower()
        if isinstance(media, Path) and facts.get("start_frame") is None:
            if suffix in _IMAGES:
                return self._context.file_url(media), False
            if suffix in _CONTAINERS and _codec(media) in _CODECS:
                return self._context.file_url(media), True
        return f"/gradio_api/file={quote(str(self._preview(table, row, facts, media)))}", True

    def _find(self, table: ClipTable, facts: dict[str, Any]) -> Path | Member:
        """The file of a row; one that lies outside the root is not shown, whatever the manifest says."""
        media = find_media(table.source.root, str(facts["path"]), member_of(facts))
        file = (media.tar if isinstance(media, Member) else media).resolve()
        if not file.is_relative_to(self._context.root):
            raise DataError(f"{facts['path']}: lies outside the folder of the studio; start the studio further up")
        self._context.resolve(self._context.name_of(file), where=str(facts["path"]))
        return media if isinstance(media, Member) else file

    def _preview(self, table: ClipTable, row: int, facts: dict[str, Any], media: Path | Member) -> Path:
        """A small H.264 copy of what a browser cannot play itself: other codecs, parts of files, members of tars."""
        folder = self._context.scratch / "previews"
        folder.mkdir(exist_ok=True)
        path = folder / f"{digest_value([table.key, row])[:24]}.mp4"
        if not path.exists():
            frames, start = max(1, int(facts["frames"] or 1)), int(facts.get("start_frame") or 0)
            height, width = _fit(int(facts["height"]), int(facts["width"]))
            step = -(-frames // _PREVIEW_FRAMES)
            with self._slots:
                pixels_CFHW = read_clip(
                    media, indices=list(range(start, start + frames, step)), height=height, width=width
                )
                fps = float(facts["fps"] or 8.0) / step
                write_video(path, pixels_CFHW.permute(1, 2, 3, 0).numpy(), fps, crf=20, preset="veryfast")
            for old in sorted(folder.glob("*.mp4"), key=lambda file: file.stat().st_mtime)[:-_NUM_PREVIEWS]:
                old.unlink(missing_ok=True)
        return path


def add_thumb_route(app: FastAPI, media: ClipMedia) -> None:
    @app.api_route(THUMBS_ROUTE + "{key}/{row}", methods=["GET", "HEAD"], include_in_schema=False)
    def send_thumb(key: str, row: int) -> Response:
        jpeg = media.thumb(key, row)
        if jpeg is None:
            return JSONResponse({"detail": "no picture"}, status_code=404)
        return Response(jpeg, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})


def _folded(table: ClipTable, row: int) -> dict[str, Any]:
    table.row(row)
    return fold_members(table.table.slice(row, 1)).row(0, named=True)


def _codec(path: Path) -> str:
    with open_video(path) as (_, stream):
        return str(stream.codec_context.name)


def _fit(height: int, width: int) -> tuple[int, int]:
    """The size of a preview: even sides, the longer at most `_PREVIEW_PX`."""
    scale = min(1.0, _PREVIEW_PX / max(height, width))
    return max(2, round(height * scale / 2) * 2), max(2, round(width * scale / 2) * 2)
