"""Recipes that choose a bucket policy: right ones load, wrong ones are told what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.loading.render import render_yaml
from frameloom.core.errors import ConfigError

NO_GRID = ["--data.buckets", "null"]


@pytest.mark.parametrize("policy", ["ratio_tokens", "grouped", "multi_aspect", "fixed"])
def test_a_policy_can_be_chosen_by_name_alone(recipe_file: Path, policy: str) -> None:
    assert load_recipe(recipe_file, [*NO_GRID, "--data.policy", policy]).data.policy == policy


def test_policies_take_their_keys_from_the_command_line(recipe_file: Path) -> None:
    words = ["--data.policy", "fixed", "--data.fixed.frames", "9", "--data.fixed.width", "64"]
    recipe = load_recipe(recipe_file, [*NO_GRID, *words])
    assert recipe.data.fixed is not None
    assert (recipe.data.fixed.frames, recipe.data.fixed.width, recipe.data.fixed.height) == (9, 64, 256)
    budget = load_recipe(recipe_file, ["--data.policy", "token_budget", "--data.token_budget.tokens", "512"])
    assert budget.data.token_budget is not None
    assert budget.data.token_budget.tokens == 512


MISTAKES = {
    "no grid": (NO_GRID, "data.buckets is null, but data.policy grid needs resolutions"),
    "grid left over": (["--data.policy", "fixed"], "data.buckets is set, which only policy grid or token_budget uses"),
    "section left over": (
        ["--data.fixed.frames", "9"],
        "data.fixed is set, which only policy fixed uses, but data.policy is grid",
    ),
    "unknown policy": (["--data.policy", "gird"], "expected grid, token_budget"),
    "misspelt key": (["--data.fixed.hieght", "64"], "did you mean data.fixed.height?"),
    "fixed frames": (["--data.policy", "fixed", "--data.fixed.frames", "16"], "data.fixed.frames is 16; wfvae takes"),
    "fixed side": (["--data.policy", "fixed", "--data.fixed.width", "100"], "a multiple of 16; write 96 or 112"),
    "aspect side": (
        ["--data.policy", "multi_aspect", "--data.multi_aspect.sizes", "[[64, 64], [64, 90]]"],
        "data.multi_aspect.sizes.1.1 is 90",
    ),
    "token frames": (
        ["--data.policy", "ratio_tokens", "--data.ratio_tokens.video_sample_n_frames", "50"],
        "data.ratio_tokens.video_sample_n_frames is 50; wfvae takes 4n+1; write 49 or 53",
    ),
    "token size": (
        ["--data.policy", "ratio_tokens", "--data.ratio_tokens.video_sample_size", "16"],
        "data.ratio_tokens.video_sample_size is 16",
    ),
    "token switch": (
        ["--data.policy", "ratio_tokens", "--data.ratio_tokens.keep_all_node_same_token_length", "true"],
        "which only training_with_video_token_length true uses",
    ),
    "stride": (["--data.policy", "grouped", "--data.grouped.hw_stride", "24"], "data.grouped.hw_stride is 24"),
    "forced side": (
        ["--data.policy", "grouped", "--data.grouped", "{force_resolution: true, max_height: 350}"],
        "data.grouped.max_height is 350",
    ),
    "ratios turned round": (
        ["--data.policy", "grouped", "--data.grouped.ratio_limits", "[2.0, 0.5]"],
        "the smallest comes first; write [0.5, 2.0]",
    ),
    "areas": (["--data.policy", "grouped", "--data.grouped.min_hxw", "999999"], "more than max_hxw 236544"),
    "published minimum": (
        ["--data.policy", "grouped", "--data.grouped", "{num_frames: 17, as_published: true}"],
        "videos below 29 frames are dropped",
    ),
    "sequence group": (
        ["--data.policy", "grouped", "--data.grouped", "{num_frames: 9, sp_size: 4}"],
        "9 frames give 3 latent ones; make it 3 or less",
    ),
    "random and cached": (
        [
            *("--data.policy", "ratio_tokens", "--data.ratio_tokens.random_hw_adapt", "true"),
            *("--data.cache.latents", "x", "--data.frame_start", "first"),
        ],
        "another shape in each epoch, which the latent cache data.cache.latents cannot honour",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_of_policies_are_told(recipe_file: Path, case: str) -> None:
    words, message = MISTAKES[case]
    keep = case in ("grid left over", "section left over", "no grid", "unknown policy", "misspelt key")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, words if keep else [*NO_GRID, *words])
    assert message in str(caught.value)


@pytest.mark.parametrize("policy", ["ratio_tokens", "grouped", "multi_aspect", "fixed"])
def test_a_printed_recipe_with_a_policy_reads_back_equal(recipe_file: Path, tmp_path: Path, policy: str) -> None:
    recipe = load_recipe(
        recipe_file,
        [*NO_GRID, "--data.policy", policy, f"--data.{policy}", "{as_published: true}"]
        if policy != "fixed"
        else [*NO_GRID, "--data.policy", policy, "--data.fixed.frames", "9"],
    )
    again = tmp_path / "again.yaml"
    again.write_text(render_yaml(recipe))
    assert load_recipe(again) == recipe
    assert load_recipe(again, ["--seed", "1"]) != recipe
