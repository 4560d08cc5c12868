"""Encoding of cached samples: what an encoder gives of clips and captions, added to a group.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from frameloom.core.errors import CacheError
from frameloom.core.files import digest_value
from frameloom.core.random import stream
from frameloom.data.buckets.policy import Bucket
from frameloom.data.cache.keys import LATENT_KEY, caption_key
from frameloom.data.cache.shards import Group
from frameloom.data.cache.source_state import SourceState, describe_source
from frameloom.data.loading.batch import Batch

TEXT_STACK = "text"
Sample = dict[str, Tensor]
EncodePixels = Callable[[Tensor], tuple[Tensor, Tensor | None]]
EncodeText = Callable[[list[str]], Mapping[str, Tensor]]


def latent_stack(bucket: Bucket) -> str:
    return f"{bucket.frames}x{bucket.height}x{bucket.width}"


@dataclass(frozen=True)
class LatentEncoder:
    """Pixels to what is stored; `encode` gives mean and standard deviation (None: there is none)."""

    encode: EncodePixels
    dtype: torch.dtype
    store: Literal["moments", "sample"] = "moments"
    seed: int = 0

    def add(
        self, group: Group, items: Sequence[Mapping[str, Any]], states: Sequence[SourceState], read: Batch
    ) -> dict[int, Sample]:
        """Encode what was read of `items` into `group`; what was stored, by row. `states` are from before reading."""
        reasons = {clip.row: clip.reason for clip in read.bad}
        good = [item for item in items if item["row"] not in reasons]
        stored: dict[int, Sample] = {}
        if good:
            assert read.pixels_BCFHW is not None
            stored = dict(zip([item["row"] for item in good], self._encode(read.pixels_BCFHW, good), strict=True))
        for item, state in zip(items, states, strict=True):
            entry = {name: item[name] for name in LATENT_KEY} | describe_source(item, state)
            if item["row"] in stored:
                group.add(entry | {"reason": None}, latent_stack(read.bucket), stored[item["row"]])
            else:
                group.add_empty(entry | {"reason": reasons[item["row"]]})
        return stored

    def _encode(self, pixels_BCFHW: Tensor, items: Sequence[Mapping[str, Any]]) -> list[Sample]:
        mean, std = self.encode(pixels_BCFHW)
        parts = {"mean": mean} if std is None else {"mean": mean, "std": std}
        if self.store == "sample":
            drawn = []
            for number, item in enumerate(items):
                # Noise of a clip's own, whatever its row or its neighbours are.
                identity = int(digest_value([item[name] for name in LATENT_KEY])[:15], 16)
                noise = torch.randn(mean[number].shape, generator=stream(self.seed, "cached latent", identity))
                noise = noise.to(mean.device, mean.dtype)
                drawn.append(mean[number] if std is None else mean[number] + std[number] * noise)
            parts = {"sample": torch.stack(drawn)}
        return _unbatch(parts, self.dtype, [item["path"] for item in items], "latents")


@dataclass(frozen=True)
class TextEncoder:
    """Captions to tensors [B, ...] by name, of the same shape for every batch.

    Those that are not floating point (masks, token ids) keep their dtype.
    """

    encode: EncodeText
    dtype: torch.dtype

    def add(self, group: Group, captions: list[str]) -> list[Sample]:
        """Encode `captions` into `group`; what was stored of each."""
        stored = _unbatch(self.encode(captions), self.dtype, captions, "embeddings")
        for caption, sample in zip(captions, stored, strict=True):
            group.add({"key": caption_key(caption)}, TEXT_STACK, sample)
        return stored


def _unbatch(parts: Mapping[str, Tensor], dtype: torch.dtype, names: Sequence[str], what: str) -> list[Sample]:
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
    return [{name: tensor[number].clone() for name, tensor in stored.items()} for number in range(len(names))]
