"""From pixels and captions to what a cache stores; the same for a cache written ahead and one that grows in a run.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frameloom.core.errors import CacheError
from frameloom.core.files import digest_value
from frameloom.core.random import stream
from frameloom.data.batch import Batch
from frameloom.data.cache import TEXT_STACK, latent_stack
from frameloom.data.cache_keys import LATENT_KEY, Store, caption_key
from frameloom.data.cache_sources import SourceState, describe_source
from frameloom.data.shards import Group

EncodePixels = Callable[[Tensor], tuple[Tensor, Tensor | None]]
EncodeText = Callable[[list[str]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class LatentEncoder:
    """Pixels to what is stored; `encode` gives mean and standard deviation (None: there is none)."""

    encode: EncodePixels
    dtype: torch.dtype
    store: Store = "moments"
    seed: int = 0

    def run(self, pixels_BCFHW: Tensor, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        mean, std = self.encode(pixels_BCFHW)
        names = [item["path"] for item in items]
        if self.store == "sample":
            drawn = [self._draw(mean[place], std, place, item) for place, item in enumerate(items)]
            return _unbatch({"sample": torch.stack(drawn)}, self.dtype, names, "latents")
        parts = {"mean": mean} if std is None else {"mean": mean, "std": std}
        return _unbatch(parts, self.dtype, names, "latents")

    def _draw(self, mean_CFHW: Tensor, std: Tensor | None, place: int, item: Mapping[str, Any]) -> Tensor:
        """Noise of a clip's own, whatever its row or its neighbours are."""
        if std is None:
            return mean_CFHW
        identity = int(digest_value([item[name] for name in LATENT_KEY])[:15], 16)
        noise = torch.randn(mean_CFHW.shape, generator=stream(self.seed, "cached latent", identity))
        return mean_CFHW + std[place] * noise.to(mean_CFHW.device, mean_CFHW.dtype)


def _unbatch(parts: Mapping[str, Tensor], dtype: torch.dtype, names: list[str], what: str) -> list[dict[str, Tensor]]:
    """One dictionary per sample, on the host, floating point in `dtype`."""
    stored = {}
    for name, tensor in parts.items():
        if len(tensor) != len(names):
            raise ValueError(f"the encoder gave {len(tensor)} {what} for {len(names)} inputs")
        host = tensor.detach().cpu()
        stored[name] = host.to(dtype) if host.is_floating_point() else host
        if host.is_floating_point() and not stored[name].isfinite().all():
            wrong = [names[i] for i in range(len(names)) if not stored[name][i].isfinite().all()]
            raise CacheError(
                f"the encoder gave {what} that are not finite in {dtype} for {wrong[:8]}; use a wider dtype"
            )
    return [{name: tensor[place].clone() for name, tensor in stored.items()} for place in range(len(names))]


def add_latents(
    group: Group,
    items: Sequence[Mapping[str, Any]],
    states: Sequence[SourceState],
    read: Batch,
    encoder: LatentEncoder,
) -> dict[int, dict[str, Tensor]]:
    """Encode what was read of `items` into `group`; gives what was stored by row. `states` are from before reading."""
    reasons = {clip.row: clip.reason for clip in read.bad}
    good = [item for item in items if item["row"] not in reasons]
    stored: dict[int, dict[str, Tensor]] = {}
    if good:
        assert read.pixels_BCFHW is not None
        parts = encoder.run(read.pixels_BCFHW, good)
        stored = {item["row"]: part for item, part in zip(good, parts, strict=True)}
    for item, state in zip(items, states, strict=True):
        entry = {name: item[name] for name in LATENT_KEY} | describe_source(item, state)
        if item["row"] in stored:
            group.add(entry | {"reason": None}, latent_stack(read.bucket), stored[item["row"]])
        else:
            group.add_empty(entry | {"reason": reasons[item["row"]]})
    return stored


def add_captions(
    group: Group, captions: list[str], encode: EncodeText, dtype: torch.dtype
) -> dict[str, dict[str, Tensor]]:
    """Encode `captions` into `group`; gives what was stored of each."""
    parts = _unbatch(encode(captions), dtype, captions, "embeddings")
    for caption, part in zip(captions, parts, strict=True):
        group.add({"key": caption_key(caption)}, TEXT_STACK, part)
    return dict(zip(captions, parts, strict=True))
