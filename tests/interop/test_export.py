"""Exports of trained runs: diffusers computes the same from them, originals load back, cards tell their origin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.run_weights import open_run
from frameloom.builders.text import build_text
from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import read_weights
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import digest_file
from frameloom.core.random import stream
from frameloom.interop.convert.convert import Conversion, convert_weights
from frameloom.interop.export.export import Export, Exported, export_run
from frameloom.models.text.base import TextStates
from frameloom.models.text.transformers_folder import quiet_transformers
from frameloom.training.train import train
from tests.models.text import tiny
from tests.parity.cogvideox_fun_transformer import name_rotary
from tests.sampling import sdxl_pipeline

LIMIT = 1e-5
COG = {
    **{"num_attention_heads": 2, "num_layers": 2, "attention_head_dim": 64, "time_embed_dim": 16},
    **{"sample_height": 8, "sample_width": 8, "sample_frames": 9, "max_text_seq_length": 12},
    **{"use_rotary_positional_embeddings": True, "attention_bias": True},
}
COG_VAE = {
    **{"block_channels": [8, 8, 8, 8], "latent_channels": 4, "layers_per_block": 1, "norm_groups": 2},
    "decode_first_alone": False,  # as diffusers decodes
}
# Fields that differ from the small sizes so that Flux computes the same.
FLUX = {
    **{"hidden_size": 32, "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [4, 6, 6]},
    **{"theta": 10_000, "normalize_vec": False, "absolute_positions": False},
}
LATTE = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "video_length": 3}
PLAN = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 24}


def draw(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(0, name))


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def export(run: Path, to: Any, **options: Any) -> Exported:
    return export_run(Export(run, to, **options))


def predict(denoiser: LoadedDenoiser, noisy: Tensor, text: TextStates, timestep: float = 0.3) -> Tensor:
    with torch.no_grad():
        return denoiser.model(noisy, torch.full((len(noisy),), timestep), text.conditions())


def states(length: int, width: int, pooled: int) -> TextStates:
    return TextStates(
        draw("text", 2, length, width), torch.ones(2, length, dtype=torch.bool), draw("pooled", 2, pooled)
    )


def run_of(shared: Path, name: str, world: Any, **sections: Any) -> Path:
    """A trained run, made once for all tests."""
    if not (shared / name).is_dir():
        path = world.write_recipe(**{"run": {"folder": str(shared)}, "name": name, **sections})
        train(load_recipe(path, ["--train.steps", "1", "--train.save_every", "1"]))
    return shared / name


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pipeline(shared: Path) -> Path:
    return sdxl_pipeline.make_pipeline(shared / "sdxl-pipeline")


@pytest.fixture
def sdxl(shared: Path, pipeline: Path, world: Any) -> Path:
    return run_of(shared, "sdxl", world, **sdxl_sections(pipeline))


def sdxl_sections(pipeline: Path, **changes: Any) -> dict[str, Any]:
    encoders = [
        {"name": name, "path": str(pipeline), "max_length": tiny.POSITIONS, "null": "zeros"}
        for name in ("clip_l", "clip_bigg")
    ]
    return {
        "model": {
            **{"_delete_": True, "family": "sdxl", "size": "tiny", "overrides": sdxl_pipeline.OVERRIDES},
            "weights": str(pipeline),
        },
        "vae": {"_delete_": True, "name": "kl", "size": "tiny", "weights": str(pipeline)},
        "text": {"encoders": encoders},
        "objective": {"kind": "epsilon", "spacing": "leading"},
        "data": {"buckets": {"_delete_": True, "64px": {"1": [1.0, 2]}}},
        "sample": {"frames": 1, "height": 64, "width": 64, "steps": 1},
        "train": {"ema": {"decay": 0.5, "warmup": False}},
        **changes,
    }


def test_sdxl_becomes_a_pipeline_that_computes_the_same(sdxl: Path) -> None:
    done = export(sdxl, "diffusers")
    assert done.out == sdxl / "exports" / "diffusers"
    theirs, ours = sdxl_pipeline.load_pipeline(done.out), open_run(sdxl).load_denoiser()
    recipe = open_run(sdxl).recipe
    with torch.no_grad():
        tokens, negative, pooled, _ = theirs.encode_prompt("a red circle")
        text = build_text(recipe.text, recipe.model).encode(["a red circle", ""])
        assert difference(tokens[0], text.tokens_BKD[0]) <= LIMIT and difference(pooled[0], text.pooled_BD[0]) <= LIMIT
        assert torch.equal(negative[0], text.tokens_BKD[1]) and not negative.any()
        noisy, sizes = draw("noisy", 2, 4, 1, 8, 8), torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)
        prediction = theirs.unet(
            noisy[:, :, 0],
            torch.tensor(300),
            text.tokens_BKD,
            added_cond_kwargs={"text_embeds": text.pooled_BD, "time_ids": sizes},
        ).sample
        latent = draw("latent", 1, 4, 1, 8, 8)
        vae = build_vae(recipe.vae, seed=0).model
        pixels = theirs.vae.decode(vae.denormalize(latent)[:, :, 0]).sample
        assert difference(pixels, vae.decode(vae.denormalize(latent))[:, :, 0]) <= LIMIT
    assert difference(predict(ours, noisy, text)[:, :, 0], prediction) <= LIMIT
    assert difference(predict(ours, noisy, text, 0.5)[:, :, 0], prediction) > 1e-3
    assert theirs.vae.config["scaling_factor"] == pytest.approx(float(vae.scale[0]))
    assert sdxl_pipeline.picture(theirs).shape == (1, 3, 64, 64)
    assert theirs.scheduler.config["timestep_spacing"] == "leading"


def test_sdxl_becomes_one_file_that_diffusers_and_we_open(sdxl: Path, pipeline: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusionXLPipeline

    done = export(sdxl, "single-file", out=tmp_path / "single")
    file = done.out / "sdxl.safetensors"
    whole = export(sdxl, "diffusers", out=tmp_path / "folders").out
    with quiet_transformers():
        loaded = StableDiffusionXLPipeline.from_single_file(
            str(file), config=str(whole), local_files_only=True, add_watermarker=False
        )
    trained = open_run(sdxl).load_denoiser().model.state_dict()
    assert all(torch.equal(loaded.unet.state_dict()[name], tensor) for name, tensor in trained.items())
    started = load_file(next((pipeline / "unet").glob("*.safetensors")))
    assert any(not torch.equal(started[name], tensor) for name, tensor in trained.items())
    convert_weights(Conversion(whole, tmp_path / "joined.safetensors"))
    joined, ours = load_file(tmp_path / "joined.safetensors"), load_file(file)
    assert joined.keys() == ours.keys() and all(torch.equal(ours[name], tensor) for name, tensor in joined.items())


def test_the_last_weights_differ_from_the_averaged_ones(sdxl: Path, tmp_path: Path) -> None:
    files = {
        which: load_file(export(sdxl, "original", out=tmp_path / which, weights=which).out / "unet" / UNET)
        for which in ("ema", "raw")
    }
    key = "model.diffusion_model.input_blocks.0.0.weight"
    run = open_run(sdxl, weights="raw")
    raw = run.load_denoiser().model.state_dict()["conv_in.weight"]
    assert torch.equal(files["raw"][key], raw) and run.step == 1
    assert not torch.equal(files["ema"][key], raw)
    half = load_file(export(sdxl, "original", out=tmp_path / "half", dtype="bf16").out / "unet" / UNET)
    assert half[key].dtype == torch.bfloat16 and torch.equal(half[key], files["ema"][key].bfloat16())


UNET = "diffusion_pytorch_model.safetensors"


def test_a_lora_of_sdxl_does_the_same_in_diffusers(shared: Path, pipeline: Path, world: Any, tmp_path: Path) -> None:
    run = run_of(shared, "sdxl-lora", world, **sdxl_sections(pipeline, lora={"rank": 2}, optim={"lr": 0.05}))
    done = export(run, "lora", out=tmp_path / "lora")
    assert set(done.files) == {"pytorch_lora_weights.safetensors", "lora-kohya.safetensors"}
    theirs = sdxl_pipeline.load_pipeline(pipeline)
    merged = sdxl_pipeline.load_pipeline(export(run, "diffusers", out=tmp_path / "merged").out)
    plain = sdxl_pipeline.picture(theirs)
    theirs.load_lora_weights(str(done.out), weight_name="pytorch_lora_weights.safetensors")
    # The text encoders' empty prompt, the scheduler and all other parts are those of the folder it started from.
    for part in ("vae", "text_encoder", "text_encoder_2"):
        ours, own = getattr(merged, part).state_dict(), getattr(theirs, part).state_dict()
        assert all(torch.equal(ours[name], tensor) for name, tensor in own.items())
    inputs = draw("noisy", 2, 4, 8, 8), torch.tensor(300), draw("text", 2, 5, 40)
    given = {"text_embeds": draw("pooled", 2, 28), "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)}
    with torch.no_grad():
        expected = merged.unet(*inputs, added_cond_kwargs=given).sample
        assert difference(theirs.unet(*inputs, added_cond_kwargs=given).sample, expected) <= LIMIT
        theirs.unload_lora_weights()
        assert difference(theirs.unet(*inputs, added_cond_kwargs=given).sample, expected) > 1e-4
    assert plain.isfinite().all()


def cog_sections(texts: Path, vae: Path, **changes: Any) -> dict[str, Any]:
    encoder = {"name": "t5", "path": str(texts), "max_length": 12, "precision": "fp32"}
    return {
        "model": {"_delete_": True, "family": "cogvideox_fun", "size": "2b", "overrides": COG, **changes},
        "vae": {"_delete_": True, "name": "cogvideox", "size": "2b", "overrides": COG_VAE, "weights": str(vae)},
        "text": {"encoders": [encoder]},
        "objective": {"kind": "v", "snr_shift": 3.0},
        "data": {"buckets": {"_delete_": True, "64px": {"9": [1.0, 2]}}},
    }


@pytest.fixture
def cog(shared: Path, world: Any) -> Path:
    from diffusers import AutoencoderKLCogVideoX

    if not (shared / "cog").is_dir():
        tiny.make_t5(shared / "t5")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            vae = AutoencoderKLCogVideoX(
                block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2
            )
        vae.save_pretrained(shared / "cog-vae")
    return run_of(shared, "cog", world, **cog_sections(shared / "t5", shared / "cog-vae"))


def test_cogvideox_becomes_a_pipeline_that_computes_the_same(cog: Path, tmp_path: Path) -> None:
    from diffusers import CogVideoXPipeline

    done = export(cog, "diffusers", out=tmp_path / "out", shard_bytes=200_000)
    with quiet_transformers():
        theirs = CogVideoXPipeline.from_pretrained(done.out, local_files_only=True)
    run = open_run(cog)
    ours, vae = run.load_denoiser(), build_vae(run.recipe.vae, seed=0).model
    with torch.no_grad():
        tokens, _ = theirs.encode_prompt("a red circle", max_sequence_length=12, do_classifier_free_guidance=False)
        text = build_text(run.recipe.text, run.recipe.model).encode(["a red circle"])
        assert difference(tokens, text.tokens_BKD) <= LIMIT
        noisy = draw("noisy", 1, 4, 3, 8, 8)
        rotary = tuple(name_rotary(ours.model, (3, 8, 8)).values())
        prediction = theirs.transformer(
            noisy.transpose(1, 2), tokens, torch.tensor([300]), image_rotary_emb=rotary, return_dict=False
        )[0]
        assert difference(predict(ours, noisy, text), prediction.transpose(1, 2)) <= LIMIT
        assert difference(predict(ours, noisy, text, 0.5), prediction.transpose(1, 2)) > 1e-3
        pixels = theirs.vae.decode(noisy).sample
        assert difference(pixels, vae.decode(noisy)) <= LIMIT
    assert theirs.scheduler.config["snr_shift_scale"] == 3.0
    assert theirs.scheduler.config["prediction_type"] == "v_prediction"
    assert len(list((done.out / "transformer").glob("*-of-*.safetensors"))) > 1


def test_an_inpaint_model_leaves_as_its_transformer(
    cog: Path, shared: Path, world: Any, tmp_path: Path, caplog
) -> None:
    from diffusers import CogVideoXTransformer3DModel

    changed = cog_sections(shared / "t5", shared / "cog-vae", size="2b-inpaint")
    run = run_of(shared, "cog-inpaint", world, **changed, known={"law": "regions"})
    done = export(run, "diffusers", out=tmp_path / "out")
    assert "diffusers has no pipeline for this cogvideox_fun" in caplog.text
    model = CogVideoXTransformer3DModel.from_pretrained(done.out, subfolder="transformer")
    assert model.config["in_channels"] == 9 and not (done.out / "vae").exists()
    original = export(run, "original", out=tmp_path / "original").out
    content = json.loads((original / "transformer" / "config.json").read_text())
    assert content["in_channels"] == 9 and "add_noise_in_inpaint_model" in content


def test_a_control_model_leaves_as_its_own_pipeline(cog: Path, shared: Path, world: Any, tmp_path: Path) -> None:
    from diffusers import CogVideoXFunControlPipeline

    table = pl.read_parquet(world.shared / "data" / "manifest.parquet").filter(pl.col("kind") == "video")
    table.with_columns(pl.col("path").alias("control")).write_parquet(shared / "control.parquet")
    sections = cog_sections(shared / "t5", shared / "cog-vae", size="2b-control")
    place = {"manifest": str(shared / "control.parquet"), "root": str(world.shared / "data"), "control": True}
    sections["data"] |= {**place, "where": {"_delete_": True}}
    run = run_of(shared, "cog-control", world, **sections)
    done = export(run, "diffusers", out=tmp_path / "out")
    with quiet_transformers():
        theirs = CogVideoXFunControlPipeline.from_pretrained(done.out, local_files_only=True)
    assert theirs.transformer.config["in_channels"] == 8
    trained = open_run(run).load_denoiser().model.state_dict()
    own = theirs.transformer.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in trained.items() if name in own)


def test_opensora2_computes_the_same_as_flux(shared: Path, world: Any, tmp_path: Path) -> None:
    from diffusers import FluxTransformer2DModel

    from frameloom.models.layers.patches import pack, unpack

    run = run_of(shared, "mmdit", world, model={"overrides": FLUX})
    done = export(run, "diffusers", out=tmp_path / "out")
    flux, ours = (
        FluxTransformer2DModel.from_pretrained(done.out, subfolder="transformer"),
        open_run(run).load_denoiser(),
    )
    noisy, text = draw("noisy", 2, 4, 2, 4, 6), states(5, 384, 384)
    positions = torch.cartesian_prod(torch.arange(2.0), torch.arange(2.0), torch.arange(3.0))
    with torch.no_grad():
        tokens = flux(
            hidden_states=pack(noisy, 2),
            encoder_hidden_states=text.tokens_BKD,
            pooled_projections=text.pooled_BD,
            timestep=torch.full((2,), 0.3),
            img_ids=positions,
            txt_ids=torch.zeros(5, 3),
            return_dict=False,
        )[0]
    theirs = unpack(tokens, (2, 2, 3), 2)
    assert difference(predict(ours, noisy, text), theirs) <= LIMIT
    assert difference(predict(ours, noisy, text, 0.5), theirs) > 1e-4
    back_loads(export(run, "original", out=tmp_path / "original").out, ours, noisy, text)


def test_a_model_that_flux_cannot_hold_is_refused_by_its_fields(shared: Path, world: Any, tmp_path: Path) -> None:
    run = run_of(shared, "tiny-mmdit", world)
    with pytest.raises(ConfigError, match=r"theta is 100, it has 10000; normalize_vec is True.*--to original"):
        export(run, "diffusers", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def back_loads(folder: Path, ours: LoadedDenoiser, noisy: Tensor, text: TextStates) -> None:
    """The original layout fills a fresh model of the family that then predicts the same."""
    found = read_weights(folder, kind="denoiser")
    fresh = ours.family.build(ours.config, generator=stream(9, "fresh"))
    before = predict(LoadedDenoiser(ours.family, fresh.eval(), ours.config), noisy, text)
    ours.family.load_original(fresh, found.tensors)
    after = predict(LoadedDenoiser(ours.family, fresh.eval(), ours.config), noisy, text)
    expected = predict(ours, noisy, text)
    assert difference(after, expected) <= LIMIT and difference(before, expected) > LIMIT


def test_latte_computes_the_same_in_diffusers(shared: Path, world: Any, tmp_path: Path) -> None:
    from diffusers import LatteTransformer3DModel

    model = {"_delete_": True, "family": "latte", "overrides": LATTE}
    run = run_of(shared, "latte", world, model=model, objective={"kind": "epsilon"})
    done = export(run, "diffusers", out=tmp_path / "out")
    theirs, ours = (
        LatteTransformer3DModel.from_pretrained(done.out, subfolder="transformer"),
        open_run(run).load_denoiser(),
    )
    noisy, text = draw("noisy", 2, 4, 3, 8, 8), states(5, 384, 384)
    with torch.no_grad():
        expected = theirs(
            noisy, timestep=torch.tensor([300, 300]), encoder_hidden_states=text.tokens_BKD, return_dict=False
        )[0]
    assert difference(predict(ours, noisy, text), expected) <= LIMIT
    assert difference(predict(ours, noisy, text, 0.5), expected) > 1e-4
    back_loads(export(run, "original", out=tmp_path / "original").out, ours, noisy, text)


def test_opensora_plan_leaves_in_its_original_layout_alone(shared: Path, world: Any, tmp_path: Path) -> None:
    model = {"_delete_": True, "family": "opensora_plan", "overrides": PLAN}
    run = run_of(shared, "plan", world, model=model)
    with pytest.raises(ConfigError, match="diffusers has no model of this family; export it with --to original"):
        export(run, "diffusers", out=tmp_path / "out")
    noisy, text = draw("noisy", 2, 4, 3, 8, 8), states(5, 384, 384)
    done = export(run, "original", out=tmp_path / "out")
    back_loads(done.out, open_run(run).load_denoiser(), noisy, text)
    assert json.loads((done.out / "transformer" / "config.json").read_text())["_class_name"] == "OpenSoraT2V_v1_3"


def test_an_autoencoder_leaves_with_the_scale_of_its_latents(shared: Path, world: Any, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    vae = {"_delete_": True, "name": "kl", "size": "tiny"}
    data = {"buckets": {"_delete_": True, "64px": {"1": [1.0, 2]}}}
    run = run_of(shared, "vae", world, task="autoencoder", vae=vae, data=data)
    done = export(run, "diffusers", out=tmp_path / "out")
    theirs, ours = AutoencoderKL.from_pretrained(done.out, subfolder="vae"), open_run(run).load_vae().model
    latent = draw("latent", 2, 4, 1, 8, 8)
    config = theirs.config
    mean, std = (torch.tensor(config[name] or default).view(1, -1, 1, 1) for name, default in
                 (("latents_mean", [0.0]), ("latents_std", [1.0])))  # fmt: skip
    with torch.no_grad():
        pixels = theirs.decode(latent[:, :, 0] * std / config["scaling_factor"] + mean).sample
        assert difference(pixels, ours.decode(ours.denormalize(latent))[:, :, 0]) <= LIMIT
        assert difference(pixels, ours.decode(latent)[:, :, 0]) > 1e-3
    with pytest.raises(ConfigError, match="has no lora"):
        export(run, "lora", out=tmp_path / "lora")


def test_a_card_tells_recipe_data_metrics_files_and_samples(sdxl: Path, tmp_path: Path) -> None:
    (sdxl / "samples").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parents[2] / "docs" / "images" / _picture(), sdxl / "samples" / "contact-sheet.png")
    done = export(sdxl, "diffusers", out=tmp_path / "out")
    card = json.loads((done.out / "frameloom.json").read_text())
    state = json.loads((sdxl / "checkpoints" / "step-00000001" / "state.json").read_text())
    assert card["data"]["fingerprint"] == state["manifest"] and card["step"] == 1 and card["weights"] == "ema"
    assert card["recipe"] == open_run(sdxl).recipe.model_dump(mode="json")
    assert card["metrics"]["train/loss"] > 0
    assert all(digest_file(done.out / name) == digest for name, digest in card["files"].items())
    assert {name.split("/")[0] for name in card["files"]} == {"unet", "vae", "text_encoder", "text_encoder_2"}
    text = (done.out / "README.md").read_text()
    assert "![contact-sheet](samples/contact-sheet.png)" in text and state["manifest"] in text
    assert "StableDiffusionXLPipeline.from_pretrained" in text and "| train/loss |" in text


def _picture() -> str:
    return next((Path(__file__).parents[2] / "docs" / "images").glob("*.png")).name


def test_a_folder_that_is_there_is_replaced_only_when_asked(sdxl: Path, tmp_path: Path) -> None:
    out = export(sdxl, "original", out=tmp_path / "out").out
    with pytest.raises(CheckpointError, match="--force"):
        export(sdxl, "original", out=out)
    assert export(sdxl, "original", out=out, force=True).out == out
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match="no export wrote it"):
        export(sdxl, "original", out=tmp_path / "mine", force=True)


def test_what_a_run_does_not_have_is_told(sdxl: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained without lora"):
        export(sdxl, "lora", out=tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; there are \[0, 1\]"):
        export(sdxl, "original", out=tmp_path / "out", step=7)
    assert not (tmp_path / "out").exists()
