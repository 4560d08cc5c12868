"""Folders of text encoders: what is known before weights are read, digests, layouts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.models.registry import TEXT_ENCODERS
from frameloom.models.text import clip
from frameloom.models.text.base import TextOptions, build_text_encoder, choose_options
from frameloom.models.text.transformers_folder import quiet_transformers
from tests.models.text import tiny

CAPTION = "a red circle"


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_sdxl(tmp_path_factory.mktemp("sdxl"))


@pytest.fixture
def folder(t5_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return tiny.copy(t5_folder, tmp_path / "t5")


def build(folder: Path | None, name: str = "t5", *, max_length: int = 12, **options: Any) -> Any:
    return build_text_encoder(name, max_length=max_length, path=folder, options={"precision": "fp32", **options})


def encode(folder: Path, **options: Any) -> torch.Tensor:
    return build(folder, **options).encode([CAPTION]).tokens_BKD


def test_the_longest_text_of_clip_fills_all_windows() -> None:
    for name in clip.DEFAULTS:
        spec = TEXT_ENCODERS[name]
        assert spec.window is not None and spec.max_length == 602
        assert clip._count_windows(spec.max_length, spec.window, name) == clip.MAX_WINDOWS


def test_widths_are_known_before_any_weight_is_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no tensors here")
    encoder = build(folder)
    assert (encoder.width, encoder.pooled_width, encoder.max_length) == (16, 0, 12)
    assert encoder.tokenize([CAPTION])[0].shape == (1, 12)
    with pytest.raises(CheckpointError, match="the weights cannot be read"):
        encoder.encode([CAPTION])


def test_fingerprint_is_the_same_in_another_place(t5_folder: Path, folder: Path) -> None:
    (folder / "README.md").write_text("not a part of the model")
    assert build(folder).fingerprint() == build(t5_folder).fingerprint()


@pytest.mark.parametrize(
    "changed",
    [
        {"max_length": 13},
        {"padding": "mask"},
        {"null": "zeros"},
        {"cleaning": "once"},
        {"precision": "bf16"},
        {"pad": "end"},
    ],
)
def test_fingerprint_follows_every_setting(t5_folder: Path, changed: dict[str, Any]) -> None:
    assert build(t5_folder, **changed).fingerprint() != build(t5_folder).fingerprint()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_fingerprint_follows_every_file(t5_folder: Path, folder: Path, name: str) -> None:
    if name == "model.safetensors":
        tensors = load_file(folder / name)
        tensors["shared.weight"][0, 0] += 1
        save_file(tensors, folder / name)
    else:
        (folder / name).write_text((folder / name).read_text() + " ")
    assert build(folder).fingerprint() != build(t5_folder).fingerprint()


def test_sharded_weights_are_the_same_model(t5_folder: Path, folder: Path) -> None:
    with quiet_transformers():
        model = T5EncoderModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    tiny.save(model, folder, max_shard_size="8KB")
    parts = sorted(folder.glob("model-*.safetensors"))
    assert len(parts) > 2 and torch.equal(encode(folder), encode(t5_folder))
    before = build(folder).fingerprint()
    tensors = load_file(parts[-1])
    tensors[next(iter(tensors))] += 1
    save_file(tensors, parts[-1])
    assert build(folder).fingerprint() != before
    parts[-1].unlink()
    with pytest.raises(CheckpointError, match=f"{parts[-1].name} missing"):
        build(folder)


def test_an_index_cannot_lead_out_of_its_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"shared.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="does not list the files"):
        build(folder)


def test_weights_of_a_published_number_format_are_found(t5_folder: Path, folder: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.fp16.safetensors", metadata={"format": "pt"})
    assert 0 < (encode(folder) - encode(t5_folder)).abs().max() < 0.02


def test_an_embedding_under_either_name_is_the_same_model(t5_folder: Path, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(encode(folder), encode(t5_folder))


def test_missing_weights_are_listed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "block.1" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"T5EncoderModel finds no weights for encoder\.block\.1.* and \d+ more; "
    ):
        encode(folder)


def test_t5_is_found_among_the_encoders_of_a_pipeline(t5_folder: Path, sdxl: Path, tmp_path: Path) -> None:
    pipeline = tiny.copy(sdxl, tmp_path / "flux")
    for part in ("text_encoder_2", "tokenizer_2"):
        for found in (pipeline / part).iterdir():
            found.unlink()
    for found in tiny.copy(t5_folder, tmp_path / "all").iterdir():
        found.rename(pipeline / ("tokenizer_2" if "token" in found.name else "text_encoder_2") / found.name)
    assert torch.equal(encode(pipeline), encode(t5_folder))
    assert build(pipeline, "clip_l").width == 16


def test_a_pickle_is_refused_with_the_command_that_converts_it(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin only, a pickle.*frameloom convert .*\.bin .*\.safetensors"
    ):
        build(folder)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"has neither config\.json nor text_encoder/config\.json"),
        ("model.safetensors", r"no model\.safetensors and no"),
        ("tokenizer.json", r"no tokenizer here or in .*spiece\.model"),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=message):
        build(folder)


def test_other_models_are_refused_by_their_type(t5_folder: Path, sdxl: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mt5 is a model of type mt5, but .* holds 't5'"):
        build(t5_folder, "mt5")
    with pytest.raises(CheckpointError, match=r"of type t5, but .*text_encoder holds 'clip_text_model'"):
        build(sdxl)


def test_the_tokenizer_of_a_larger_model_is_refused(folder: Path) -> None:
    tokenizer = tiny.t5_tokenizer()
    tokenizer.add_tokens([f"word{index}" for index in range(80)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"the tokenizer has 1\d\d tokens, the model in .* only 128"):
        build(folder).tokenize([CAPTION])


def test_a_path_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="t5: its weights come with no package; give the folder"):
        build(None)
    with pytest.raises(CheckpointError, match="no such folder"):
        build(tmp_path / "nowhere")


def test_damaged_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        build(folder)


def test_options_are_checked_by_name_and_value() -> None:
    defaults = TextOptions()
    assert choose_options(defaults, {"keep_chinese": True}, encoder="t5") == TextOptions(keep_chinese=True)
    with pytest.raises(ConfigError, match="text encoder t5: option: 'paddings' is not known; did you mean 'padding'"):
        choose_options(defaults, {"paddings": "mask"}, encoder="t5")
    for name, value in (("padding", "none"), ("keep_chinese", 1), ("precision", True)):
        with pytest.raises(ConfigError, match=f"text encoder t5: {name} is {value!r}; choose "):
            choose_options(defaults, {name: value}, encoder="t5")
    with pytest.raises(ConfigError, match="minilm: is used in one way only; leave out padding"):
        build_text_encoder("minilm", max_length=8, options={"padding": "mask"})
