"""Builds the corpus of bad and odd media files; `bad_files.json` says what scanning and decoding must make of each.

A file is made from its name in the table. Clips have 12 frames of 64 x 48 unless the name says otherwise.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, PngImagePlugin

FRAMES = 12
Builder = Callable[[Path], None]
_BUILDERS: dict[str, Builder] = {}


def build_bad_files(folder: Path) -> dict[str, Path]:
    """Every file of the corpus below `folder`, by name. Neighbours that a hostile file points to are there too."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_clip(folder / "neighbour.mp4")
    _write_clip(folder.parent / "outside.mp4")
    for name, build in _BUILDERS.items():
        build(folder / name)
    return {name: folder / name for name in _BUILDERS}


def _file(*names: str) -> Callable[[Builder], Builder]:
    def register(build: Builder) -> Builder:
        _BUILDERS.update(dict.fromkeys(names, build))
        return build

    return register


def _draw(number: int, height: int, width: int) -> np.ndarray:
    pixels = np.full((height, width, 3), 30, np.uint8)
    left = number * 3 % (width - 8)
    pixels[height // 4 : height // 2, left : left + 8] = (250, 60, 20)
    return pixels


def _write_clip(
    path: Path,
    *,
    frames: int = FRAMES,
    height: int = 48,
    width: int = 64,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    rotation: float | None = None,
    container: str | None = None,
    movflags: str = "",
    times: Callable[[int], int] = lambda number: number,
    options: dict[str, str] | None = None,
    audio: bool = False,
) -> Path:
    flags = {"movflags": movflags} if movflags else {}
    with av.open(str(path), "w", format=container, options=flags) as output:
        stream = output.add_stream(codec, rate=24, options=options or {"preset": "ultrafast", "crf": "18", "bf": "2"})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.thread_count = 1
        stream.codec_context.gop_size = 6
        if rotation is not None:
            stream.set_display_rotation(rotation)
        if audio:
            _write_audio(output)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(_draw(number, height, width), "rgb24")
            frame.pts, frame.time_base = times(number), Fraction(1, 24)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


def _write_audio(output: av.container.OutputContainer) -> None:
    stream = output.add_stream("aac", rate=16000, layout="mono")
    for number in range(8):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, number * 1024
        output.mux(stream.encode(frame))
    output.mux(stream.encode())


def _cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def _patch(path: Path, mark: bytes, offset: int, new: bytes, *, after: bytes = b"") -> None:
    """Overwrite bytes at `offset` behind the first `mark` (behind `after`)."""
    data = bytearray(path.read_bytes())
    place = data.index(mark, data.index(after)) + offset
    data[place : place + len(new)] = new
    path.write_bytes(data)


def _picture(width: int = 64, height: int = 48) -> Image.Image:
    return Image.fromarray(_draw(2, height, width))


# --- cut, empty and damaged videos ---


@_file("empty.mp4", "empty.png")
def _empty(path: Path) -> None:
    path.write_bytes(b"")


@_file("index_lost.mp4", "index_lost.mov")
def _index_lost(path: Path) -> None:
    _cut(_write_clip(path), 0.6)


@_file("cut_in_data.mp4")
def _cut_in_data(path: Path) -> None:
    _cut(_write_clip(path, movflags="+faststart"), 0.8)


@_file("cut.mkv")
def _cut_matroska(path: Path) -> None:
    _cut(_write_clip(path, container="matroska"), 0.7)


@_file("cut.avi")
def _cut_avi(path: Path) -> None:
    _cut(_write_clip(path, codec="mpeg4", options={"qscale": "2"}), 0.6)


@_file("cut_fragments.mp4")
def _cut_fragments(path: Path) -> None:
    _cut(_write_clip(path, movflags="frag_keyframe+empty_moov", frames=24), 0.6)


@_file("broken_moov.mp4")
def _broken_moov(path: Path) -> None:
    _write_clip(path, movflags="+faststart")
    data = path.read_bytes()
    place = data.index(b"moov") + 40
    path.write_bytes(data[:place] + bytes(255 - byte for byte in data[place : place + 400]) + data[place + 400 :])


@_file("broken_sizes.mp4")
def _broken_sizes(path: Path) -> None:
    """The table of sample sizes is overwritten with huge ones."""
    _write_clip(path)
    _patch(path, b"stsz", 12, struct.pack(">12I", *[0x7FFFFFF0] * 12))


@_file("broken_frames.mp4")
def _broken_frames(path: Path) -> None:
    """The header is right, the pictures are noise."""
    _write_clip(path)
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 4
    end = data.index(b"moov") - 4
    data[start:end] = np.random.default_rng(0).bytes(end - start)
    path.write_bytes(data)


# --- headers that lie ---


@_file("absurd_size.mp4", "zero_size.mp4")
def _absurd_size(path: Path) -> None:
    side = 65535 if "absurd" in path.name else 0
    _write_clip(path)
    _patch(path, b"avc1", 28, struct.pack(">HH", side, side), after=b"stsd")


@_file("absurd_size.mkv")
def _absurd_size_without_another(path: Path) -> None:
    """A codec that does not repeat its size in the stream."""
    _write_clip(path, codec="ffv1", width=320, height=256, options={"level": "3"})
    _patch(path, b"\xb0\x82\x01\x40", 2, struct.pack(">H", 32767))
    _patch(path, b"\xba\x82\x01\x00", 2, struct.pack(">H", 32767))


@_file("unknown_codec.mp4")
def _unknown_codec(path: Path) -> None:
    _write_clip(path)
    _patch(path, b"avc1", 0, b"zzz1", after=b"stsd")


@_file("lying_size.mp4")
def _lying_size(path: Path) -> None:
    """The track says 16 x 16, the H.264 header says 64 x 48."""
    _write_clip(path)
    _patch(path, b"avc1", 28, struct.pack(">HH", 16, 16), after=b"stsd")


@_file("claims_many_frames.avi", "claims_absurd_frames.avi")
def _claims_frames(path: Path) -> None:
    _write_clip(path, codec="mpeg4", options={"qscale": "2"})
    claim = 100_000 if "many" in path.name else 2_000_000_000
    # strh: type 4, handler 4, flags 4, priority 4, initial 4, scale 4, rate 4, start 4, then the length
    _patch(path, b"strh", 8 + 32, struct.pack("<I", claim))


@_file("claims_hours.mkv")
def _claims_hours(path: Path) -> None:
    """The duration in the segment's header is raised to a hundred hours."""
    _write_clip(path)
    _patch(path, b"\x44\x89\x88", 3, struct.pack(">d", 100 * 3600 * 1000.0))


# --- not what the ending says ---


@_file("text.mp4", "text.jpg")
def _text(path: Path) -> None:
    path.write_text("this is not a media file\n" * 50)


@_file("random.mp4")
def _random(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(20_000))


@_file("script.mp4", "script.mkv")
def _script(path: Path) -> None:
    path.write_text("ffconcat version 1.0\nfile 'neighbour.mp4'\n")


@_file("playlist.mp4", "playlist.avi")
def _playlist(path: Path) -> None:
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1,\nneighbour.mp4\n#EXT-X-ENDLIST\n")


@_file("picture.mp4")
def _picture_as_video(path: Path) -> None:
    _picture().save(path, format="PNG")


@_file("video.png")
def _video_as_picture(path: Path) -> None:
    _write_clip(path, container="mp4")


@_file("matroska.mp4")
def _matroska_as_mp4(path: Path) -> None:
    _write_clip(path, container="matroska")


@_file("jpeg.png")
def _jpeg_as_png(path: Path) -> None:
    _picture().save(path, format="JPEG")


@_file("animation.gif")
def _gif(path: Path) -> None:
    _picture().save(path, save_all=True, append_images=[Image.fromarray(_draw(5, 48, 64))])


@_file("vector.svg")
def _svg(path: Path) -> None:
    path.write_text('<svg xmlns="http://www.w3.org/2000/svg"><image href="neighbour.png"/></svg>')


# --- streams ---


@_file("audio_only.mp4", "audio_only.mkv")
def _audio_only(path: Path) -> None:
    with av.open(str(path), "w") as output:
        _write_audio(output)


@_file("with_sound.mp4")
def _with_sound(path: Path) -> None:
    _write_clip(path, audio=True)


@_file("no_frames.mp4")
def _no_frames(path: Path) -> None:
    with av.open(str(path), "w", options={"movflags": "empty_moov"}) as output:
        stream = output.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        output.start_encoding()


@_file("changing_size.avi")
def _changing_size(path: Path) -> None:
    """Six frames of 64 x 48 and then six of 96 x 64 in one stream."""
    packets = []
    for height, width in ((48, 64), (64, 96)):
        part = path.with_name(f".part{height}.avi")
        _write_clip(part, frames=6, height=height, width=width, codec="mpeg4", options={"qscale": "2"})
        with av.open(str(part), format="avi") as source:
            packets += [bytes(packet) for packet in source.demux(video=0) if packet.size]
        part.unlink()
    with av.open(str(path), "w") as output:
        stream = output.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.open()
        for number, data in enumerate(packets):
            packet = av.Packet(data)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 24)
            output.mux(packet)


# --- odd but right ---


@_file("turned_90.mp4", "turned_180.mp4", "turned_270.mkv")
def _turned(path: Path) -> None:
    _write_clip(path, rotation=float(path.stem.split("_")[1]))


@_file("one_frame.mp4")
def _one_frame(path: Path) -> None:
    _write_clip(path, frames=1)


@_file("odd_size.mp4")
def _odd_size(path: Path) -> None:
    _write_clip(path, height=47, width=63, pix_fmt="yuv444p")


@_file("uneven_times.mp4", "uneven_times.mkv")
def _uneven_times(path: Path) -> None:
    _write_clip(path, times=lambda number: number * (number + 1) // 2)


@_file("starts_before_zero.mp4")
def _starts_before_zero(path: Path) -> None:
    _write_clip(path, times=lambda number: number - 5)


@_file("starts_late.mp4")
def _starts_late(path: Path) -> None:
    _write_clip(path, times=lambda number: number + 50)


@_file("fragments.mp4")
def _fragments(path: Path) -> None:
    _write_clip(path, movflags="frag_keyframe", frames=24)


@_file("ten_bits.mp4")
def _ten_bits(path: Path) -> None:
    _write_clip(path, pix_fmt="yuv420p10le")


@_file("vp9.webm")
def _vp9(path: Path) -> None:
    _write_clip(path, codec="libvpx-vp9", options={"cpu-used": "8", "deadline": "realtime"})


@_file("CAPITALS.MP4")
def _capitals(path: Path) -> None:
    _write_clip(path, container="mp4")


# --- images ---


@_file("cut.png", "cut.jpg", "cut.webp")
def _cut_image(path: Path) -> None:
    pixels = np.random.default_rng(2).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    _cut(path, 0.6)


@_file("bomb.png")
def _bomb(path: Path) -> None:
    """A few bytes that claim 60000 x 60000 pixels."""
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


@_file("text_bomb.png")
def _text_bomb(path: Path) -> None:
    """A compressed text chunk that unpacks to more than is allowed."""
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "a" * 5_000_000, zip=True)
    _picture().save(path, pnginfo=info)


@_file("animated.png", "animated.webp")
def _animated(path: Path) -> None:
    more = [Image.fromarray(_draw(number, 48, 64)) for number in (5, 8)]
    _picture().save(path, save_all=True, append_images=more, duration=50)


@_file("sixteen_bits.png")
def _sixteen_bits(path: Path) -> None:
    Image.fromarray(np.linspace(0, 65535, 64 * 48).reshape(48, 64).astype(np.uint16)).save(path)


@_file("cmyk.jpg")
def _cmyk(path: Path) -> None:
    _picture().convert("CMYK").save(path)


@_file("palette.png")
def _palette(path: Path) -> None:
    _picture().convert("P").save(path, transparency=0)


@_file("turned.jpg")
def _turned_image(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    _picture().save(path, exif=exif)


@_file("one_pixel.png")
def _one_pixel(path: Path) -> None:
    Image.new("RGB", (1, 1), (9, 9, 9)).save(path)


@_file("ribbon.png")
def _ribbon(path: Path) -> None:
    """One pixel high: scaled to cover a bucket it would be gigantic."""
    Image.new("RGB", (60000, 1)).save(path)


# --- the file system ---


@_file("missing.mp4")
def _missing(path: Path) -> None:
    """Nothing is made."""


@_file("folder.mp4")
def _folder(path: Path) -> None:
    path.mkdir()


@_file("pipe.mp4", "pipe.png")
def _pipe(path: Path) -> None:
    os.mkfifo(path)


@_file("link_outside.mp4")
def _link_outside(path: Path) -> None:
    path.symlink_to("../outside.mp4")


@_file("link_inside.mp4")
def _link_inside(path: Path) -> None:
    path.symlink_to("neighbour.mp4")


@_file("link_to_nothing.mp4")
def _link_to_nothing(path: Path) -> None:
    path.symlink_to("gone.mp4")


@_file("link_to_itself.mp4")
def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@_file("a name\nwith a line, 'quotes' & <b>marks é.mp4")
def _odd_name(path: Path) -> None:
    _write_clip(path)


@_file(f"{'long' * 70}.mp4")
def _long_name(path: Path) -> None:
    """Longer than a file system allows; nothing is made."""
