"""Commands about autoencoders: reconstruct clips, measure latents; and loading one with the flags of these commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frameloom.core.errors import ConfigError
from frameloom.core.paths import check_output_file, check_output_folder

if TYPE_CHECKING:
    from frameloom.models.vaes.base import VideoVAE


Name = Annotated[str | None, typer.Option(help="family of published weights, such as wfvae or hunyuan")]
Size = Annotated[str | None, typer.Option(help="size of that family, such as 8ch; needed with --name")]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE, a field of its config, such as tile_px=128; repeatable")
]
Frames = Annotated[int | None, typer.Option(help="take at most this many frames; default: all")]
SampleRate = Annotated[int, typer.Option(help="take every n-th frame")]
Height = Annotated[int | None, typer.Option(help="scale and cut pictures to this height; goes with --width")]
Width = Annotated[int | None, typer.Option(help="scale and cut pictures to this width; goes with --height")]
ShortSide = Annotated[int | None, typer.Option(help="scale the short side of pictures to this, ratio kept")]
ChunkFrames = Annotated[
    int | None, typer.Option(help="encode and decode pieces of so many frames; the result is that of the whole clip")
]
TilePx = Annotated[int | None, typer.Option(help="cut larger pictures into tiles of this side; any autoencoder")]
TileOverlap = Annotated[float, typer.Option(help="share of a tile that its neighbour has too, blended")]
Root = Annotated[Path | None, typer.Option(help="paths of a table are relative to this folder")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


PrecisionOption = Annotated[Precision, typer.Option(help="dtype that the autoencoder runs in")]


def open_vae(
    weights: Path | None,
    name: str | None,
    size: str | None,
    settings: Sequence[str] | None,
    *,
    chunk_frames: int | None,
    tile_px: int | None,
    tile_overlap: float,
    precision: Precision,
    device: str,
    local_rank: int = 0,
) -> VideoVAE:
    """The chosen autoencoder on its device, with the chosen tiles, chunks and dtype."""
    from frameloom.config.loading.yaml_values import parse_value

    overrides = {}
    for word in settings or ():
        key, equals, text = word.partition("=")
        if not (key and equals):
            raise ConfigError(f"--set {word}: write --set KEY=VALUE, such as --set tile_px=128")
        overrides[key] = parse_value(text, where=f"--set {key}")
    from frameloom.builders.vae import load_vae, use_policy
    from frameloom.core.device import pick_device
    from frameloom.models.precision import Precision as Policy
    from frameloom.models.vaes.base import EncodePolicy

    place = pick_device(device)
    if place.type == "cuda" and place.index is None:
        place = pick_device(f"cuda:{local_rank}")
    loaded = load_vae(weights, name, size, overrides)
    policy = EncodePolicy(
        Policy.frozen(precision.value), chunk_frames=chunk_frames, tile_px=tile_px, tile_overlap=tile_overlap
    )
    return use_policy(loaded, policy).to(place)


def reconstruct(
    source: Annotated[Path, typer.Argument(metavar="IN", help="a video or image, a folder of them, a csv or manifest")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder for the results and metrics.json")],
    vae: Annotated[
        Path | None, typer.Option("--vae", "--weights", help="a run, a model folder, or published weights")
    ] = None,
    name: Name = None,
    size: Size = None,
    setting: Setting = None,
    frames: Frames = None,
    sample_rate: SampleRate = 1,
    fps: Annotated[float | None, typer.Option(help="frame rate of the results; default: that of the frames")] = None,
    height: Height = None,
    width: Width = None,
    short_side: ShortSide = None,
    chunk_frames: ChunkFrames = None,
    tile_px: TilePx = None,
    tile_overlap: TileOverlap = 0.25,
    precision: PrecisionOption = Precision.fp32,
    grid: Annotated[bool, typer.Option("--grid", help="original and reconstruction side by side")] = False,
    seed: Annotated[int | None, typer.Option(help="sample latents with this seed instead of taking the mean")] = None,
    lpips: Annotated[Path | None, typer.Option(help="LPIPS weights (.safetensors); adds that metric")] = None,
    root: Root = None,
    device: Device = "auto",
    force: Annotated[bool, typer.Option("--force", help="replace results of an earlier call")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the reconstruction of each clip of IN to OUT, with PSNR, SSIM and MS-SSIM in metrics.parquet and .json.

    A clip that cannot be read is listed and skipped. Several processes share the work:
    torchrun --nproc-per-node 8 -m frameloom vae reconstruct clips/ out/ --vae runs/my-vae

    Example: frameloom vae reconstruct clips/ out/ --vae runs/my-vae --grid --frames 65 --short-side 256

    Example: frameloom vae reconstruct a.mp4 out/ --weights wfvae.safetensors --name wfvae --size 8ch --chunk-frames 32
    """
    from frameloom.data.loading.clip_view import ClipView, list_clips
    from frameloom.distributed.ranks import read_ranks
    from frameloom.evaluate.autoencoder import Reconstruction, check_view, reconstruct_files
    from frameloom.evaluate.metric_table import MetricTable
    from frameloom.evaluate.pair_metrics import build_measures

    check_output_folder(out, "OUT")
    ranks = read_ranks()
    view = ClipView(frames, sample_rate, height, width, short_side)
    clips = list_clips(source, root=root)
    model = open_vae(
        vae,
        name,
        size,
        setting,
        chunk_frames=chunk_frames,
        tile_px=tile_px,
        tile_overlap=tile_overlap,
        precision=precision,
        device=device,
        local_rank=ranks.local_rank,
    )
    check_view(model, view)
    measures = build_measures(None, lpips=lpips, device=next(model.parameters()).device)
    options = Reconstruction(view, fps, grid, seed, force)
    records = reconstruct_files(model, clips, out, options, measure=measures, ranks=ranks)
    if records is None:
        return
    table = MetricTable(records, measures.columns)
    table.refuse_empty()
    table.write(out)
    if as_json:
        print(json.dumps(table.to_json(), indent=2))
        return
    for line in table.format():
        print(line)
    print(f"{out}: {len(table.good)} results, metrics.parquet and metrics.json")


def stats(
    vae: Annotated[Path, typer.Argument(metavar="VAE", help="a run, a model folder, or published weights")],
    manifest: Annotated[Path, typer.Argument(help="a video, a folder, or any list of clips that frameloom reads")],
    name: Name = None,
    size: Size = None,
    setting: Setting = None,
    frames: Frames = None,
    sample_rate: SampleRate = 1,
    height: Height = None,
    width: Width = None,
    short_side: ShortSide = None,
    chunk_frames: ChunkFrames = None,
    tile_px: TilePx = None,
    tile_overlap: TileOverlap = 0.25,
    precision: PrecisionOption = Precision.fp32,
    limit: Annotated[int | None, typer.Option(min=1, help="take this many clips, drawn from the set")] = None,
    seed: Annotated[int, typer.Option(help="which clips --limit draws")] = 0,
    out: Annotated[Path | None, typer.Option(help="also write the JSON to this file")] = None,
    root: Root = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Encode the clips of MANIFEST with VAE and print the statistics of the latents, as a denoiser would see them.

    `scale` alone gives all latents together a mean square of 1; scale and shift per channel give each channel mean 0
    and std 1. Either goes into vae.overrides of a recipe.

    Example: frameloom vae stats runs/my-vae clips/manifest.parquet --frames 33 --short-side 256 --limit 500
    """
    from frameloom.core.files import write_json
    from frameloom.data.loading.clip_view import ClipView, list_clips
    from frameloom.evaluate.autoencoder import draw_clips, format_statistics, measure_latents, report_statistics

    if out is not None:
        check_output_file(out, source=manifest)
    view = ClipView(frames, sample_rate, height, width, short_side)
    clips = draw_clips(list_clips(manifest, root=root), limit, seed)
    model = open_vae(
        vae,
        name,
        size,
        setting,
        chunk_frames=chunk_frames,
        tile_px=tile_px,
        tile_overlap=tile_overlap,
        precision=precision,
        device=device,
    )
    found, bad = measure_latents(model, clips, view)
    report = report_statistics(found, bad, num_clips=len(clips) - len(bad), now=model)
    if out is not None:
        write_json(out, report)
    for line in [json.dumps(report, indent=2)] if as_json else format_statistics(report):
        print(line)
