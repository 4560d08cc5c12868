"""Every golden file through our code, and what happens when something in it is changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.cases import RUNNERS, ParityCase, list_goldens, read_golden, read_table
from tests.parity.harness import CaseResult, find_runner, run_case

GOLDENS = Path(__file__).parents[1] / "goldens"
FILES = {path.relative_to(GOLDENS).with_suffix("").as_posix(): path for path in list_goldens(GOLDENS)[0]}
# Outputs that are compared in each file, and listed deviations among all its outputs.
COMPARED = {
    "cogvideox-fun/aspect_ratio_sampler": (6, 13),
    "cogvideox-fun/buckets_closest_ratio": (8, 0),
    "cogvideox-fun/buckets_token_length": (197, 0),
    "cogvideox-fun/came": (142, 0),
    "cogvideox-fun/channel_surgery": (4, 0),
    "cogvideox-fun/collate_geometry": (97, 4),
    "cogvideox-fun/collate_pixels": (4, 1),
    "cogvideox-fun/dataset_geometry": (23, 0),
    "cogvideox-fun/frame_crop": (37, 0),
    "cogvideox-fun/grad_clip_rule": (3, 0),
    "cogvideox-fun/inpaint_channels": (13, 0),
    "cogvideox-fun/loss": (36, 0),
    "cogvideox-fun/mask_draws": (25, 0),
    "cogvideox-fun/mask_statistics": (36, 0),
    "cogvideox-fun/pipeline_2b_inpaint": (15, 0),
    "cogvideox-fun/pipeline_2b_t2v": (6, 0),
    "cogvideox-fun/pipeline_5b_inpaint_noise": (9, 0),
    "cogvideox-fun/pipeline_v15_inpaint": (9, 0),
    "cogvideox-fun/rope_tables": (33, 0),
    "cogvideox-fun/scheduler": (66, 0),
    "cogvideox-fun/timestep_sampling": (68, 9),
    "cogvideox-fun/transformer_2b_control": (8, 0),
    "cogvideox-fun/transformer_2b_inpaint": (10, 0),
    "cogvideox-fun/transformer_2b_t2v": (10, 0),
    "cogvideox-fun/transformer_5b_inpaint": (18, 0),
    "cogvideox-fun/transformer_5b_learned_pos": (15, 0),
    "cogvideox-fun/transformer_5b_t2v": (18, 0),
    "cogvideox-fun/transformer_refusals": (5, 0),
    "cogvideox-fun/transformer_v15_inpaint": (15, 0),
    "cogvideox-fun/transformer_v15_t2v": (15, 0),
    "cogvideox-fun/vae": (27, 0),
    "open-sora-plan/causalvae_v11": (9, 0),
    "open-sora-plan/causalvae_v11_release_topology_recipe": (9, 0),
    "open-sora-plan/causalvae_v12": (9, 0),
    "open-sora-plan/causalvae_v12_wide_recipe": (9, 0),
    "open-sora-plan/discriminator3d": (22, 0),
    "open-sora-plan/frame_index": (70, 0),
    "open-sora-plan/haar_wavelets": (11, 0),
    "open-sora-plan/latte_v11": (6, 5),
    "open-sora-plan/latte_v11_compress_kv": (3, 2),
    "open-sora-plan/latte_v11_rope": (3, 2),
    "open-sora-plan/lpips_recipe": (8, 0),
    "open-sora-plan/lr_schedules": (28, 4),
    "open-sora-plan/opensora_inpaint_v13": (1, 1),
    "open-sora-plan/opensora_t2v_v13_depth32": (1, 1),
    "open-sora-plan/opensora_t2v_v13_full": (4, 3),
    "open-sora-plan/opensora_t2v_v13_interp": (7, 0),
    "open-sora-plan/opensora_t2v_v13_sparse": (4, 3),
    "open-sora-plan/sampler": (0, 36),
    "open-sora-plan/state_dict_manifest": (18, 0),
    "open-sora-plan/text_cleaning": (2, 0),
    "open-sora-plan/timesteps_and_collate": (4, 25),
    "open-sora-plan/train_loss_v13": (68, 18),
    "open-sora-plan/vae_gan_losses": (140, 2),
    "open-sora-plan/wfvae_888_variant": (6, 0),
    "open-sora-plan/wfvae_groupnorm_recipe": (10, 4),
    "open-sora-plan/wfvae_layernorm": (25, 9),
    "open-sora-plan/wfvae_nearest_noattn": (8, 2),
    "open-sora-v2/batch_sampler": (18, 30),
    "open-sora-v2/bucket_decisions": (29, 0),
    "open-sora-v2/cfg_combination": (47, 0),
    "open-sora-v2/dcae_f32t4": (8, 0),
    "open-sora-v2/dcae_f8t4_tiled": (15, 0),
    "open-sora-v2/ema_update": (2, 0),
    "open-sora-v2/flow_conditions": (77, 8),
    "open-sora-v2/flow_train_step": (32, 4),
    "open-sora-v2/hunyuan_vae": (24, 0),
    "open-sora-v2/hunyuan_vae_latent_size": (24, 16),
    "open-sora-v2/lr_warmup": (3, 0),
    "open-sora-v2/meta_columns": (9, 0),
    "open-sora-v2/mmdit_dcae_patch1": (12, 0),
    "open-sora-v2/mmdit_flux_like": (10, 0),
    "open-sora-v2/mmdit_fused_liger": (11, 0),
    "open-sora-v2/mmdit_split_plain_rope": (11, 0),
    "open-sora-v2/mmdit_v2_released": (12, 0),
    "open-sora-v2/packing": (31, 3),
    "open-sora-v2/resolution_tables": (163, 0),
    "open-sora-v2/sampling_end_to_end": (9, 0),
    "open-sora-v2/sampling_schedule": (23, 0),
    "open-sora-v2/time_shift": (9, 0),
    "open-sora-v2/video_transform_geometry": (3, 0),
}


def load(name: str) -> ParityCase:
    return read_golden(FILES[name], GOLDENS)


def check(name: str, **changes: Any) -> CaseResult:
    return run_case(replace(load(name), **changes))


@pytest.mark.parametrize("name", FILES)
def test_every_output_is_within_tolerance_or_a_listed_deviation(name: str) -> None:
    result = run_case(load(name))
    assert result.is_good, result
    assert result.status == ("compared" if name in COMPARED else "information")
    num_deviations = sum(output.verdict == "deviation" for output in result.outputs)
    assert (result.num_compared, num_deviations) == COMPARED.get(name, (0, 0))
    assert len(result.outputs) - result.num_compared <= num_deviations
    assert all(output.note for output in result.outputs if output.verdict == "deviation")


@pytest.mark.parametrize("name", COMPARED)
def test_a_file_is_known_by_what_it_holds_and_by_one_runner(name: str) -> None:
    case = replace(load(name), name="elsewhere/another_name")
    assert sum(runner.matches(case) for runner in RUNNERS) == 1


# Files whose numbers are all in their tables, or do not depend on their inputs.
WITHOUT_INPUTS = {"cogvideox-fun/mask_draws", "cogvideox-fun/rope_tables"}


@pytest.mark.parametrize(
    "name", [name for name in COMPARED if FILES[name].suffix == ".safetensors" and name not in WITHOUT_INPUTS]
)
def test_disturbed_inputs_are_out_of_tolerance(name: str) -> None:
    case = load(name)
    # Pixels are bytes; other whole numbers are indices.
    changed = {
        key: tensor * 1.01 + 0.05 if tensor.is_floating_point() else (255 - tensor if key.endswith("_fhwc") else tensor)
        for key, tensor in case.inputs.items()
    }
    result = run_case(replace(case, inputs=changed))
    assert not result.is_good and not result.failed, result.note


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cogvideox-fun/scheduler", lambda config: config["configs"]["2b.linspace"].update(beta_end=0.013)),
        ("cogvideox-fun/mask_draws", lambda config: config["draws"][0].update(seed=99)),
        ("cogvideox-fun/timestep_sampling", lambda config: config["distributed_uniform"][1].update(group_num=4)),
        ("cogvideox-fun/timestep_sampling", lambda config: config["single_process"][0].update(generator_seed=1)),
        ("cogvideox-fun/came", lambda config: config.update(betas=[0.9, 0.99, 0.9999])),
        ("cogvideox-fun/came", lambda config: config.update(clip_threshold=0.1)),
        ("cogvideox-fun/grad_clip_rule", lambda config: config["rows"][0].__setitem__(1, 4)),
        ("cogvideox-fun/frame_crop", lambda config: config["random_frame_crop"][0].update(seed_PCG64=1)),
        (
            "cogvideox-fun/collate_geometry",
            lambda config: config["cases"][0]["args"].update(token_sample_size=128, video_sample_size=384),
        ),
        ("cogvideox-fun/aspect_ratio_sampler", lambda config: config["dataset"][0].update(height="900", width="100")),
        ("cogvideox-fun/pipeline_2b_inpaint", lambda config: config.update(guidance_scale=5.0)),
        ("cogvideox-fun/pipeline_5b_inpaint_noise", lambda config: config.update(noise_aug_strength=0.1)),
        ("cogvideox-fun/pipeline_v15_inpaint", lambda config: config.update(num_inference_steps=4)),
        ("cogvideox-fun/transformer_2b_t2v", lambda config: config.update(spatial_interpolation_scale=1.0)),
        ("open-sora-plan/lr_schedules", lambda config: config["diffusers_get_scheduler"][4].update(lr_warmup_steps=5)),
        (
            "open-sora-plan/timesteps_and_collate",
            lambda config: config["explicit_uniform_sampling_v131"][1].update(rank=0),
        ),
        ("open-sora-plan/frame_index", lambda config: config["clips"][1].update(read_time_seed=1)),
        ("open-sora-plan/frame_index", lambda config: config["index_build"][2]["settings"].update(drop_short_ratio=0)),
        ("open-sora-plan/text_cleaning", lambda config: config["cases"][3].update(input="another text")),
        ("open-sora-v2/sampling_schedule", lambda config: config["schedules"][0].update(latent_frames=5)),
        ("open-sora-v2/bucket_decisions", lambda config: config.update(base_seed=1)),
        ("open-sora-v2/batch_sampler", lambda config: config.update(seed=1)),
        ("open-sora-v2/ema_update", lambda config: config.update(decay=0.9)),
        ("open-sora-v2/cfg_combination", lambda config: config.update(guidance_img=2.0)),
        (
            "open-sora-v2/cfg_combination",
            lambda config: config["variants"]["text_osci"].update(text_osci=False, image_osci=True),
        ),
        ("open-sora-v2/sampling_end_to_end", lambda config: config.update(num_steps=11)),
        ("open-sora-v2/sampling_end_to_end", lambda config: config.update(image_osci=False)),
        ("open-sora-v2/flow_train_step", lambda config: config["cases"][0].update(sigma_min=0.01)),
    ],
)
def test_another_setting_is_found_out(name: str, change: Callable[[Any], None]) -> None:
    config = copy.deepcopy(load(name).config)
    change(config)
    result = check(name, config=config)
    assert not result.is_good and not result.failed, result.note


def test_a_missing_key_another_shape_and_another_count_are_found_out() -> None:
    case, name = load("open-sora-plan/state_dict_manifest"), "LatteT2V-XL/122"
    config = copy.deepcopy({name: case.config[name]})
    config[name]["keys"].popitem()
    config[name]["n_parameters"] += 1
    keys, count = run_case(replace(case, config=config)).outputs
    assert (keys.verdict, count.verdict) == ("above tolerance", "above tolerance")
    assert "missing" in keys.note
    other = copy.deepcopy({name: case.config[name]})
    other[name]["keys"]["scale_shift_table"] = [2, 1153]
    keys, count = run_case(replace(case, config=other)).outputs
    assert keys.verdict == "above tolerance" and count.verdict == "ok"
    unknown = run_case(replace(case, config={"Unheard-of": {"config": {}, "n_parameters": 1, "keys": {}}}))
    assert unknown.failed and "Unheard-of" in unknown.note


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("open-sora-v2/sampling_end_to_end", "hunyuan_vae.safetensors"),
        ("open-sora-v2/meta_columns", "is not beside it"),
        ("cogvideox-fun/pipeline_2b_t2v", "vae.safetensors"),
    ],
)
def test_a_file_that_needs_another_one_says_which(tmp_path: Path, name: str, reason: str) -> None:
    result = check(name, path=tmp_path / "alone.safetensors")
    assert result.failed and reason in result.note
    assert check(name, path=None).failed


def test_the_two_samplers_of_cogvideox_differ() -> None:
    outputs = load("cogvideox-fun/pipeline_2b_inpaint").outputs
    assert (outputs["ddim_cog.latents"] - outputs["ddim_origin.latents"]).abs().max() > 1e-2


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps({"a": 1}))
    for case in (
        read_table(tmp_path / "table.json", name="lr_warmup"),
        ParityCase("scheduler", {}, {}, {}, {}),
        ParityCase("other", {"vae_case": "vae"}, {}, {}, {}),
        ParityCase("other", {"num_layers": 2}, {}, {"latents": torch.zeros(1)}, {"sample": torch.zeros(1)}),
        ParityCase("other", {"cls": "AnotherModel", "model": {}}, {}, {}, {}),
    ):
        assert find_runner(case) is None
