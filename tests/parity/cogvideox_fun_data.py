"""Golden cases of CogVideoX-Fun's data: ratio tables, lengths under a token budget, frame crops, buckets."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frameloom.config.schema.buckets import RatioTokensSection
from frameloom.data.buckets.policy import Bucket, Clips, Draw, draw_weighted, nearest_values
from frameloom.data.buckets.ratio_tokens import (
    CROP_WEIGHTS,
    DRAW_RATIO,
    DRAW_SIZE,
    FIRST_SHARE,
    RATIO_TABLE,
    RatioTokens,
    first_heavy,
    list_divisors,
)
from frameloom.models.vaes.config import LengthRule
from tests.parity.cases import Found, compare_facts, golden_table, leave_out, pick_prefixed

_NUM_DRAWS = 20_000
_FREQUENCY = re.compile(r"frequency_of_(\d+)_seed_PCG64_(\d+)")


def _policy(patch: int | None = None, **settings: Any) -> RatioTokens:
    section = RatioTokensSection(as_published=True, **settings)
    return RatioTokens(section, stride=16, rule=LengthRule(patch=patch or 1))


@golden_table("ASPECT_RATIO_512", "rows")
def compare_ratios(case: dict[str, Any]) -> Found:
    yield "table", list(RATIO_TABLE.values()), list(case["ASPECT_RATIO_512"].values())
    yield "table keys", list(RATIO_TABLE), list(map(float, case["ASPECT_RATIO_512"]))
    crops = case["ASPECT_RATIO_RANDOM_CROP_512"]
    yield "crop table", [RATIO_TABLE[ratio] for ratio in CROP_WEIGHTS], list(crops.values())
    yield (
        "crop shares",
        [weight / sum(CROP_WEIGHTS.values()) for weight in CROP_WEIGHTS.values()],
        case["ASPECT_RATIO_RANDOM_CROP_PROB"],
    )
    ratio = np.array([row[0] / row[1] for row in case["rows"]])
    for name, table, column in (("closest", list(RATIO_TABLE), 2), ("closest crop", list(CROP_WEIGHTS), 4)):
        found = [table[i] for i in nearest_values(table, ratio)]
        yield f"{name} ratio", found, [float(row[column]) for row in case["rows"]]
        yield f"{name} size", [RATIO_TABLE[key] for key in found], [row[column + 1] for row in case["rows"]]


@golden_table("rule_table", "random_downsample_ratio")
def compare_token_lengths(case: dict[str, Any]) -> Found:
    for number, entry in enumerate(case["rule_table"]):
        names = ("video_sample_n_frames", "token_sample_size", "video_sample_size", "image_sample_size")
        settings = {name: entry[name] for name in names}
        policy = _policy(random_hw_adapt=True, training_with_video_token_length=True, **settings)
        table = entry["length_to_frame_num"]
        yield f"sizes {number}", policy.video_sides, list(map(float, table))
        yield f"frames {number}", policy.longest_frames(np.array(policy.video_sides)), list(table.values())
    for name, entry in case["random_downsample_ratio"].items():
        side, extra = name.split("|")
        divisors = list_divisors(int(side), float(extra[1:-1]) if extra != "[]" else None)
        yield f"divisors {name}", divisors, entry["choices"]
        key, found = next((key, found) for key in entry if (found := _FREQUENCY.fullmatch(key)))
        num_draws, seed = map(int, found.groups())
        # One draw of the original's generator for each of its choices.
        draws = np.random.Generator(np.random.PCG64(seed)).random(num_draws)
        picked = draw_weighted(first_heavy(len(divisors), FIRST_SHARE), draws)
        shares = np.bincount(picked, minlength=len(divisors)) / num_draws
        yield f"shares {name}", shares, list(entry[key].values())
    ours, wanted = [], []
    for entry in case["batch_tiling_of_short_samples"]:
        batch, frames, height, width = entry["batch_frames_h_w"]
        policy = _policy(
            training_with_video_token_length=True,
            train_batch_size=batch,
            video_sample_n_frames=entry["video_sample_n_frames"],
            token_sample_size=entry["token_sample_size"],
        )
        ours.append([policy.fill_batch(frames, height, width)] * 2)
        wanted.append([entry["batch_after"], entry["texts_after"]])
    yield "clips per batch", ours, wanted


@golden_table("random_frame_crop")
def compare_frame_crops(case: dict[str, Any]) -> Found:
    for number, entry in enumerate(case["random_frame_crop"]):
        policy = _policy(entry["patch_size_t"], video_sample_n_frames=entry["video_sample_n_frames"])
        lengths, weights = policy.list_crops()
        yield f"crop lengths {number}", lengths, entry["candidates"]
        if lengths:
            yield f"crop shares {number}", np.round(weights, 12), np.round(entry["candidate_probabilities"], 12)
        first = pick_prefixed(entry, "first_")
        draws = np.random.Generator(np.random.PCG64(entry["seed_PCG64"])).random(len(first))
        whole = np.full(len(draws), entry["video_sample_n_frames"], dtype=np.int64)
        cut = np.minimum(whole, np.array(lengths)[draw_weighted(weights, draws)]) if lengths else whole
        yield f"cropped frames {number}", policy.rule.trim(cut), first
        yield f"crop frequencies {number}", *_count_crops(policy, entry)
    for number, entry in enumerate(case["keep_all_node_same_token_length"]):
        names = ("video_sample_n_frames", "token_sample_size")
        policy = _policy(entry["patch_size_t"], **{name: entry[name] for name in names})
        sides = np.array(policy.list_token_sides())
        limit = entry["video_sample_n_frames"]
        yield f"token lengths {number}", sides**2 * limit, entry["token_lengths"]
        wanted = pick_prefixed(entry, "first_")
        # Its generator picks a position; that becomes the uniform number that leads to it.
        generator = np.random.Generator(np.random.PCG64(entry["index_rng_seed_PCG64"]))
        picks = np.array([generator.choice(len(sides)) for _ in wanted])
        drawn = policy.draw_token_sides((picks + 0.5) / len(sides))
        area = np.full(len(wanted), float(entry["height"] * entry["width"]))
        frames = policy.rule.trim(policy.frames_of_tokens(drawn, area))
        yield f"kept frames {number}", np.stack([drawn**2 * limit, frames], axis=1), wanted


def _count_crops(policy: RatioTokens, entry: dict[str, Any]) -> tuple[list[float], list[float]]:
    """How often each length is kept, over as many draws as the original made."""
    lengths, weights = policy.list_crops()
    draws = np.random.Generator(np.random.PCG64(entry["seed_PCG64"])).random(_NUM_DRAWS)
    limit = entry["video_sample_n_frames"]
    cut = np.array(lengths)[draw_weighted(weights, draws)] if lengths else np.full(_NUM_DRAWS, limit)
    kept = policy.rule.trim(np.minimum(cut, limit))
    wanted = entry["frequency_of_kept_frames"]
    return [float(np.mean(kept == int(length))) for length in wanted], list(wanted.values())


def compare_collate(case: dict[str, Any]) -> Found:
    """A batch is one clip to the original: the first one's shape, the least mean side, the shortest length."""
    for number, entry in enumerate(case["cases"]):
        examples = entry["examples_[type,frames,h,w]"]
        policy = _policy(entry["patch_size_t"], video_sample_stride=1, **entry["args"])
        choices = entry["rng_choices_[candidates,picked]"]
        means = [(height + width) / 2 for _, _, height, width in examples]
        is_video = examples[0][0] == "video"
        if choices and choices[0][0] != "15 table keys, weighted":
            yield f"{number} candidates", _candidates(policy, min(means), is_video), choices[0][0]
        bucket = assign_batch(entry["patch_size_t"], entry["args"], examples, choices)
        _, frames, _, height, width = entry["stacked_shape_bfchw"]
        yield f"{number} shape", [bucket.frames, bucket.height, bucket.width], [frames, height, width]


def assign_batch(
    patch: int | None, args: dict[str, Any], examples: list[list[Any]], choices: list[list[Any]]
) -> Bucket:
    """The bucket of a published batch; `choices` are what its generator picked, sizes before ratios."""
    policy = _policy(patch, video_sample_stride=1, **args)
    clip = _smallest(examples, args.get("random_ratio_crop", False))
    chosen = policy.assign_clips(clip, np.zeros(1, dtype=np.int64), _draw_picked(policy, choices))
    return policy.buckets[int(chosen[0])]


def _candidates(policy: RatioTokens, mean_side: float, is_video: bool) -> list[float]:
    settings = policy.settings
    if is_video and settings.training_with_video_token_length:
        return policy.video_sides[: int(policy.count_sides(np.array([mean_side]))[0])]
    side, sides = (
        (settings.video_sample_size, policy.video_sides)
        if is_video
        else (settings.image_sample_size, policy.image_sides)
    )
    return [side / value for value in sides]


def _smallest(examples: list[list[Any]], uses_own_shape: bool) -> Clips:
    """One clip with the first example's ratio and the least mean side of all."""
    kind, _, height, width = examples[0]
    frames = min(example[1] for example in examples)
    mean = min((example[2] + example[3]) / 2 for example in examples)
    scale = 1.0 if uses_own_shape else mean / ((height + width) / 2)
    sides = (np.array([height * scale]), np.array([width * scale]))
    return Clips(np.array([frames]), *sides, np.array([24.0 if kind == "video" else np.nan]))


def _draw_picked(policy: RatioTokens, choices: list[list[Any]]) -> Draw:
    """Uniform numbers that lead to what the original's generator picked."""

    def draw(rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        number = int(numbers[0]) if len(numbers) else DRAW_SIZE
        candidates, picked = choices[-1 if number == DRAW_RATIO else 0]
        if number == DRAW_RATIO:
            weights: list[float] = list(map(float, CROP_WEIGHTS.values()))
            place = [*CROP_WEIGHTS].index(float(picked))
        else:
            place = candidates.index(picked)
            is_weighted = 1.0 in candidates
            weights = first_heavy(len(candidates), FIRST_SHARE) if is_weighted else [1.0] * len(candidates)
        edges = np.cumsum([0.0, *weights]) / sum(weights)
        return np.full(len(rows), (edges[place] + edges[place + 1]) / 2)

    return draw


@golden_table("dataset", "epochs", "resume")
def compare_sampler(case: dict[str, Any]) -> Found:
    """Rows of one batch share their kind and their nearest ratio; the order of batches is that of our plan."""
    rows = case["dataset"]
    table = list(RATIO_TABLE)
    for number, epoch in enumerate(case["epochs"]):
        ours, wanted = [], []
        for kind, groups in epoch["left_in_buckets_after"].items():
            for ratio, members in groups.items():
                ours += [_kind_and_ratio(rows[row], table) for row in members]
                wanted += [[float(kind == "video"), float(ratio)]] * len(members)
        yield f"left in buckets, epoch {number}", ours, wanted
        batches = [[_kind_and_ratio(rows[row], table) for row in batch] for batch in epoch["batches"] if batch]
        yield compare_facts(f"batches of epoch {number}", batches, [[batch[0]] * len(batch) for batch in batches])
        for name in ("permutation", "batches", "rest"):
            yield leave_out(f"{name} of epoch {epoch['epoch']}, in order", "published-orders")
    for name in ("resumed", "by kind alone", "rows without a size", "reported length"):
        yield leave_out(name, "published-orders")


def _kind_and_ratio(row: dict[str, Any], table: list[float]) -> list[float]:
    # Sizes stand there as text too.
    nearest = nearest_values(table, np.array([float(row["height"]) / float(row["width"])]))
    return [float(row.get("type", "image") == "video"), table[int(nearest[0])]]


def compare_lengths(case: dict[str, Any]) -> Found:
    """How many frames a file gives at a stride; which ones, and the shrinking on reading, are the reader's matter."""
    entries = [entry for entry in case["frame_indices"] if (entry["drop_start"], entry["drop_end"]) == (0.0, 1.0)]
    ours = []
    for entry in entries:
        policy = _policy(video_sample_n_frames=entry["n_frames"], video_sample_stride=entry["stride"])
        ours.append(int(policy.available_frames(np.array([entry["video_frames"]]))[0]))
    yield "frames of a file", ours, [len(entry["idx"]) for entry in entries]
