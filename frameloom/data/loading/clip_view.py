"""Single clips of any source, read one after the other and not in batches, for reconstruction and evaluation.

Training reads clips through buckets; here a clip keeps its own size and length unless a view says otherwise.
Shape letters: C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.data.manifest.sources.media_files import has_media, read_media_folder
from frameloom.data.manifest.sources.reading import read_source
from frameloom.data.media.decode import ClipError, kind_of, read_clip, read_image
from frameloom.data.media.frames import FrameRule, Window, select_frames
from frameloom.data.media.probe import probe_header
from frameloom.data.media.tar_members import find_media
from frameloom.data.media.transforms import ResizeCrop, cover_rule
from frameloom.data.media.writing import CONTACT_SHEET


@dataclass(frozen=True)
class ListedClip:
    """A row of a source, not opened yet. `name` is its path there, which names its results."""

    name: str
    root: Path
    path: str
    member: tuple[str, int, int] | None = None
    window: Window | None = None


def list_clips(source: Path, *, root: Path | None = None) -> list[ListedClip]:
    """One media file, a folder of them, or any table or tar that `read_source` reads; in its order.

    The contact sheet of a folder of samples is none of its clips.
    """
    if source.is_file() and kind_of(source) is not None:
        return [ListedClip(source.name, source.parent, source.name)]
    if source.is_dir() and has_media(source):
        # Tables beside the clips are not asked: results of an earlier call lie next to their metrics.
        names = [name for name in read_media_folder(source)["path"] if Path(name).name != CONTACT_SHEET]
        return [ListedClip(name, source, name) for name in names]
    found = read_source(source, root=root)
    has = set(found.table.columns)
    clips = []
    for row in found.table.iter_rows(named=True):
        path, name = str(row["path"]), str(row["path"])
        member = window = None
        if {"member", "offset", "bytes"} <= has and row["offset"] is not None:
            member = (str(row["member"]), int(row["offset"]), int(row["bytes"]))
            name = f"{path}/{member[0]}"
        if "start_frame" in has and row["start_frame"] is not None:
            window = Window(int(row["start_frame"]), int(row["start_frame"]) + int(row["frames"] or 1 << 40))
            name = f"{Path(name).with_suffix('')}-frame{window.start}{Path(name).suffix}"
        clips.append(ListedClip(name, found.root, path, member, window))
    return clips


@dataclass(frozen=True)
class ClipView:
    """Which part of a clip is read, and at which size.

    `frames` is the most that are taken, from the first on, every `sample_rate`-th. `height` and `width` scale a picture
    to cover that size and cut its middle out; `short_side` scales it with its ratio kept; else it keeps its size.
    """

    frames: int | None = None
    sample_rate: int = 1
    height: int | None = None
    width: int | None = None
    short_side: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if (self.height is None) != (self.width is None):
            problems.append("--height and --width go together; give both, or --short-side alone")
        elif self.height is not None and self.short_side is not None:
            problems.append("--short-side follows from --height and --width; leave one of them out")
        for name in ("frames", "sample_rate", "height", "width", "short_side"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
        if problems:
            raise ConfigError(problems)

    def crop(self, height: int, width: int, multiples: tuple[int, int] = (1, 1)) -> tuple[ResizeCrop, int, int]:
        """(how a picture of `height` x `width` is scaled and cut, height and width of the result).

        The result is cut down to `multiples`; it has a side of 0 when the picture is too small for them.
        """
        if self.height is not None and self.width is not None:
            return cover_rule(self.height, self.width)(height, width), self.height, self.width
        if self.short_side is not None:
            factor = self.short_side / min(height, width)
            height, width = (max(self.short_side, round(side * factor)) for side in (height, width))
        kept = (height // multiples[0] * multiples[0], width // multiples[1] * multiples[1])
        return ResizeCrop(height, width, (height - kept[0]) // 2, (width - kept[1]) // 2), *kept


@dataclass(frozen=True)
class ViewedClip:
    """Pixels are uint8; `fps` is that of the frames that were taken, None for an image."""

    pixels_CFHW: Tensor
    fps: float | None


def view_clip(
    clip: ListedClip,
    view: ClipView,
    *,
    multiples: tuple[int, int] = (1, 1),
    usable_frames: Callable[[int], int] = lambda available: available,
) -> ViewedClip:
    """Read a clip; `usable_frames` says how many of the available frames can be used. ClipError if it is too small."""
    media = find_media(clip.root, clip.path, clip.member)  # refuses what lies outside of the root
    facts = probe_header(media)
    _, height, width = view.crop(facts.height, facts.width, multiples)
    if not height or not width:
        raise ClipError(
            f"{media}: {facts.width}x{facts.height} pixels, which holds no multiple of {multiples[1]}x{multiples[0]}; "
            "scale it up with --short-side, or leave it out"
        )

    def crop(from_height: int, from_width: int) -> ResizeCrop:
        return view.crop(from_height, from_width, multiples)[0]

    if facts.kind == "image":
        return ViewedClip(read_image(media, height=height, width=width, crop_rule=crop), None)
    window = clip.window or Window(0, facts.frames)
    window = Window(window.start, min(window.end, facts.frames))
    available = -(-(window.end - window.start) // view.sample_rate)
    if available < 1:
        raise ClipError(f"{media}: {facts.frames} frames, its row begins at frame {window.start}; check the manifest")
    num_frames = usable_frames(min(available, view.frames or available))
    rule = FrameRule(stride=view.sample_rate)
    indices = select_frames(window, num_frames, fps=facts.fps or 0.0, rule=rule)
    pixels_CFHW = read_clip(media, indices=indices, height=height, width=width, crop_rule=crop)
    return ViewedClip(pixels_CFHW, (facts.fps or 1.0) / view.sample_rate)
