"""Shapes of batches that every bucket policy gives to a family, small enough to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from frameloom.builders.data import build_bucket_policy
from frameloom.config.schema.buckets import (
    SDXL_SIZES,
    FixedSection,
    GroupedSection,
    MultiAspectSection,
    RatioTokensSection,
    TokenBudgetSection,
)
from frameloom.config.schema.data import DataSection
from frameloom.data.buckets.policy import Bucket
from frameloom.models.vaes.config import LengthRule

STRIDES = (4, 8, 8)
Shape = tuple[int, int, int, int]


def list_shapes(patch: tuple[int, int, int], longest: int) -> dict[Shape, int]:
    """(batch, latent frames, height, width) of all batches, each with the tokens of one sample.

    For a causal autoencoder of `STRIDES`, a model with `patch` latent cells per token, and clips of at most `longest`
    frames. The last batch of an epoch may hold only one sample, of any bucket; here it is of the first.
    """
    rule = LengthRule(STRIDES[0], causal=True, patch=patch[0])
    shapes: dict[Shape, int] = {}
    buckets = list(_list_buckets(rule, STRIDES[1] * patch[1], longest))
    for bucket in (replace(buckets[0], batch_size=1), *buckets):
        frames, tokens = rule.latents(bucket.frames), rule.tokens(bucket.frames)
        height, width = bucket.height // STRIDES[1], bucket.width // STRIDES[2]
        tokens *= height // patch[1] * (width // patch[2])
        shapes[bucket.batch_size, frames, height, width] = tokens
    return shapes


def _list_buckets(rule: LengthRule, stride: int, longest: int) -> Iterator[Bucket]:
    lengths = rule.legal(longest)
    side, last = 4 * stride, lengths[-1]
    grid = {f"{side}px": dict.fromkeys(lengths, (1.0, 3)), f"{side + stride}px": {last: (0.5, 2)}}
    sizes = tuple((height // 128 * stride, width // 128 * stride) for height, width in SDXL_SIZES)
    sections = (
        DataSection(policy="grid", buckets=grid),
        DataSection(policy="token_budget", buckets=grid, token_budget=TokenBudgetSection(tokens=60)),
        DataSection(
            policy="ratio_tokens",
            ratio_tokens=RatioTokensSection(
                video_sample_size=side,
                image_sample_size=side,
                token_sample_size=side,
                video_sample_n_frames=last,
                train_batch_size=2,
            ),
        ),
        DataSection(
            policy="grouped", grouped=GroupedSection(num_frames=last, max_hxw=side**2, hw_stride=stride, batch=2)
        ),
        DataSection(policy="multi_aspect", multi_aspect=MultiAspectSection(sizes=sizes, frames=last)),
        DataSection(
            policy="fixed", fixed=FixedSection(height=3 * stride, width=5 * stride, frames=last, image_batch=3)
        ),
    )
    for section in sections:
        yield from build_bucket_policy(section, stride=stride, rule=rule).buckets
