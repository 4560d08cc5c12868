"""Whole SDXL models: diffusers' folders to Stability's single file and back, and diffusers as the judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.interop.convert.convert import Conversion, Outcome, convert_weights
from frameloom.models.denoisers.sdxl.weights import CLASSES
from tests.sampling.sdxl_pipeline import load_pipeline, make_pipeline, picture

SECOND = "conditioner.embedders.1.model."
FIRST = "conditioner.embedders.0.transformer."


def convert(source: Path, out: Path, **options: object) -> Outcome:
    return convert_weights(Conversion(source, out, **options))


def weights(folder: Path) -> dict[str, dict[str, Tensor]]:
    """All tensors of a pipeline by part; text encoders with the outer name that some versions leave out."""
    found: dict[str, dict[str, Tensor]] = {}
    for part in CLASSES:
        found[part] = {
            name if "text" not in part or name.startswith("text_") else f"text_model.{name}": tensor
            for file in (folder / part).glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
    return found


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return set(ours) == set(theirs) and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs
    )


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline(tmp_path_factory.mktemp("sdxl") / "pipeline")


@pytest.fixture(scope="module")
def single(pipeline: Path) -> Path:
    out = pipeline.with_name("single.safetensors")
    convert(pipeline, out)
    return out


def test_folders_become_one_file_and_come_back_to_the_bit(pipeline: Path, single: Path, tmp_path: Path) -> None:
    keys = load_file(single)
    original = weights(pipeline)
    assert keys[f"{SECOND}transformer.resblocks.0.attn.in_proj_weight"].shape == (72, 24)
    projection = original["text_encoder_2"]["text_projection.weight"]
    assert torch.equal(keys[f"{SECOND}text_projection"], projection.T)
    outcome = convert(single, tmp_path / "back", to="pipeline", config=pipeline, shard_bytes=200_000)
    back = weights(tmp_path / "back")
    assert all(same(back[part], original[part]) for part in CLASSES)
    assert outcome.num_tensors == sum(map(len, original.values()))
    assert len(list((tmp_path / "back" / "unet").glob("*-of-*.safetensors"))) > 1
    changed = original["unet"] | {"conv_in.bias": original["unet"]["conv_in.bias"] + 1}
    assert not same(back["unet"], changed)
    convert(tmp_path / "back", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == single.read_bytes()


def test_the_folder_that_comes_back_draws_the_same_picture(pipeline: Path, single: Path, tmp_path: Path) -> None:
    convert(single, tmp_path / "back", to="pipeline", config=pipeline)
    theirs, ours = load_pipeline(pipeline), load_pipeline(tmp_path / "back")
    expected = picture(theirs)
    assert torch.equal(picture(ours), expected)
    assert not torch.equal(picture(ours, "a blue square"), expected)
    index = json.loads((tmp_path / "back" / "model_index.json").read_text())
    reference = json.loads((pipeline / "model_index.json").read_text())
    assert all(index[part] == reference[part] for part in (*CLASSES, "tokenizer", "tokenizer_2", "scheduler"))


def test_diffusers_opens_our_single_file(pipeline: Path, single: Path) -> None:
    from diffusers import StableDiffusionXLPipeline

    from frameloom.models.text.transformers_folder import quiet_transformers

    theirs = load_pipeline(pipeline)
    with quiet_transformers():
        loaded = StableDiffusionXLPipeline.from_single_file(
            str(single), config=str(pipeline), local_files_only=True, add_watermarker=False
        )
    loaded.set_progress_bar_config(disable=True)
    for part in CLASSES:
        assert same(getattr(loaded, part).state_dict(), getattr(theirs, part).state_dict()), part
    assert torch.equal(picture(loaded), picture(theirs))


def test_tensors_that_folders_do_not_keep_come_back(single: Path, pipeline: Path, tmp_path: Path) -> None:
    whole = load_file(single) | {
        f"{SECOND}logit_scale": torch.tensor(4.6052),
        f"{FIRST}text_model.embeddings.position_ids": torch.arange(12)[None],
    }
    save_file(whole, tmp_path / "whole.safetensors", metadata={"modelspec.title": "Tiny"})
    convert(tmp_path / "whole.safetensors", tmp_path / "folders", to="pipeline", config=pipeline)
    assert same(weights(tmp_path / "folders")["text_encoder_2"], weights(pipeline)["text_encoder_2"])
    convert(tmp_path / "folders", tmp_path / "back.safetensors")
    assert same(load_file(tmp_path / "back.safetensors"), whole)
    with safe_open(tmp_path / "back.safetensors", framework="pt") as file:
        assert file.metadata()["modelspec.title"] == "Tiny"


def test_a_pickle_and_shards_give_the_same_folders(single: Path, pipeline: Path, tmp_path: Path) -> None:
    torch.save({"state_dict": load_file(single), "global_step": 3}, tmp_path / "model.ckpt")
    convert(single, tmp_path / "shards", shard_bytes=300_000)
    for name, source in (("one", tmp_path / "model.ckpt"), ("two", tmp_path / "shards")):
        convert(source, tmp_path / name, to="pipeline", config=pipeline)
        assert all(same(weights(tmp_path / name)[part], weights(pipeline)[part]) for part in CLASSES)


def test_the_number_format_of_a_whole_pipeline_changes(pipeline: Path, tmp_path: Path) -> None:
    convert(pipeline, tmp_path / "half", to="pipeline", dtype="bf16")
    half = weights(tmp_path / "half")
    assert {tensor.dtype for part in half.values() for tensor in part.values()} == {torch.bfloat16}
    assert (tmp_path / "half" / "tokenizer" / "vocab.json").is_file() == (
        pipeline / "tokenizer" / "vocab.json"
    ).is_file()
    assert load_pipeline(tmp_path / "half").unet.config["block_out_channels"] == [16, 32]


def test_a_size_that_nobody_published_needs_a_description(single: Path, pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unet is none of the published sizes.*--config"):
        convert(single, tmp_path / "out", to="pipeline")
    wrong = tmp_path / "wrong"
    (wrong / "unet").mkdir(parents=True)
    content = json.loads((pipeline / "unet" / "config.json").read_text()) | {"cross_attention_dim": 48}
    (wrong / "unet" / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="of another shape"):
        convert(single, tmp_path / "out", to="pipeline", config=wrong)
    assert not (tmp_path / "out").exists()


def test_without_tokenizers_the_folder_says_so(single: Path, pipeline: Path, tmp_path: Path, caplog) -> None:
    configs = tmp_path / "configs"
    for part in CLASSES:
        (configs / part).mkdir(parents=True)
        (configs / part / "config.json").write_bytes((pipeline / part / "config.json").read_bytes())
    convert(single, tmp_path / "out", to="pipeline", config=configs)
    assert "no tokenizer_2" in caplog.text
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["tokenizer"] == [None, None]


def test_what_makes_no_sense_is_refused(single: Path, pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--family and --layout must be left out"):
        convert(single, tmp_path / "out", to="pipeline", family="sdxl")
    with pytest.raises(ConfigError, match="only --to pipeline needs it"):
        convert(single, tmp_path / "out", config=pipeline)
    with pytest.raises(ConfigError, match="no such folder"):
        convert(single, tmp_path / "out", to="pipeline", config=tmp_path / "absent")
    save_file(
        {name: one for name, one in load_file(single).items() if "first_stage" not in name}, tmp_path / "a.safetensors"
    )
    with pytest.raises(CheckpointError, match="has no vae"):
        convert(tmp_path / "a.safetensors", tmp_path / "out", to="pipeline", config=pipeline)
    convert(single, tmp_path / "out", to="pipeline", config=pipeline)
    with pytest.raises(CheckpointError, match="--force"):
        convert(single, tmp_path / "out", to="pipeline", config=pipeline)
    convert(single, tmp_path / "out", to="pipeline", config=pipeline, force=True)
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match=r"mine\.txt"):
        convert(single, tmp_path / "out", to="pipeline", config=pipeline, force=True)
