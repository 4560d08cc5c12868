"""How many processes can share a recipe, told before anything is loaded."""

from __future__ import annotations

import pytest

from frameloom.config.loading.recipe import recipe_from_dict
from frameloom.config.rules.parallel import check_world, fit_mesh
from frameloom.config.schema.parallel import MeshShape, ParallelSection
from frameloom.core.errors import ConfigError


def section(**keys: object) -> ParallelSection:
    return ParallelSection.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "num_ranks", "shape"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 8, (8, 1, 1)),
        ({"zero": 1}, 8, (1, 8, 1)),
        ({"zero": 3}, 8, (1, 8, 1)),
        ({"zero": 3, "replicate": 2}, 8, (2, 4, 1)),
        ({"zero": 2, "shard": 2}, 8, (4, 2, 1)),
        ({"encoders": "tensor", "tensor": 4}, 8, (8, 1, 1)),
        ({"zero": 3, "sequence": 2}, 8, (1, 4, 2)),
        ({"sequence": 4}, 8, (2, 1, 4)),
        ({"zero": 3, "replicate": 2, "shard": 2, "sequence": 2}, 8, (2, 2, 2)),
    ],
)
def test_axes_that_are_left_out_follow(keys, num_ranks, shape):
    found = fit_mesh(section(**keys), num_ranks)
    assert found == MeshShape(*shape) and found.num_ranks == num_ranks


@pytest.mark.parametrize(
    ("keys", "num_ranks", "message"),
    [
        ({"sequence": 3}, 8, r"parallel.sequence 3 does not divide 8 processes; start 6 or 9 processes"),
        ({"tensor": 3}, 8, r"parallel.tensor 3 does not divide 8 processes; start 6 or 9 processes"),
        ({"sequence": 2}, 1, r"parallel.sequence 2 does not divide 1 process; start 2 processes"),
        ({"zero": 3, "replicate": 3}, 8, r"is 3 x 2 x 1 = 6, but there are 8.*must be 8 / 1 = 8"),
        ({"zero": 3, "replicate": 4, "shard": 4}, 8, r"is 4 x 4 x 1 = 16, but there are 8 processes"),
        ({"replicate": 4}, 8, r"is 4 x 1 x 1 = 4, but there are 8 processes"),
        ({"zero": 2, "shard": 4, "sequence": 4}, 8, r"is 1 x 4 x 4 = 16, but there are 8.*must be 8 / 4 = 2"),
    ],
)
def test_impossible_products_are_refused_with_the_arithmetic(keys, num_ranks, message):
    with pytest.raises(ConfigError, match=message):
        fit_mesh(section(**keys), num_ranks)


def test_processes_of_one_sequence_see_the_same_data():
    shape = fit_mesh(section(zero=3, sequence=2), 8)
    assert [shape.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (shape.data, shape.sequence) == (4, 2)


def recipe(task: str = "denoiser", **sections: dict[str, object]) -> dict[str, object]:
    base: dict[str, object] = {
        "name": "run",
        "task": task,
        "vae": {"weights": "vae"},
        "data": {"manifest": "clips.parquet", "buckets": {"64px": {"9": [1.0, 4]}}},
        "train": {"steps": 10},
    }
    return {**base, **sections}


def test_a_step_must_have_a_micro_batch_for_every_process():
    few = recipe_from_dict(recipe(parallel={"data": 2}, train={"steps": 1, "accumulate": 2}))
    assert check_world(few, 4).data == 4
    with pytest.raises(ConfigError, match=r"data 2 x train.accumulate 2 = 4 micro-batches a step, but 8 data-parallel"):
        check_world(few, 8)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"shard": 2}}, "parallel.shard is 2, but parallel.zero 0 splits nothing"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor is 2, but parallel.encoders is each"),
        ({"parallel": {"zero": 2}, "optim": {"name": "came"}}, "came looks at whole weights"),
        ({"parallel": {"zero": 1}, "optim": {"name": "prodigy", "lr": 1.0}}, "prodigy finds one rate"),
        ({"parallel": {"zero": 3}, "task": "autoencoder"}, "weights of an autoencoder are not split"),
        ({"parallel": {"sequence": 2}, "task": "autoencoder"}, "has no sequence of tokens"),
        ({"parallel": {"zero": 3}, "train": {"steps": 1, "ema": {"on_cpu": True}}}, "train.ema.on_cpu is true"),
        ({"parallel": {"gather": "bf16", "zero": 3}}, "train.precision is fp32"),
        ({"parallel": {"zero": 4}}, "expected 0, 1, 2 or 3"),
    ],
)
def test_what_does_not_go_together_is_told(sections, message):
    with pytest.raises(ConfigError, match=message):
        recipe_from_dict(recipe(**sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"zero": 1}, "optim": {"name": "came"}},
        {"parallel": {"zero": 1}, "task": "autoencoder"},
        {"parallel": {"zero": 3, "gather": "bf16"}, "train": {"steps": 1, "precision": "bf16"}},
    ],
)
def test_what_goes_together_is_accepted(sections):
    recipe_from_dict(recipe(**sections))
