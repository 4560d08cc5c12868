"""Golden cases of the data side: decisions of the originals, sample by sample, with the originals' own draws.

A table is known by the keys it holds, so that other sizes, seeds and settings run as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from frameloom.core.parity import ParityCase, ParityOutput, compare_numbers
from frameloom.data import parity_media, parity_orders, parity_pixels
from frameloom.data.policies import parity_grid, parity_grouped, parity_ratio_tokens

# (name of a compared list, ours, the original's), whole numbers or ratios, nested alike; or a finished comparison
Found = Iterable[tuple[str, Any, Any] | ParityOutput]
Runner = Callable[[dict[str, Any]], Found]

# Keys that a table has, and what is compared in it.
_TABLES: tuple[tuple[frozenset[str], tuple[Runner, ...]], ...] = (
    (frozenset({"tables", "bucket_to_shapes_lengths"}), (parity_grid.compare_tables,)),
    (frozenset({"configs", "samples_[T,H,W,fps]"}), (parity_grid.compare_decisions,)),
    (
        frozenset({"bucket_config", "metadata_rows", "variants"}),
        (parity_grid.compare_batches, parity_orders.compare_grid_batches),
    ),
    (
        frozenset({"resize_crop_[h,w,target_h,target_w,resize_hw,crop_i_j_h_w]"}),
        (parity_grid.compare_transforms,),
    ),
    (frozenset({"ASPECT_RATIO_512", "rows"}), (parity_ratio_tokens.compare_ratios,)),
    (frozenset({"rule_table", "random_downsample_ratio"}), (parity_ratio_tokens.compare_token_lengths,)),
    (frozenset({"random_frame_crop"}), (parity_ratio_tokens.compare_frame_crops,)),
    (
        frozenset({"dataset", "epochs", "resume"}),
        (parity_ratio_tokens.compare_sampler, parity_orders.compare_ratio_buckets),
    ),
    (frozenset({"frame_indices"}), (parity_ratio_tokens.compare_lengths, parity_pixels.compare_reading)),
    (frozenset({"index_build", "clips"}), (parity_grouped.compare_index,)),
)
# The same by the keys of the entries of "cases".
_LISTS: tuple[tuple[frozenset[str], tuple[Runner, ...]], ...] = (
    (
        frozenset({"examples_[type,frames,h,w]", "transforms"}),
        (parity_ratio_tokens.compare_collate, parity_pixels.compare_collate_sizes),
    ),
    (frozenset({"samples_thw", "per_rank_batches"}), (parity_orders.compare_grouped,)),
)


def matches(case: ParityCase) -> bool:
    return parity_media.is_columns(case) or parity_pixels.is_pixels(case) or bool(_find(case))


def _find(case: ParityCase) -> tuple[Runner, ...]:
    entries = case.config.get("cases")
    first = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    for kinds, given in ((_TABLES, case.config), (_LISTS, first)):
        for keys, runners in kinds:
            if keys <= given.keys():
                return runners
    return ()


def run(case: ParityCase) -> list[ParityOutput]:
    """Every decision must be equal: the tolerance is 0, where the comparison does not say otherwise."""
    if parity_media.is_columns(case):
        return parity_media.run_columns(case)
    if parity_pixels.is_pixels(case):
        return parity_pixels.run_pixels(case)
    return [
        found if isinstance(found, ParityOutput) else compare_numbers(*found)
        for runner in _find(case)
        for found in runner(case.config)
    ]
