"""Options that the commands of `frameloom vae` and `frameloom eval` share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frameloom.core.errors import ConfigError

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


PrecisionOption = Annotated[Precision, typer.Option(help="number format that the autoencoder runs in")]


def parse_settings(words: Sequence[str] | None) -> dict[str, Any]:
    """`--set tile_px=128` as a value by name."""
    from frameloom.config.yaml_values import parse_value

    settings = {}
    for word in words or ():
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise ConfigError(f"--set {word}: write --set KEY=VALUE, such as --set tile_px=128")
        settings[name] = parse_value(text, where=f"--set {name}")
    return settings


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
    """The autoencoder that a person chose, cut as they asked, on its device."""
    overrides = parse_settings(settings)
    from frameloom.generate.autoencoders import PRECISIONS, Cuts, VAEChoice, cut_vae, load_vae
    from frameloom.generate.parts import pick_device

    place = pick_device(device)
    if place.type == "cuda" and place.index is None:
        place = pick_device(f"cuda:{local_rank}")
    loaded = load_vae(VAEChoice(weights, name, size, overrides))
    vae = cut_vae(loaded, Cuts(chunk_frames, tile_px, tile_overlap))
    return vae.to(place, PRECISIONS[precision.value])
