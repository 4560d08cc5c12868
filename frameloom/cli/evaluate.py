"""Commands of evaluation: metrics of generated clips, and a page that compares runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frameloom.cli.vae import AsJson, Device, Frames, Height, SampleRate, ShortSide, Width
from frameloom.core.errors import ConfigError
from frameloom.core.paths import check_output_folder

if TYPE_CHECKING:
    import torch

    from frameloom.evaluate.clip_metrics import ClipMeasures


class Pairs(StrEnum):
    name = "name"
    order = "order"
    none = "none"


class IntervalKind(StrEnum):
    student = "student"
    bootstrap = "bootstrap"


def evaluate_clips(
    generated: Annotated[Path, typer.Argument(help="a video or image, a folder of them, a csv or manifest")],
    reference: Annotated[
        Path | None, typer.Argument(help="reference clips, of the same kinds; default: measure GENERATED alone")
    ] = None,
    pairs: Annotated[
        Pairs, typer.Option(help="which clips belong together: same name, same position in the list, or none")
    ] = Pairs.name,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="with commas, of pairs: psnr, ssim, ms-ssim, lpips; of GENERATED alone: motion, flicker, consistency, "
            "clip, shapes; default: all of pairs that are available, or motion and flicker"
        ),
    ] = None,
    lpips: Annotated[Path | None, typer.Option(help="LPIPS weights: VGG16 and linear heads (.safetensors)")] = None,
    features: Annotated[
        list[Path] | None,
        typer.Option(help="for FVD: features of GENERATED, then again of REFERENCE (.npy, .safetensors, or a folder)"),
    ] = None,
    frame_features: Annotated[
        list[Path] | None,
        typer.Option(help="for FID: features of the frames of GENERATED, then again of REFERENCE, as --features"),
    ] = None,
    network: Annotated[
        Path | None,
        typer.Option(
            help="a vision network (DINOv2, ViT, ... of transformers) for consistency, and FID of its features"
        ),
    ] = None,
    video_network: Annotated[
        Path | None,
        typer.Option(help="a video network (VideoMAE, TimeSformer or ViViT of transformers), for FVD of its features"),
    ] = None,
    clip: Annotated[
        Path | None, typer.Option(help="a CLIP of transformers, for the likeness of prompt and frames")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="prompts in the order of GENERATED; default: those that its files carry")
    ] = None,
    pixels: Annotated[
        bool, typer.Option("--frechet-pixels", help="Fréchet distance of coarse thumbnails; no FVD, for a quick look")
    ] = False,
    frames: Frames = None,
    sample_rate: SampleRate = 1,
    height: Height = None,
    width: Width = None,
    short_side: ShortSide = None,
    confidence: Annotated[float, typer.Option(help="of the intervals")] = 0.95,
    intervals: Annotated[
        IntervalKind, typer.Option(help="by Student's t, or by drawing the clips again and again")
    ] = IntervalKind.student,
    out: Annotated[Path | None, typer.Option(help="folder for metrics.parquet and metrics.json")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the metrics of an earlier call")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure GENERATED, alone or against REFERENCE clip by clip, and print means with confidence intervals.

    Clips that cannot be read, or differ in size or length from their pair, are listed and skipped. FVD and
    FID are Fréchet distances of features: compute one vector per clip or frame with the network of your choice, and
    give both sides, or name the network of clips with --video-network and that of frames with --network.

    Example: frameloom eval samples/ clips/ --frames 17 --height 256 --width 256 --out report/

    Example: frameloom eval samples/ clips/ --pairs none --features ours.npy --features theirs.npy

    Example: frameloom eval samples/ --metrics motion,flicker,clip --clip models/clip-vit-l --intervals bootstrap
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence {confidence:g}: choose a number between 0 and 1, such as 0.95")
    of_videos, of_frames = _two("--features", features), _two("--frame-features", frame_features)
    from frameloom.core.device import pick_device
    from frameloom.data.loading.clip_view import ClipView, list_clips
    from frameloom.evaluate.comparison import Distances, compare_sets, pair_clips
    from frameloom.evaluate.metric_table import refuse_existing_metrics
    from frameloom.evaluate.networks import load_video_network
    from frameloom.evaluate.pair_metrics import build_measures
    from frameloom.evaluate.sample_sets import find_prompts

    if video_network is not None and reference is None:
        raise ConfigError("--video-network: FVD compares two sets; give REFERENCE as well")
    if out is not None:
        check_output_folder(out, "--out")
        refuse_existing_metrics(out, force=force)
    view = ClipView(frames, sample_rate, height, width, short_side)
    place = pick_device(device)
    watcher = None if video_network is None else load_video_network(video_network, place)
    distances = Distances(pixels, of_videos, of_frames, watcher)
    has_pairs = reference is not None and pairs is not Pairs.none
    of_pairs, of_clips = _share_out(metrics, has_pairs=has_pairs, has_reference=reference is not None)
    measures = build_measures(of_pairs, lpips=lpips, device=place)
    by_itself = _build_alone(of_clips, network, clip, place, is_asked=reference is None)
    ours = list_clips(generated)
    theirs = [] if reference is None else list_clips(reference)
    listed = pair_clips(ours, theirs, pairs.value if has_pairs else "none")
    table = compare_sets(
        listed,
        measures,
        view=view,
        distances=distances,
        alone=by_itself,
        prompts=find_prompts(ours, prompts) if by_itself is not None and by_itself.needs_prompts else {},
        confidence=confidence,
        intervals=intervals.value,
    )
    table.refuse_empty()
    if out is not None:
        table.write(out)
    for line in [json.dumps(table.to_json(), indent=2)] if as_json else table.format():
        print(line)


def _two(option: str, files: list[Path] | None) -> tuple[Path, Path] | None:
    if files is None:
        return None
    if len(files) != 2:
        raise ConfigError(f"{option} is given {len(files)} time(s); give it twice: {option} OURS {option} THEIRS")
    return files[0], files[1]


def _share_out(
    metrics: str | None, *, has_pairs: bool, has_reference: bool
) -> tuple[list[str] | None, list[str] | None]:
    """The names of metrics of pairs, and those of clips alone; None stands for what is usual."""
    from frameloom.core.spelling import refuse_unknown
    from frameloom.demo.shapes_score import PROMPT_METRICS
    from frameloom.evaluate.clip_metrics import CLIP_METRICS
    from frameloom.evaluate.pair_metrics import METRICS

    if metrics is None:
        return (None if has_pairs else []), None
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    of_clips = [*CLIP_METRICS, *PROMPT_METRICS]
    for name in names:
        refuse_unknown(name, [*METRICS, *of_clips], what="metric")
    of_pairs = [name for name in names if name in METRICS]
    if of_pairs and not has_pairs:
        advice = "leave --pairs none out" if has_reference else "give REFERENCE as well"
        raise ConfigError(f"--metrics {','.join(of_pairs)}: metrics of pairs; {advice}, or ask for others")
    return of_pairs, [name for name in names if name in of_clips]


def _build_alone(
    names: list[str] | None, network: Path | None, clip: Path | None, place: torch.device, *, is_asked: bool
) -> ClipMeasures | None:
    """Metrics of clips alone; beside references only those that are asked for by name or by giving a network."""
    from frameloom.demo.shapes_score import PROMPT_METRICS
    from frameloom.evaluate.clip_metrics import build_clip_measures

    if names is None and not is_asked:
        names = [name for name, folder in (("consistency", network), ("clip", clip)) if folder is not None]
    if names == [] and network is None:
        return None
    return build_clip_measures(names, network=network, clip=clip, device=place, prompt_metrics=PROMPT_METRICS)


def compare(
    folders: Annotated[list[Path], typer.Argument(help="two or more runs, or folders that `frameloom sample` wrote")],
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("comparison.html"),
    metrics: Annotated[
        str | None,
        typer.Option(
            help="with commas, of motion, flicker, consistency, clip, shapes; default: all that are available"
        ),
    ] = None,
    network: Annotated[Path | None, typer.Option(help="a vision network of transformers, for consistency")] = None,
    clip: Annotated[Path | None, typer.Option(help="a CLIP of transformers, for the likeness to the prompt")] = None,
    shown: Annotated[int, typer.Option(min=0, help="prompts whose videos are on the page; all are measured")] = 24,
    confidence: Annotated[float, typer.Option(help="of the intervals")] = 0.95,
    force: Annotated[bool, typer.Option("--force", help="replace an earlier page")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page: a table with intervals by bootstrap, and the videos of each prompt.

    Only prompts and seeds that all folders have are compared. Of a run, the files in its folder `samples` are taken.

    Example: frameloom compare runs/before runs/after --out comparison.html
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence {confidence:g}: choose a number between 0 and 1, such as 0.95")
    if out.suffix != ".html":
        raise ConfigError(f"--out {out}: the page ends in .html; choose such a name")
    if out.exists() and not force:
        raise ConfigError(f"--out {out}: exists; choose another name, or replace it with --force")
    from frameloom.core.device import pick_device
    from frameloom.demo.shapes_score import PROMPT_METRICS
    from frameloom.evaluate.clip_metrics import build_clip_measures
    from frameloom.evaluate.sample_sets import (
        SampleSet,
        compare_samples,
        find_samples,
        format_sets,
        match_samples,
        name_folders,
        write_comparison,
    )
    from frameloom.sampling.outputs import read_frames

    found = [find_samples(folder) for folder in folders]
    sets = [SampleSet(name, samples) for name, samples in zip(name_folders(folders), found, strict=True)]
    prompts = [key.prompt for key in match_samples(sets)]
    names = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
    measures = build_clip_measures(
        names,
        network=network,
        clip=clip,
        device=pick_device(device),
        prompt_metrics=PROMPT_METRICS,
        prompts=prompts,
    )
    compared = compare_samples(sets, measures, read_frames, confidence=confidence)
    write_comparison(compared, out, read_frames, max_shown=shown)
    if as_json:
        summaries = {
            column: {samples.name: asdict(summary) for samples, summary in zip(sets, parts, strict=True)}
            for column, parts in compared.summaries().items()
        }
        print(json.dumps({"page": str(out), "prompts": len(compared.keys), "summary": summaries}, indent=2))
        return
    for line in [*format_sets(compared), f"page: {out}"]:
        print(line)
