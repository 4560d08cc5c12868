"""Reading weights as they are published: files, shards, folders, pipelines; untrusted indexes; pickles refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from frameloom.checkpoint.model_folder import read_weights, write_model_folder
from frameloom.core.errors import CheckpointError
from frameloom.weights.files import format_index, name_shards, plan_shards
from frameloom.weights.lazy_tensors import defer_tensors

TENSORS = {f"block.{index}.weight": torch.full((8,), float(index)) for index in range(6)}


def write_shards(folder: Path, stem: str = "model", num_shards: int = 3) -> Path:
    """Shards and index as other libraries write them; returns the index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(TENSORS)
    files = name_shards(stem, num_shards)
    weight_map = {}
    for number, file in enumerate(files):
        part = {name: TENSORS[name] for name in names[number::num_shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 192}, "weight_map": weight_map}
    path = folder / f"{stem}.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


def change_index(path: Path, **parts: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))


def is_read(path: Path, **options: str) -> bool:
    found = read_weights(path, **options)
    return set(found.tensors) == set(TENSORS) and all(found.tensors[name].equal(TENSORS[name]) for name in TENSORS)


def test_an_index_its_folder_and_a_single_file_hold_the_same(tmp_path):
    index = write_shards(tmp_path / "sharded", "diffusion_pytorch_model")
    save_file(TENSORS, tmp_path / "single.safetensors")
    assert is_read(index) and is_read(tmp_path / "sharded") and is_read(tmp_path / "single.safetensors")
    found = read_weights(index)
    assert (found.kind, found.name, found.config) == ("", "", {})


def test_the_digest_follows_the_weights_and_not_the_way_they_are_named(tmp_path):
    index = write_shards(tmp_path / "a")
    first = read_weights(index).digest
    assert first == read_weights(tmp_path / "a").digest
    shard = tmp_path / "a" / "model-00001-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert read_weights(index).digest != first


def test_a_published_folder_keeps_its_config_apart(tmp_path):
    write_shards(tmp_path, "diffusion_pytorch_model")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "SomeModel", "depth": 6}))
    found = read_weights(tmp_path)
    assert found.config == {} and found.original_config == {"_class_name": "SomeModel", "depth": 6}


@pytest.mark.parametrize("name", ["diffusion_pytorch_model", "model", "anything"])
def test_a_folder_with_one_file_is_read_whatever_its_name(tmp_path, name):
    save_file(TENSORS, tmp_path / f"{name}.safetensors")
    assert is_read(tmp_path)


def test_the_usual_name_wins_over_variants_and_a_tie_is_told(tmp_path):
    save_file(TENSORS, tmp_path / "diffusion_pytorch_model.safetensors")
    save_file({"half": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    assert is_read(tmp_path)
    save_file({"half": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"several sets of weights .*diffusion_pytorch_model.*model.safetensors"):
        read_weights(tmp_path)


def test_numbered_shards_without_an_index_are_joined_when_all_are_there(tmp_path):
    write_shards(tmp_path).unlink()
    assert is_read(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="one of 3 shards, but 2 are there"):
        read_weights(tmp_path)


def test_a_pipeline_gives_the_part_that_is_asked_for(tmp_path):
    write_shards(tmp_path / "transformer", "diffusion_pytorch_model")
    (tmp_path / "vae").mkdir()
    save_file({"vae": torch.zeros(1)}, tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    (tmp_path / "model_index.json").write_text("{}")
    assert is_read(tmp_path, kind="denoiser") and set(read_weights(tmp_path, kind="vae").tensors) == {"vae"}
    with pytest.raises(CheckpointError, match=r"several models.*transformer.*vae"):
        read_weights(tmp_path)


def test_a_checkpoint_with_an_average_beside_the_weights_asks_which(tmp_path):
    write_shards(tmp_path / "model")
    assert is_read(tmp_path, kind="denoiser") and is_read(tmp_path)
    write_shards(tmp_path / "model_ema")
    with pytest.raises(CheckpointError, match=r"model.*model_ema"):
        read_weights(tmp_path, kind="denoiser")


def test_colossalai_counts_in_mib_and_numbers_its_files_otherwise(tmp_path):
    index = write_shards(tmp_path)
    change_index(index, metadata={"total_size": 192 / 2**20})
    assert is_read(index)


@pytest.mark.parametrize(
    "escape", ["../outside.safetensors", "/etc/hostname", "a/../../outside.safetensors", "", "file:outside.safetensors"]
)
def test_an_index_may_not_name_a_file_elsewhere(tmp_path, escape):
    index = write_shards(tmp_path / "in")
    save_file({"secret": torch.zeros(1)}, tmp_path / "outside.safetensors")
    weights = json.loads(index.read_text())["weight_map"]
    change_index(index, weight_map={**weights, "secret": escape})
    for path in (index, tmp_path / "in"):
        with pytest.raises(CheckpointError, match=r"leaves|absolute|empty|scheme") as caught:
            read_weights(path)
        assert "index.json" in str(caught.value)


def test_an_index_may_not_follow_a_link_elsewhere(tmp_path):
    index = write_shards(tmp_path / "in")
    shard = tmp_path / "in" / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "outside.safetensors")
    shard.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="leaves"):
        read_weights(index)


def test_the_cache_of_the_hub_may_keep_its_files_as_links(tmp_path):
    index = write_shards(tmp_path / "snapshots" / "1a2b" / "transformer")
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(index.parent.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(Path("../../../blobs") / str(number))
    assert is_read(tmp_path / "snapshots" / "1a2b", kind="denoiser")
    shard = index.with_name("model-00002-of-00003.safetensors")
    (tmp_path / "elsewhere").mkdir()
    shard.resolve().rename(tmp_path / "elsewhere" / "x")
    shard.unlink()
    shard.symlink_to(tmp_path / "elsewhere" / "x")
    with pytest.raises(CheckpointError, match="leaves"):
        read_weights(tmp_path / "snapshots" / "1a2b")


def test_each_mistake_of_an_index_is_named(tmp_path):
    def expect(found: str, **parts: Any) -> None:
        index = write_shards(tmp_path)
        change_index(index, **parts)
        with pytest.raises(CheckpointError, match=found) as caught:
            read_weights(index)
        assert "model" in str(caught.value) and len(str(caught.value)) < 400

    weights = json.loads(write_shards(tmp_path).read_text())["weight_map"]
    first = "model-00001-of-00003.safetensors"
    expect("says that .*00001.* holds 'ghost', but no file does", weight_map={**weights, "ghost": first})
    expect("00001.* holds 'block.1.weight', but .*00002.* does", weight_map={**weights, "block.1.weight": first})
    fewer = {name: file for name, file in weights.items() if name != "block.3.weight"}
    expect("does not list 'block.3.weight'", weight_map=fewer)
    expect("names model-9.safetensors, which is not there", weight_map={**weights, "x": "model-9.safetensors"})
    expect("all tensors take 191 bytes, the files hold 192", metadata={"total_size": 191})
    for wrong in ({}, [], None, {"a": 3}):
        expect("no table 'weight_map'", weight_map=wrong)
    assert is_read(write_shards(tmp_path))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    index = write_shards(tmp_path)
    twice = {"block.1.weight": torch.zeros(8), "block.0.weight": TENSORS["block.0.weight"]}
    save_file(twice, tmp_path / "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"00002.* holds 'block.1.weight', and so does model-00001"):
        read_weights(index)
    index.unlink()
    with pytest.raises(CheckpointError, match="and so does"):
        read_weights(tmp_path)


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt"])
def test_a_pickle_is_never_opened_and_the_message_has_the_command(tmp_path, suffix):
    path = tmp_path / f"my model.{suffix}"
    torch.save(TENSORS, path)
    for place in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"frameloom convert '.*my model") as caught:
            read_weights(place)
        assert "my model.safetensors'" in str(caught.value)


def test_an_index_of_pickles_is_refused_like_a_pickle(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(TENSORS, "pytorch_model-00001-of-00001.bin")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for place in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        with pytest.raises(CheckpointError, match="this is a pickle"):
            read_weights(place)


def test_nothing_to_read_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        read_weights(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="holds no weights"):
        read_weights(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not a file of weights"):
        read_weights(tmp_path / "notes.txt")


def test_a_model_folder_and_a_run_are_read_and_damage_is_found(tmp_path):
    write_model_folder(tmp_path / "run" / "export", kind="vae", name="wfvae", config={"a": 1}, tensors=TENSORS)
    for path in (tmp_path / "run", tmp_path / "run" / "export"):
        found = read_weights(path)
        assert (found.kind, found.name, found.config) == ("vae", "wfvae", {"a": 1}) and is_read(path)
    config = tmp_path / "run" / "export" / "config.json"
    text = config.read_text()
    config.write_text('{"kind": "vae"}')
    with pytest.raises(CheckpointError, match="name, config, sha256 missing"):
        read_weights(tmp_path / "run")
    config.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_weights(tmp_path / "run")
    config.write_text(text)
    save_file(TENSORS | {"block.0.weight": torch.ones(8)}, config.with_name("model.safetensors"))
    with pytest.raises(CheckpointError, match="damaged"):
        read_weights(tmp_path / "run")


def test_shards_are_cut_in_order_and_none_is_larger_than_asked():
    lazy = defer_tensors(TENSORS | {"large": torch.zeros(100)})
    shards = plan_shards(lazy, 70)
    assert [len(shard) for shard in shards] == [2, 2, 2, 1] and [name for shard in shards for name in shard] == list(
        lazy
    )
    assert len(plan_shards(lazy, 10**6)) == 1 and name_shards("model", 1) == ["model.safetensors"]
    index = json.loads(format_index(dict(zip(name_shards("model", 4), shards, strict=True))))
    assert index["metadata"]["total_size"] == lazy.num_bytes and set(index["weight_map"]) == set(lazy)
