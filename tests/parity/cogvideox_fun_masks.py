"""Golden cases of CogVideoX-Fun's inpainting masks: single draws, and statistics over many.

The published generator takes numbers from three global generators; this one plays them through our own rules.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frameloom.diffusion.conditioning import MaskRandom, draw_region_mask
from frameloom.diffusion.tables import CLIP_SHARES
from tests.parity.cases import ParityCase, ParityOutput, compare_numbers, golden

_KINDS = list(CLIP_SHARES)


class PublishedDice(MaskRandom):
    """numpy for kinds and frames, torch for cells and pixels, Python for blocks: all seeded alike."""

    def __init__(self, seed: int) -> None:
        self.numpy = np.random.RandomState(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.python = random.Random(seed)

    def kind(self, shares: Sequence[float]) -> int:
        """What numpy's `choice` draws, without its checks, which take ten times as long."""
        edges = np.cumsum(shares)
        return int(np.searchsorted(edges / edges[-1], self.numpy.random_sample(), side="right"))

    def cell(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self.torch))

    def frame(self, low: int, high: int) -> int:
        return int(self.numpy.randint(low, high))

    def block(self, low: int, high: int) -> int:
        return self.python.randint(low, high - 1)

    def some_of(self, total: int, count: int) -> list[int]:
        return self.python.sample(range(total), count)

    def chance(self) -> float:
        return float(self.numpy.rand())

    def pixels(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 2, shape, dtype=torch.uint8, generator=self.torch)


def is_draws(case: ParityCase) -> bool:
    entries = case.config.get("draws")
    return isinstance(entries, list) and all({"case", "seed", "shape_fchw"} <= entry.keys() for entry in entries)


@golden(is_draws)
def run_draws(case: ParityCase) -> list[ParityOutput]:
    results, kinds = [], []
    for entry in case.config["draws"]:
        frames, _, height, width = entry["shape_fchw"]
        known_FHW, kind = draw_region_mask((frames, height, width), PublishedDice(entry["seed"]))
        kinds.append(_KINDS.index(kind))
        name = f"mask.{entry['k']}"
        results.append(ParityOutput(name, 1 - known_FHW[:, None], case.outputs[name], 0.0))
    return [*results, compare_numbers("kinds", kinds, [entry["case"] for entry in case.config["draws"]])]


@golden(lambda case: isinstance(case.config.get("draws"), int) and isinstance(case.config.get("shapes"), list))
def run_statistics(case: ParityCase) -> list[ParityOutput]:
    return [output for entry in case.config["shapes"] for output in _compare_shape(entry, case.config["draws"])]


def _compare_shape(entry: dict[str, Any], num_draws: int) -> list[ParityOutput]:
    shape_FHW = entry["frames"], entry["height"], entry["width"]
    dice = PublishedDice(entry["seed_numpy_torch_random"])
    known: dict[str, list[Tensor]] = {}
    for _ in range(num_draws):
        known_FHW, kind = draw_region_mask(shape_FHW, dice)
        known.setdefault(str(_KINDS.index(kind)), []).append(known_FHW.flatten(1).sum(1))
    area = entry["height"] * entry["width"]
    unknown = {kind: 1 - torch.stack(counts).numpy() / area for kind, counts in known.items()}
    results = []
    for kind, wanted in entry["cases"].items():
        shares_NF = unknown.get(kind, np.full((1, 1), np.nan))
        whole, first = shares_NF.mean(1), shares_NF[:, 0]
        ours = {
            "count": len(whole),
            "frequency": len(whole) / num_draws,
            "mean_fraction": whole.mean(),
            "std_fraction": whole.std(),
            "mean_fraction_first_frame": first.mean(),
            "p_all_ones": np.mean(whole == 1),
            "p_all_zeros": np.mean(whole == 0),
        }
        name = "x".join(map(str, shape_FHW)) + f" kind {kind}"
        # Shares are float32 in the original.
        results.append(compare_numbers(name, [ours[key] for key in wanted], list(wanted.values()), 1e-6))
    all_ones = sum(int((shares_NF.mean(1) == 1).sum()) for shares_NF in unknown.values()) / num_draws
    name = "x".join(map(str, shape_FHW)) + " all ones"
    return [*results, compare_numbers(name, all_ones, entry["p_all_ones_overall"])]
