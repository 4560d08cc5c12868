"""A grid whose batch sizes follow from a number of tokens, so that all micro-batches cost about the same."""

from __future__ import annotations

import dataclasses

import numpy as np

from frameloom.data.buckets import Bucket
from frameloom.data.policies.grid import GridPolicy
from frameloom.data.policies.lengths import LengthRule


def apply_token_budget(grid: GridPolicy, tokens: int, rule: LengthRule) -> GridPolicy:
    """The same buckets with as many clips per batch as fit into `tokens`: at least 1, at most the grid's own number.

    Which clip goes where stays as it is, because a bucket's place does not depend on its batch size.
    """
    buckets = tuple(
        dataclasses.replace(
            bucket, batch_size=max(1, min(bucket.batch_size, tokens // count_tokens(bucket, grid.stride, rule)))
        )
        for bucket in grid.buckets
    )
    return dataclasses.replace(grid, buckets=buckets)


def count_tokens(bucket: Bucket, stride: int, rule: LengthRule) -> int:
    """Tokens of one clip; `stride` is pixels per token on a side."""
    in_time = int(rule.tokens(np.array([bucket.frames]))[0])
    return in_time * (bucket.height // stride) * (bucket.width // stride)
