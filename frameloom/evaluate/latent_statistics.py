"""The statistics of latents as numbers to put into a recipe, and as a table to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frameloom.core.random import numpy_stream
from frameloom.data.media.clip_view import ListedClip
from frameloom.models.vaes.base import LatentStatistics, VideoVAE


def draw_clips(clips: Sequence[ListedClip], limit: int | None, seed: int) -> list[ListedClip]:
    """At most `limit` of them, in their order; the same seed draws the same ones."""
    if limit is None or limit >= len(clips):
        return list(clips)
    chosen = numpy_stream(seed, "latent statistics").choice(len(clips), limit, replace=False)
    return [clips[int(index)] for index in sorted(chosen)]


def report_statistics(
    found: LatentStatistics, bad: Sequence[tuple[str, str]], *, num_clips: int, now: VideoVAE
) -> dict[str, Any]:
    """All numbers by name; `now` is the autoencoder, whose own scaling is told beside the measured one."""
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


def describe_statistics(report: dict[str, Any]) -> list[str]:
    lines = [
        f"latents of {report['clips']} clips, {report['cells']:,} cells",
        f"{'channel':>7}{'mean':>12}{'std':>12}{'posterior':>12}{'scale':>12}{'scale now':>12}",
    ]
    columns = (report["mean"], report["std"], report["posterior_std"], report["per_channel"]["scale"])
    for channel, numbers in enumerate(zip(*columns, report["now"]["scale"], strict=True)):
        lines.append(f"{channel:>7}" + "".join(f"{number:>12.5f}" for number in numbers))
    lines += [
        f"one scale for all channels, no shift: {report['scale']:.6g}",
        f"  vae.overrides: {{scale: [{report['scale']:.6g}], shift: [0.0]}}",
        "or mean 0 and deviation 1 in each channel:",
        f"  vae.overrides: {{scale: {_join(report['per_channel']['scale'])}, "
        f"shift: {_join(report['per_channel']['shift'])}}}",
    ]
    if report["bad"]:
        lines.append(f"{len(report['bad'])} clips could not be used:")
        lines += [f"  {item['error']}" for item in report["bad"]]
    return lines


def _join(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:.6g}' for number in numbers)}]"
