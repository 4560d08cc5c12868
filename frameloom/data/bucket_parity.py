"""Golden cases of bucket policies: the decisions of the originals, sample by sample, with the originals' own draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from frameloom.core.parity import ParityCase, ParityOutput
from frameloom.data.policies import parity_grid, parity_grouped, parity_ratio_tokens

# (name of a compared list, ours, the original's); both hold whole numbers or ratios, nested alike.
Found = Iterator[tuple[str, Any, Any]]
Runner = Callable[[dict[str, Any]], Found]

_RUNNERS: dict[str, Runner] = {
    "open-sora-v2/resolution_tables": parity_grid.compare_tables,
    "open-sora-v2/bucket_decisions": parity_grid.compare_decisions,
    "open-sora-v2/batch_sampler": parity_grid.compare_batches,
    "open-sora-v2/video_transform_geometry": parity_grid.compare_transforms,
    "cogvideox-fun/buckets_closest_ratio": parity_ratio_tokens.compare_ratios,
    "cogvideox-fun/buckets_token_length": parity_ratio_tokens.compare_token_lengths,
    "cogvideox-fun/frame_crop": parity_ratio_tokens.compare_frame_crops,
    "cogvideox-fun/collate_geometry": parity_ratio_tokens.compare_collate,
    "cogvideox-fun/aspect_ratio_sampler": parity_ratio_tokens.compare_sampler,
    "cogvideox-fun/dataset_geometry": parity_ratio_tokens.compare_lengths,
    "open-sora-plan/frame_index": parity_grouped.compare_index,
}


def matches(case: ParityCase) -> bool:
    return _find(case) is not None


def _find(case: ParityCase) -> Runner | None:
    """By the file's name alone where its folder was given as the root."""
    return next((run for name, run in _RUNNERS.items() if name.endswith(f"/{case.name.rsplit('/', 1)[-1]}")), None)


def run(case: ParityCase) -> list[ParityOutput]:
    """Every decision must be equal: the tolerance is 0."""
    runner = _find(case)
    assert runner is not None
    return [
        ParityOutput(name, torch.tensor(ours, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64), 0.0)
        for name, ours, wanted in runner(case.config)
    ]
