"""Runners take other files of the same kinds: sizes, batches and variants that the files beside do not have.

Each file is made from one of the goldens and from public functions, written, and read again; a changed number in
its new part must be noticed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from frameloom.diffusion.objectives import Noised, weighted_error_B
from frameloom.models.text.base import drop_text
from tests.parity.cases import ParityCase, list_goldens, read_golden, under
from tests.parity.harness import CaseResult, find_runner, run_case
from tests.parity.sampling import make_text

GOLDENS = Path(__file__).parents[1] / "goldens"
FILES = {path.relative_to(GOLDENS).with_suffix("").as_posix(): path for path in list_goldens(GOLDENS)[0]}
NUM_BRANCHES = 3


def load(name: str) -> ParityCase:
    return read_golden(FILES[name], GOLDENS)


def write_and_run(case: ParityCase, folder: Path) -> CaseResult:
    """As a file of its own, beside the files that it names."""
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{case.kind}_other{'.json' if FILES[case.name].suffix == '.json' else '.safetensors'}"
    if path.suffix == ".json":
        path.write_text(json.dumps(case.config))
    else:
        groups = {"weights": case.weights, "in": case.inputs, "out": case.outputs}
        tensors = {
            f"{prefix}.{name}": tensor.contiguous().clone()
            for prefix, group in groups.items()
            for name, tensor in group.items()
        }
        save_file(tensors, path, metadata={"config": json.dumps(case.config)})
    return run_case(read_golden(path, folder))


def compute(case: ParityCase) -> dict[str, Tensor]:
    """What our code makes of a file, whatever its outputs say."""
    runner = find_runner(case)
    assert runner is not None
    return {one.name: one.ours for one in runner.run(case) if one.ours is not None and one.name in case.outputs}


def nudge(tensors: dict[str, Tensor], name: str, *, share: float = 1e-3) -> dict[str, Tensor]:
    """The last number of one tensor moved by a thousandth of the largest."""
    changed = tensors[name].clone()
    changed.view(-1)[-1] += share * float(changed.abs().max())
    return tensors | {name: changed}


def expect_made(made: ParityCase, folder: Path, output: str, share: float = 1e-3) -> None:
    """The file agrees; with its last number of `output` moved, that output alone is off."""
    expect_exactly(write_and_run(made, folder))
    wrong = replace(made, outputs=nudge(made.outputs, output, share=share))
    expect_exactly(write_and_run(wrong, folder), output)


def expect_exactly(result: CaseResult, *off: str) -> None:
    assert not result.failed, result.note
    assert [one.name for one in result.outputs if not one.is_good] == list(off), result


def test_guidance_of_several_samples(tmp_path: Path) -> None:
    one = load("open-sora-v2/cfg_combination")
    generator = torch.Generator().manual_seed(0)
    drawn = ("img", *(name for name in one.inputs if name.startswith("pred.")))
    two = replace(
        one, inputs=one.inputs | {name: torch.randn(one.inputs[name].shape, generator=generator) for name in drawn}
    )
    shared = {"masks", "masked_ref", "timesteps"}

    def join(name: str, first: Tensor, second: Tensor) -> Tensor:
        """Both samples of a tensor that holds one, or one in each of three branches."""
        if name in shared:
            return first if name == "timesteps" else torch.cat([first, second])
        parts = zip(first.chunk(len(first)), second.chunk(len(second)), strict=True)
        return torch.cat([part for pair in parts for part in pair])

    ours = compute(two)
    config = copy.deepcopy(one.config)
    config["latent_B_C_T_H_W"][0] = 2
    both = replace(
        one,
        config=config,
        inputs={name: join(name, tensor, two.inputs[name]) for name, tensor in one.inputs.items()},
        outputs={name: join(name, tensor, ours[name]) for name, tensor in one.outputs.items()},
    )
    expect_made(both, tmp_path, "all.final")


def test_sampling_of_several_samples_of_which_the_first_has_the_reference(tmp_path: Path) -> None:
    case, kind = load("open-sora-v2/sampling_end_to_end"), "i2v_head"
    outputs = {name: tensor for name, tensor in case.outputs.items() if name.startswith((kind, "t2v"))}
    noise = case.inputs["start_noise_seed5"]
    other = torch.randn(noise.shape, generator=torch.Generator().manual_seed(1))
    alone = compute(replace(case, inputs=case.inputs | {"start_noise_seed5": other}))
    # The second sample of an image-to-video batch has no reference: it is one of text to video.
    joined = {name: torch.cat([tensor, alone[f"t2v.{name.partition('.')[2]}"]]) for name, tensor in outputs.items()}
    inputs = case.inputs | {"start_noise_seed5": torch.cat([noise, other])}
    both = replace(case, inputs=inputs, outputs=joined)
    (tmp_path / "hunyuan_vae.safetensors").symlink_to(FILES["open-sora-v2/hunyuan_vae"])
    # Of the oscillating scales only the image's depends on what is given, and there is nothing given.
    expect_made(both, tmp_path, f"{kind}.latents", share=1e-2)


def test_batches_of_more_epochs_some_of_them_empty(tmp_path: Path) -> None:
    case = load("open-sora-v2/batch_sampler")
    config = copy.deepcopy(case.config)
    for rank in config["variants"]["shuffle_keep"]["per_rank"]:
        rank["epochs"][1].append([])
        rank["epochs"].append([[]])
    result = write_and_run(replace(case, config=config), tmp_path)
    expect_exactly(result)
    assert "shuffle_keep epoch 2 shapes" in {one.name for one in result.outputs}
    first = config["variants"]["shuffle_keep"]["per_rank"][0]["epochs"][1][0]
    first[0] = first[0].replace("-", "-1", 1)
    expect_exactly(write_and_run(replace(case, config=config), tmp_path), "shuffle_keep epoch 1 shapes")


@pytest.mark.parametrize("size", [1.0, 40.0, 400.0])
def test_large_losses_agree_relatively(tmp_path: Path, size: float) -> None:
    """Float32 has seven digits: 1e-6 cannot be asked of a loss of 1e3, and an error of 1e-4 of it is one."""
    case = load("open-sora-v2/flow_train_step")
    inputs = case.inputs | {"cached.model_pred": size * case.inputs["cached.model_pred"].flip(0)}
    target, prediction = case.outputs["cached.target"].double(), inputs["cached.model_pred"].double()
    outputs = case.outputs | {"cached.loss": (prediction - target).square().mean()[None].float()}
    if size > 1:
        assert float(outputs["cached.loss"]) > 1e3
    expect_made(replace(case, inputs=inputs, outputs=outputs), tmp_path, "cached.loss", share=1e-4)


def test_a_gradient_of_another_size_is_held_to_its_own_size(tmp_path: Path) -> None:
    case = load("open-sora-plan/train_loss_v13")
    inputs = case.inputs | {"model_output": 400 * case.inputs["model_output"]}
    ours = compute(replace(case, inputs=inputs))
    large = replace(case, inputs=inputs, outputs=case.outputs | ours)
    assert float(ours["main_unmasked.loss"]) > 1e3
    expect_made(large, tmp_path, "main_unmasked.grad_model_output")


@pytest.mark.parametrize("dropped", ["t5", "clip"])
def test_dropout_of_one_text_alone(tmp_path: Path, dropped: str) -> None:
    case = load("open-sora-v2/flow_train_step")
    config = copy.deepcopy(case.config)
    (entry,) = (one for one in config["cases"] if one["name"] == "dropout")
    ratio = entry["dropout_ratio"][dropped]
    entry.update(dropout_ratio={dropped: ratio}, draw_order=["randn", "rand", "randn_like"])
    given = under(case.inputs, "dropout.")
    inputs = {name: tensor for name, tensor in case.inputs.items() if not name.startswith("dropout.draw")}
    for name, old in (("draw0_randn", 0), ("draw1_rand", 1), ("draw2_randn_like", 3)):
        inputs[f"dropout.{name}"] = given[f"draw{old}_{name.partition('_')[2]}"]
    is_dropped, kept = given["draw1_rand"] < ratio, torch.zeros(len(given["t5"]), dtype=torch.bool)
    words, pooled = (is_dropped, kept) if dropped == "t5" else (kept, is_dropped)
    text, null = make_text(given["t5"], given["clip"]), make_text(given["null_t5"], given["null_clip"])
    found = drop_text(text, null, words[:, None], pooled[:, None])
    outputs = case.outputs | {
        "dropout.model_input.txt": found.tokens_BKD,
        "dropout.model_input.y_vec": found.pooled_BD,
    }
    made = replace(case, config=config, inputs=inputs, outputs=outputs)
    expect_made(made, tmp_path, "dropout.model_input.y_vec")


def _cut_first(entry: dict[str, Any], start: str, count: int) -> None:
    """The first draws of a table, fewer of them, under the key that says how many there are."""
    key = next(key for key in entry if key.startswith(start))
    entry[key.replace(key.removeprefix(start).split("_")[0], str(count), 1)] = entry.pop(key)[:count]


def _fewer_draws(config: dict[str, Any]) -> Any:
    for rank in config["distributed_uniform"][1]["ranks"]:
        _cut_first(rank, "first_", 3)
    _cut_first(config["single_process"][0], "first_", 5)
    return config["distributed_uniform"][1]["ranks"][0]["first_3_calls_of_2"][0]


def _fewer_crops(config: dict[str, Any]) -> Any:
    _cut_first(config["random_frame_crop"][0], "first_", 12)
    return config["random_frame_crop"][0]["first_12"]


@pytest.mark.parametrize(
    ("name", "change", "output"),
    [
        ("cogvideox-fun/timestep_sampling", _fewer_draws, "rank 0 of 2 processes, 1000 levels"),
        ("cogvideox-fun/frame_crop", _fewer_crops, "cropped frames 0"),
    ],
)
def test_tables_with_fewer_draws(
    tmp_path: Path, name: str, change: Callable[[dict[str, Any]], Any], output: str
) -> None:
    case = load(name)
    config = copy.deepcopy(case.config)
    values = change(config)
    expect_exactly(write_and_run(replace(case, config=config), tmp_path))
    values[0] += 1
    expect_exactly(write_and_run(replace(case, config=config), tmp_path), output)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("open-sora-v2/hunyuan_vae", "tile_spatial", "tile_spatial_wide"),
        ("open-sora-v2/dcae_f8t4_tiled", "tile_temporal", "tile_temporal_long"),
        ("cogvideox-fun/vae", "tiled", "tiled_again"),
    ],
)
def test_tiled_variants_by_other_names(tmp_path: Path, name: str, old: str, new: str) -> None:
    case = load(name)
    renamed = {
        group: {key.replace(f"{old}.", f"{new}."): value for key, value in getattr(case, group).items()}
        for group in ("inputs", "outputs")
    }
    made = replace(case, **renamed)
    expect_made(made, tmp_path, next(key for key in made.outputs if key.startswith(f"{new}.decoded")))


def test_refusals_of_other_lengths(tmp_path: Path) -> None:
    case = load("cogvideox-fun/transformer_refusals")
    config = {"v15 odd latent frames 7": "an error", "v15 odd latent frames 9": "an error"}
    expect_exactly(write_and_run(replace(case, config=config), tmp_path))
    even = write_and_run(replace(case, config={"v15 odd latent frames 4": "an error"}), tmp_path)
    expect_exactly(even, "v15 odd latent frames 4")


def test_loss_of_other_batches_and_patches(tmp_path: Path) -> None:
    case = load("open-sora-v2/flow_conditions")
    generator = torch.Generator().manual_seed(2)
    # 3 samples of 2 x 4 x 4 cells with 3 channels, in patches of one cell.
    prediction, target = (torch.randn(3, 32, 3, generator=generator) for _ in range(2))
    given = {"loss.masks": torch.zeros(3, 2, 4, 4), "loss.pred": prediction, "loss.target": target}
    ones, size = torch.ones(3), (3, 3, 2, 4, 4)
    cells = [part.transpose(1, 2).reshape(size) for part in (prediction, target)]
    loss = weighted_error_B(cells[0], Noised(cells[1], ones, cells[1], ones)).mean()[None]
    made = replace(case, inputs=case.inputs | given, outputs=case.outputs | {"loss.without_masks": loss})
    expect_made(made, tmp_path, "loss.without_masks")


def test_a_table_that_names_an_unknown_config_says_what_it_lacks(tmp_path: Path) -> None:
    case = load("open-sora-v2/resolution_tables")
    config = copy.deepcopy(case.config)
    config["bucket_to_shapes_lengths"]["stage9"] = 3
    result = write_and_run(replace(case, config=config), tmp_path)
    expect_exactly(result, "buckets of stage9")
    assert "does not show its lengths" in next(one.note for one in result.outputs if one.name == "buckets of stage9")
