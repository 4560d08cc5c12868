"""Reconstructions of clips by an autoencoder, and statistics of its latents.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from frameloom.builders.vae import check_frames
from frameloom.core.errors import ConfigError, DataError
from frameloom.core.progress import ProgressBar
from frameloom.core.random import numpy_stream, stream
from frameloom.data.loading.clip_view import ClipView, ListedClip, ViewedClip, view_clip
from frameloom.data.media.transforms import to_signed_range, to_uint8
from frameloom.data.media.writing import write_image, write_video
from frameloom.distributed.ranks import Ranks
from frameloom.evaluate.metric_table import DOCUMENT, TABLE
from frameloom.models.vaes.base import LatentStatistics, VideoVAE
from frameloom.sampling.batch import join_ranks

# (ours, reference), both BCFHW in [-1, 1] -> numbers by name; None where a metric does not apply
Measure = Callable[[Tensor, Tensor], Mapping[str, float | None]]
_IMAGE_FPS = 1.0


@dataclass(frozen=True)
class Reconstruction:
    """How clips are read and written. `fps` is the rate that results play at; None keeps the one of the clip.

    `grid` puts the original to the left of its reconstruction; `seed` samples the latent instead of taking its mean.
    """

    view: ClipView = field(default_factory=ClipView)
    fps: float | None = None
    grid: bool = False
    seed: int | None = None
    force: bool = False


def reconstruct_files(
    vae: VideoVAE,
    clips: Sequence[ListedClip],
    out: Path,
    options: Reconstruction,
    *,
    measure: Measure,
    ranks: Ranks | None = None,
) -> list[dict[str, Any]] | None:
    """Write the reconstruction of each clip below `out`, and give a record for each, in order.

    A clip that cannot be read gets a record with its `error`, and the rest goes on. Of several processes each takes its
    share; the first gets all records, the others None.
    """
    check_view(vae, options.view)
    if options.fps is not None and options.fps <= 0:
        raise ConfigError(f"--fps is {options.fps:g}; it must be above 0")
    targets = [out / name for name in name_results([clip.name for clip in clips])]
    _refuse_existing(out, targets, options.force)
    items = [(index, *pair) for index, pair in enumerate(zip(clips, targets, strict=True))]
    with join_ranks(ranks or Ranks()) as group:
        group.context.barrier()
        share = group.ranks.share(items)
        records = []
        with ProgressBar("reconstructing", len(share)) as bar:
            for index, clip, target in share:
                record = {"index": index, "name": clip.name}
                records.append(record | _reconstruct(vae, clip, index, target, out, options, measure))
                bar.advance(note=clip.name)
        everyone = [record for part in group.context.gather(records) for record in part]
    return sorted(everyone, key=lambda record: int(record["index"])) if group.ranks.is_first else None


def check_view(vae: VideoVAE, view: ClipView) -> None:
    """ConfigError before anything is read when no clip could be encoded at the requested size or length."""
    check_frames(vae, view.frames)
    for name, stride in (("height", vae.strides[1]), ("width", vae.strides[2])):
        side = getattr(view, name)
        if side is not None and side % stride:
            raise ConfigError(f"--{name} {side}: this autoencoder takes multiples of {stride}")


def read_for(vae: VideoVAE, clip: ListedClip, view: ClipView) -> ViewedClip:
    """A clip cut to what the autoencoder can take."""
    return view_clip(clip, view, multiples=vae.strides[1:], usable_frames=vae.usable_frames)


def name_results(names: Sequence[str]) -> list[str]:
    """Where results belong: the path of each clip without its ending; the ending, then a number, tell equals apart.

    A result ends with .mp4, or .png when it has one frame, which is known once the clip was read.
    """
    taken: set[str] = set()
    found = []
    for name in names:
        path = PurePosixPath(name)
        inner = PurePosixPath(*(part for part in path.parts if part not in ("..", "/", ".")))
        plain = str(inner.with_suffix(""))
        tries: Iterator[str] = iter([plain, f"{plain}-{inner.suffix.lstrip('.')}"])
        choice, again = next(tries), 2
        while choice.lower() in taken:
            choice = next(tries, "") or f"{plain}-{again}"
            again += 1
        taken.add(choice.lower())
        found.append(choice)
    return found


def _refuse_existing(out: Path, targets: Sequence[Path], force: bool) -> None:
    """DataError when a result would replace a file; nothing has been written then."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; results and their metrics go to a folder: choose another name")
    if force or not out.exists():
        return
    files = [out / TABLE, out / DOCUMENT]
    files += [target.with_name(target.name + suffix) for target in targets for suffix in (".mp4", ".png")]
    present = [file for file in files if file.exists()]
    if present:
        more = f" and {len(present) - 1} more of these files" if len(present) > 1 else ""
        raise DataError(f"{present[0]}{more} exist; choose another folder, or replace them with --force")


def _reconstruct(
    vae: VideoVAE, listed: ListedClip, index: int, target: Path, out: Path, options: Reconstruction, measure: Measure
) -> dict[str, Any]:
    try:
        clip = read_for(vae, listed, options.view)
        pixels = to_signed_range(clip.pixels_CFHW[None])
        decoded = reconstruct(vae, pixels, options.seed, index).clamp(-1, 1)
        numbers = measure(decoded, pixels)
        shown_CFHW = to_uint8(decoded[0])
        if options.grid:
            shown_CFHW = torch.cat([clip.pixels_CFHW, shown_CFHW], dim=3)
        frames_FHWC = shown_CFHW.permute(1, 2, 3, 0).numpy()
        path = target.with_name(f"{target.name}.{'png' if len(frames_FHWC) == 1 else 'mp4'}")
        if len(frames_FHWC) == 1:
            write_image(path, frames_FHWC[0])
        else:
            write_video(path, frames_FHWC, options.fps or clip.fps or _IMAGE_FPS)
    except DataError as error:
        return {"error": str(error)}
    _, _, frames, height, width = pixels.shape
    facts = {"file": path.relative_to(out).as_posix(), "frames": frames, "height": height, "width": width}
    return facts | dict(numbers) | {"error": None}


@torch.no_grad()
def reconstruct(vae: VideoVAE, pixels_BCFHW: Tensor, seed: int | None = None, index: int = 0) -> Tensor:
    """Pixels there and back, float32 on the host; the same `seed` and `index` draw the same latent."""
    weight = next(vae.parameters())
    moments = vae.encode(pixels_BCFHW.to(weight))
    latent = moments.mode()
    if seed is not None:
        noise = torch.randn(latent.shape, generator=stream(seed, "reconstruct", index))
        latent = moments.sample(noise.to(latent))
    decoded = vae.decode(latent).float().cpu()
    if decoded.shape != pixels_BCFHW.shape:
        raise DataError(
            f"a clip of {pixels_BCFHW.shape[2]} frames came back with {decoded.shape[2]}; choose another --frames, or "
            "another way of decoding (decode_first_alone)"
        )
    return decoded


def measure_latents(
    vae: VideoVAE, clips: Sequence[ListedClip], view: ClipView
) -> tuple[LatentStatistics, list[tuple[str, str]]]:
    """Statistics of the latents of all clips, and (name, reason) of those that could not be read."""
    check_view(vae, view)
    found, bad = LatentStatistics(vae.latent_channels), []
    weight = next(vae.parameters())
    with ProgressBar("encoding", len(clips)) as bar:
        for clip in clips:
            try:
                pixels = to_signed_range(read_for(vae, clip, view).pixels_CFHW[None])
                with torch.no_grad():
                    found.add(vae.encode(pixels.to(weight)))
            except DataError as error:
                bad.append((clip.name, str(error)))
            bar.advance(note=clip.name)
    if not found.count:
        raise DataError(f"no clip could be encoded; the first reason: {bad[0][1] if bad else 'there is none'}")
    return found, bad


def draw_clips(clips: Sequence[ListedClip], limit: int | None, seed: int) -> list[ListedClip]:
    """At most `limit` of them, in their order; the same seed draws the same ones."""
    if limit is None or limit >= len(clips):
        return list(clips)
    chosen = numpy_stream(seed, "latent statistics").choice(len(clips), limit, replace=False)
    return [clips[int(index)] for index in sorted(chosen)]


def report_statistics(
    found: LatentStatistics, bad: Sequence[tuple[str, str]], *, num_clips: int, now: VideoVAE
) -> dict[str, Any]:
    """All numbers by name; `now` is the autoencoder, whose current scaling is reported beside the measured one."""
    scale_C, shift_C = found.scale_per_channel()
    return {
        "clips": num_clips,
        "cells": found.count,
        "mean": found.mean_C.tolist(),
        "std": found.std_C.tolist(),
        "posterior_std": found.posterior_std_C.tolist(),
        "scale": found.scale_for_all(),
        "per_channel": {"scale": scale_C.tolist(), "shift": shift_C.tolist()},
        "now": {"scale": now.scale.tolist(), "shift": now.shift.tolist()},
        "bad": [{"name": name, "error": error} for name, error in bad],
    }


def format_statistics(report: dict[str, Any]) -> list[str]:
    lines = [
        f"latents of {report['clips']} clips, {report['cells']:,} cells",
        f"{'channel':>7}{'mean':>12}{'std':>12}{'posterior':>12}{'scale':>12}{'scale now':>12}",
    ]
    columns = (report["mean"], report["std"], report["posterior_std"], report["per_channel"]["scale"])
    for channel, numbers in enumerate(zip(*columns, report["now"]["scale"], strict=True)):
        lines.append(f"{channel:>7}" + "".join(f"{number:>12.5f}" for number in numbers))
    per_channel = {
        name: ", ".join(f"{number:.6g}" for number in report["per_channel"][name]) for name in ("scale", "shift")
    }
    lines += [
        f"one scale for all channels, no shift: {report['scale']:.6g}",
        f"  vae.overrides: {{scale: [{report['scale']:.6g}], shift: [0.0]}}",
        "or mean 0 and std 1 in each channel:",
        f"  vae.overrides: {{scale: [{per_channel['scale']}], shift: [{per_channel['shift']}]}}",
    ]
    if report["bad"]:
        lines.append(f"{len(report['bad'])} clips could not be used:")
        lines += [f"  {item['error']}" for item in report["bad"]]
    return lines
