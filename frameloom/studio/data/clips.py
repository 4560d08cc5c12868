"""Thumbnails and playback of the clips of a manifest, only from below the root."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from frameloom.core.errors import DataError
from frameloom.core.files import digest_value
from frameloom.data.curation.report import make_thumb
from frameloom.data.curation.scan import member_of
from frameloom.data.manifest.sources.reading import read_source
from frameloom.data.media.decode import open_video, read_clip
from frameloom.data.media.tar_members import Member, find_media
from frameloom.data.media.writing import write_video
from frameloom.studio.data.clip_table import PAGE_ROWS, ClipTable, Page
from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.markup import note, safe

THUMBS_ROUTE = "/thumbs/"
_MAX_OPEN = 3
_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif"})
_CONTAINERS, _CODECS = frozenset({".mp4", ".webm"}), frozenset({"h264", "vp8", "vp9", "av1"})
_PREVIEW_PX, _PREVIEW_FRAMES, _NUM_PREVIEWS = 480, 240, 20


class ClipMedia:
    """The manifests that were opened last, with thumbnails and playable addresses of their clips."""

    def __init__(self, context: StudioContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._open: OrderedDict[str, ClipTable] = OrderedDict()
        # Two decoders at a time: a page asks for two dozen pictures at once.
        self._slots = threading.BoundedSemaphore(2)
        self._thumb = lru_cache(maxsize=1024)(self._make_thumb)

    def open(self, path: Path) -> ClipTable:
        """A manifest that has changed on disk is read again."""
        facts = path.stat()
        key = digest_value([str(path), facts.st_mtime_ns, facts.st_size])[:24]
        with self._lock:
            if key not in self._open:
                self._open[key] = ClipTable(path, read_source(path), key)
                while len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(key)
            return self._open[key]

    def thumb(self, key: str, row: int) -> bytes | None:
        """A JPEG; None when the manifest is not open or the file cannot be read."""
        table = self._open.get(key)
        return None if table is None or not 0 <= row < table.table.height else self._thumb(key, row)

    def _make_thumb(self, key: str, row: int) -> bytes | None:
        table = self._open.get(key)
        if table is None:
            return None
        facts = table.media_facts(row)
        with self._slots:
            try:
                self._find(table, facts)
                return make_thumb(facts, table.source.root).jpeg
            except (DataError, TypeError):  # sizes that are still null: the file was not scanned
                return None

    def play_url(self, table: ClipTable, row: int) -> tuple[str, bool]:
        """(address, whether it is a video); DataError says why a clip cannot be shown."""
        facts = table.media_facts(row)
        media = self._find(table, facts)
        suffix = media.suffix.lower()
        if isinstance(media, Path) and facts.get("start_frame") is None:
            if suffix in _IMAGES:
                return self._context.file_url(media), False
            if suffix in _CONTAINERS:
                with open_video(media) as (_, stream):
                    if stream.codec_context.name in _CODECS:
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
            sides = int(facts["height"]), int(facts["width"])
            scale = min(1.0, _PREVIEW_PX / max(sides))
            height, width = (max(2, round(side * scale / 2) * 2) for side in sides)
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


_HIDDEN = {"caption", "captions", "__row", "row"}
_MAX_CELL = 300


def show_page(table: ClipTable, page: Page, edits: Mapping[int, str], chosen: int | None) -> str:
    """The rows of a page as a table; each has a button that chooses it."""
    if not page.num_rows:
        return note("No clip matches these filters.")
    rows = []
    for row in page.rows.iter_rows(named=True):
        number = int(row["row"])
        caption = edits.get(number, row["caption"] or "")
        marks = ("fl-chosen " if number == chosen else "") + ("fl-edited" if number in edits else "")
        picture = f'<img loading="lazy" alt="" src="{THUMBS_ROUTE}{table.key}/{number}">'
        size = "-" if row["width"] is None or row["height"] is None else f"{row['width']}x{row['height']}"
        frames, fps = ("-" if row[name] is None else f"{row[name]:g}" for name in ("frames", "fps"))
        rows.append(
            f'<tr data-row="{number}" class="{marks.strip()}">'
            f'<td><button type="button" aria-label="Show {safe(row["path"])}">{picture}</button></td>'
            f'<td><span class="fl-caption">{safe(_cut(caption)) or "<em>no caption</em>"}</span>'
            f'<span class="fl-path">{safe(row["path"])}</span></td>'
            f"<td>{size}</td><td>{frames}</td><td>{fps}</td></tr>"
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Clip", "Caption", "Size", "Frames", "fps"))
    return f'<table class="fl-clips"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def describe_page(page: Page) -> str:
    """Which rows of how many."""
    first = page.number * PAGE_ROWS
    last = first + page.rows.height
    words = f"{first + 1:,} to {last:,} of {page.num_rows:,}" if page.num_rows else "0 clips"
    return f'<p class="fl-pager" role="status">{words}</p>'


def show_clip(table: ClipTable, row: int, media: ClipMedia) -> str:
    """The player of one clip, or why it cannot be shown."""
    facts = table.row(row)
    try:
        url, is_video = media.play_url(table, row)
        tag = (
            f'<video src="{safe(url)}" controls loop muted autoplay playsinline preload="auto"></video>'
            if is_video
            else f'<img src="{safe(url)}" alt="{safe(_cut(facts["caption"] or facts["path"]))}">'
        )
    except DataError as error:
        tag = note(str(error), kind="bad")
    return f'<div class="fl-player">{tag}</div>'


def show_facts(table: ClipTable, row: int) -> str:
    """Everything the manifest says about one clip."""
    facts = table.row(row)
    others = {name: value for name, value in facts.items() if name not in _HIDDEN and value is not None}
    listed = "".join(f"<dt>{safe(name)}</dt><dd>{safe(_cut(value))}</dd>" for name, value in others.items())
    return f'<dl class="fl-facts"><dt>row</dt><dd>{row:,}</dd>{listed}</dl>'


def _cut(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}…"
