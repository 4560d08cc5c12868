"""Our autoencoders against the diffusers classes of the same size, and WFVAE in pieces against the whole clip.

Both sides have the same weights and take turns on the same clip within one run; medians are compared. diffusers has no
WFVAE, so its case says what it costs to bound the memory. Shape letters: B batch, C channels, F frames, H height,
W width.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from frameloom.bench.memory import can_measure, measure_peak_bytes
from frameloom.config.schema import VAESection
from frameloom.core.random import stream
from frameloom.generate.parts import build_vae
from frameloom.models.vaes import VideoVAE, get_vae
from frameloom.models.vaes.wfvae import WFVAE

_PIECE_FRAMES, _PIECE_LATENTS = 8, 2
_FIXED_FRAMES = 17


@dataclass(frozen=True)
class Cost:
    """Median seconds of one clip, and bytes at the peak; None where the system does not tell them."""

    encode_s: float
    decode_s: float
    encode_bytes: int | None
    decode_bytes: int | None


@dataclass(frozen=True)
class Duel:
    """One autoencoder two ways."""

    family: str
    ours_name: str
    other_name: str
    ours: Cost
    other: Cost
    largest_difference: float

    def ratio(self, field: str) -> float | None:
        """Other over ours: above 1 ours is faster, or takes less memory."""
        ours, other = getattr(self.ours, field), getattr(self.other, field)
        return None if not ours or other is None else other / ours


@dataclass(frozen=True)
class VAEComparison:
    duels: tuple[Duel, ...]
    clip: tuple[int, int, int]
    rounds: int

    def to_json(self) -> dict[str, object]:
        fields = [field.name for field in dataclasses.fields(Cost)]
        duels = [{**asdict(duel), "ratios": {name: duel.ratio(name) for name in fields}} for duel in self.duels]
        return {"duels": duels, "clip": list(self.clip), "rounds": self.rounds}

    def describe(self) -> list[str]:
        frames, height, width = self.clip
        lines = [
            f"tiny autoencoders, {frames} frames of {width}x{height}, {self.rounds} rounds in turn, medians",
            f"{'':36}{'encode/s':>10}{'decode/s':>10}{'enc. peak':>11}{'dec. peak':>11}",
        ]
        for duel in self.duels:
            for name, cost in ((duel.ours_name, duel.ours), (duel.other_name, duel.other)):
                lines.append(f"{name:<36}{_rate(frames, cost)}{_peak(cost.encode_bytes)}{_peak(cost.decode_bytes)}")
            words = [_spell(duel.ratio(field)) for field in ("encode_s", "decode_s", "encode_bytes", "decode_bytes")]
            lines.append(
                f"  the second takes {words[0]} and {words[1]} the time, {words[2]} and {words[3]} the memory; largest "
                f"difference {duel.largest_difference:.1e}"
            )
        return lines


def compare_vaes(rounds: int = 5, *, clip: tuple[int, int, int] = (_FIXED_FRAMES, 64, 64)) -> VAEComparison:
    """All cases on one clip of noise; frames per second are of pixels."""
    pixels = torch.rand(1, 3, *clip, generator=stream(0, "vae bench")) * 2 - 1
    builders = (_pair_wfvae, _pair_kl, _pair_cogvideox, _pair_hunyuan)
    sides = [build() for build in builders]
    # All times come before all peaks: measuring peaks slows allocation down.
    timed = [_time_both((ours, other), pixels, rounds) for _, ours, other, _, _ in sides]
    duels = []
    for (family, ours, other, ours_name, other_name), seconds in zip(sides, timed, strict=True):
        peaks = [_measure_peaks(way, pixels) for way in (ours, other)]
        mine, theirs = (Cost(*pair, *peak) for pair, peak in zip(seconds, peaks, strict=True))
        gap = _largest_gap(ours, other, pixels)
        duels.append(Duel(family, ours_name, other_name, mine, theirs, gap))
    return VAEComparison(tuple(duels), clip, rounds)


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
    assert isinstance(cut, WFVAE)
    cut.enable_chunking(encode_frames=_PIECE_FRAMES, decode_frames=_PIECE_LATENTS)
    return "wfvae", _way_of(cut), _way_of(whole), "wfvae in pieces of 8 frames", "wfvae, whole clip"


def _pair_kl() -> _Pair:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    from frameloom.models.vaes.kl.model import diffusers_arguments

    ours = _build("kl")
    other = AutoencoderKL(**diffusers_arguments(get_vae("kl").sizes["tiny"])).eval()
    other.load_state_dict(ours.state_dict())

    def encode(pixels_BCFHW: Tensor) -> Tensor:
        mean: Tensor = other.encode(pixels_BCFHW.transpose(1, 2).flatten(0, 1)).latent_dist.mode()
        return torch.unflatten(mean, 0, (len(pixels_BCFHW), -1)).transpose(1, 2)

    def decode(latent_BCFHW: Tensor) -> Tensor:
        pixels: Tensor = other.decode(latent_BCFHW.transpose(1, 2).flatten(0, 1)).sample
        return torch.unflatten(pixels, 0, (len(latent_BCFHW), -1)).transpose(1, 2)

    return "kl", _way_of(ours), _Way(encode, decode), "kl", "diffusers AutoencoderKL"


def _pair_cogvideox() -> _Pair:
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX

    # The way that diffusers cuts latents.
    ours = _build("cogvideox", decode_first_alone=False)
    config = get_vae("cogvideox").sizes["tiny"]
    other = AutoencoderKLCogVideoX(
        latent_channels=config.latent_channels,
        block_out_channels=config.block_channels,
        layers_per_block=config.layers_per_block,
        norm_num_groups=config.norm_groups,
    )
    return _pair_with(ours, other, "cogvideox", "diffusers AutoencoderKLCogVideoX")


def _pair_hunyuan() -> _Pair:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo

    ours = _build("hunyuan")
    config = get_vae("hunyuan").sizes["tiny"]
    other = AutoencoderKLHunyuanVideo(
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
def _time_both(ways: tuple[_Way, _Way], pixels: Tensor, rounds: int) -> list[tuple[float, float]]:
    """Median seconds (encode, decode) of each way, in turns; a first round warms up."""
    latent = ways[0].encode(pixels)
    found: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds + 1):
        for side, way in enumerate(ways):
            pair = _clock(way.encode, pixels), _clock(way.decode, latent)
            if number:
                found[side].append(pair)
    return [(statistics.median(a for a, _ in side), statistics.median(b for _, b in side)) for side in found]


def _clock(work: Callable[[Tensor], object], tensor: Tensor) -> float:
    started = time.perf_counter()
    work(tensor)
    return time.perf_counter() - started


@torch.no_grad()
def _measure_peaks(way: _Way, pixels: Tensor) -> tuple[int | None, int | None]:
    if not can_measure():
        return None, None
    latent = way.encode(pixels)
    return measure_peak_bytes(lambda: way.encode(pixels)), measure_peak_bytes(lambda: way.decode(latent))


@torch.no_grad()
def _largest_gap(ours: _Way, other: _Way, pixels: Tensor) -> float:
    """Of latents, and of pixels from the same latent."""
    latent = ours.encode(pixels)
    gaps = (latent - other.encode(pixels), ours.decode(latent) - other.decode(latent))
    return max(float(gap.abs().max()) for gap in gaps)


def _rate(frames: int, cost: Cost) -> str:
    return f"{frames / cost.encode_s:>10.1f}{frames / cost.decode_s:>10.1f}"


def _peak(num_bytes: int | None) -> str:
    return f"{'-':>11}" if num_bytes is None else f"{num_bytes / 2**20:>7.1f} MiB"


def _spell(ratio: float | None) -> str:
    return "?" if ratio is None else f"{ratio:.2f}x"
