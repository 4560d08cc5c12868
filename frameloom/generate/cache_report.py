"""What skipping blocks costs and gains, measured on one request."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from frameloom.generate.block_cache import CacheCount
from frameloom.generate.given import read_given
from frameloom.generate.pipeline import Request, Sampler, decode, draw_noise, encode_prompts, prepare_batch, solve


@dataclass(frozen=True)
class CacheReport:
    """`latent_error` is the distance of the latents relative to their size; `psnr` that of the frames, in dB."""

    threshold: float
    share_skipped: float
    seconds: float
    seconds_without: float
    latent_error: float
    psnr: float

    def describe(self) -> str:
        gain = self.seconds_without / max(self.seconds, 1e-9)
        return (
            f"cache_threshold {self.threshold:g}, measured on the first prompt: {self.share_skipped:.0%} of all blocks "
            f"skipped, {self.seconds:.2f} s instead of {self.seconds_without:.2f} s ({gain:.2f}x), latents off by "
            f"{self.latent_error:.2%}, frames {self.psnr:.1f} dB"
        )


def measure_cache(sampler: Sampler, request: Request) -> CacheReport:
    """Make a request twice, with and without its `cache_threshold`."""
    settings = request.settings or sampler.settings
    given = [read_given(request, settings, stride=sampler.vae.strides[0], causal=sampler.vae.causal)]
    text = encode_prompts(sampler, [request.prompt], settings)
    noise = draw_noise(sampler, [request], settings)
    prepared = prepare_batch(sampler, [request], given, settings)
    count, found = CacheCount(), []
    for chosen in (settings.model_copy(update={"cache_threshold": 0.0}), settings):
        started = time.perf_counter()
        latent = solve(sampler, text, noise, prepared, [request.seed], chosen, count=count)
        found.append((latent, time.perf_counter() - started))
    (exact, seconds_without), (cached, seconds) = found
    error = float((cached - exact).norm() / exact.norm().clamp_min(1e-12))
    frames = [decode(sampler, latent)[0].astype(np.float64) for latent in (exact, cached)]
    squared = float(np.mean((frames[0] - frames[1]) ** 2))
    psnr = math.inf if squared == 0 else 10 * math.log10(255**2 / squared)
    return CacheReport(settings.cache_threshold, count.share, seconds, seconds_without, error, psnr)
