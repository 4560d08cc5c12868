"""Our autoencoders against the diffusers classes of the same size, and WFVAE in pieces against the whole clip.

Both sides have the same weights and the same clip. diffusers has no WFVAE, so its case says what it costs to bound the
memory. Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    BenchSettings,
    Row,
    Times,
    can_measure_peak,
    compare_numbers,
    compare_times,
    load_baseline,
    measure_or_skip,
    measure_peak_bytes,
    take_turns,
)
from frameloom.builders.vae import build_vae
from frameloom.config.schema.models import VAESection
from frameloom.core.random import stream
from frameloom.models.registry import get_vae
from frameloom.models.vaes.base import EncodePolicy, VideoVAE

_PIECE_FRAMES = 8
_CLIPS = ((9, 64, 64), (17, 64, 64), (17, 128, 128))
_LARGEST_GAP = 1e-4


def measure(bench: BenchSettings) -> Iterator[Row]:
    """All cases on clips of noise. All times come before all peaks: measuring peaks slows allocation down."""
    clips = bench.pick(_CLIPS, ((9, 32, 32),))
    for clip in clips:
        for family, build in _PAIRS.items():
            is_told = clip == clips[-1]
            yield from measure_or_skip(
                "vae", f"{family} {_format_clip(clip)}", _measure_times, build, clip, bench, is_told
            )
    for family, build in _PAIRS.items():
        yield from measure_or_skip("vae", f"{family}, memory", _measure_memory, build, clips[-1])


def _draw(clip: tuple[int, int, int]) -> Tensor:
    return torch.rand(1, 3, *clip, generator=stream(0, "vae bench")) * 2 - 1


@torch.no_grad()
def _measure_times(
    build: Callable[[], _Pair], clip: tuple[int, int, int], bench: BenchSettings, is_told: bool
) -> list[Row]:
    """Rows of encoding and of decoding; of the smaller clips only encoding, which shows how it grows."""
    _, ours, other, name, against = build()
    pixels = _draw(clip)
    gap = find_gap(ours, other, pixels)
    if gap > _LARGEST_GAP:
        raise ValueError(f"{name} and {against} should give the same, but they differ by {gap:.1e}")
    latent = ours.encode(pixels)

    def row(what: str, times: dict[str, Times], at: tuple[str, float] | None) -> Row:
        title = f"{name}: {what} {_format_clip(clip)}"
        note = f"same numbers within {gap:.0e}"
        return compare_times("vae", title, times["ours"], times["other"], against=against, note=note, at=at)

    encode = take_turns({"ours": lambda: ours.encode(pixels), "other": lambda: other.encode(pixels)}, bench.rounds)
    rows = [row("encode", encode, ("pixels", float(pixels[0, 0].numel())))]
    if is_told:
        decode = take_turns({"ours": lambda: ours.decode(latent), "other": lambda: other.decode(latent)}, bench.rounds)
        rows.append(row("decode", decode, None))
    return rows


def _measure_memory(build: Callable[[], _Pair], clip: tuple[int, int, int]) -> Iterator[Row]:
    _, ours, other, name, against = build()
    mine, theirs = (_measure_peaks(way, _draw(clip)) for way in (ours, other))
    for what, own, foreign in zip(("encode", "decode"), mine, theirs, strict=True):
        if own is not None:
            title = f"{name}: memory to {what} {_format_clip(clip)}"
            yield compare_numbers("vae", title, own, foreign, unit="B", against=against)


def _format_clip(clip: tuple[int, int, int]) -> str:
    frames, height, width = clip
    return f"{frames} frames of {width}x{height}"


@dataclass(frozen=True)
class _Way:
    """Both directions of an autoencoder, from pixels to means and back."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


_Pair = tuple[str, _Way, _Way, str, str]


def _build(name: str, **changes: Any) -> VideoVAE:
    loaded = build_vae(VAESection(name=name, size="tiny", overrides=changes), seed=0)
    return loaded.model.eval()


def _way_of(vae: VideoVAE) -> _Way:
    return _Way(lambda pixels: vae.encode(pixels).mode(), vae.decode)


def _pair_wfvae() -> _Pair:
    whole, cut = _build("wfvae"), _build("wfvae")
    cut.use(EncodePolicy(chunk_frames=_PIECE_FRAMES))
    return "wfvae", _way_of(cut), _way_of(whole), "wfvae in pieces of 8 frames", "wfvae, whole clip"


def _pair_kl() -> _Pair:
    from frameloom.models.vaes.kl.model import diffusers_arguments

    ours = _build("kl")
    other = load_baseline("diffusers").AutoencoderKL(**diffusers_arguments(get_vae("kl").sizes["tiny"])).eval()
    other.load_state_dict(ours.state_dict())

    def encode(pixels_BCFHW: Tensor) -> Tensor:
        mean: Tensor = other.encode(pixels_BCFHW.transpose(1, 2).flatten(0, 1)).latent_dist.mode()
        return torch.unflatten(mean, 0, (len(pixels_BCFHW), -1)).transpose(1, 2)

    def decode(latent_BCFHW: Tensor) -> Tensor:
        pixels: Tensor = other.decode(latent_BCFHW.transpose(1, 2).flatten(0, 1)).sample
        return torch.unflatten(pixels, 0, (len(latent_BCFHW), -1)).transpose(1, 2)

    return "kl", _way_of(ours), _Way(encode, decode), "kl", "diffusers AutoencoderKL"


def _pair_cogvideox() -> _Pair:
    # The way that diffusers cuts latents.
    ours = _build("cogvideox", decode_first_alone=False)
    config = get_vae("cogvideox").sizes["tiny"]
    other = load_baseline("diffusers").AutoencoderKLCogVideoX(
        latent_channels=config.latent_channels,
        block_out_channels=config.block_channels,
        layers_per_block=config.layers_per_block,
        norm_num_groups=config.norm_groups,
    )
    return _pair_with(ours, other, "cogvideox", "diffusers AutoencoderKLCogVideoX")


def _pair_hunyuan() -> _Pair:
    ours = _build("hunyuan")
    config = get_vae("hunyuan").sizes["tiny"]
    other = load_baseline("diffusers").AutoencoderKLHunyuanVideo(
        latent_channels=config.latent_channels,
        block_out_channels=config.block_channels,
        layers_per_block=config.layers_per_block,
        norm_num_groups=config.norm_groups,
    )
    # It would cut clips of more than 16 frames into tiles in time; ours, of this size, does not.
    other.use_framewise_encoding = other.use_framewise_decoding = False
    return _pair_with(ours, other, "hunyuan", "diffusers AutoencoderKLHunyuanVideo")


def _pair_with(ours: VideoVAE, other: Any, family: str, name: str) -> _Pair:
    other.load_state_dict(copy.copy(ours.state_dict()))
    other.eval()
    way = _Way(lambda pixels: other.encode(pixels).latent_dist.mode(), lambda latent: other.decode(latent).sample)
    return family, _way_of(ours), way, family, name


@torch.no_grad()
def _measure_peaks(way: _Way, pixels: Tensor) -> tuple[int | None, int | None]:
    if not can_measure_peak():
        return None, None
    latent = way.encode(pixels)
    return measure_peak_bytes(lambda: way.encode(pixels)), measure_peak_bytes(lambda: way.decode(latent))


@torch.no_grad()
def find_gap(ours: _Way, other: _Way, pixels: Tensor) -> float:
    """Of latents, and of pixels from the same latent."""
    latent = ours.encode(pixels)
    gaps = (latent - other.encode(pixels), ours.decode(latent) - other.decode(latent))
    return max(float(gap.abs().max()) for gap in gaps)


_PAIRS: dict[str, Callable[[], _Pair]] = {
    "wfvae": _pair_wfvae,
    "kl": _pair_kl,
    "cogvideox": _pair_cogvideox,
    "hunyuan": _pair_hunyuan,
}
