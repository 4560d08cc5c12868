"""Conversions as a whole: round trips to the bit, published layouts, our own model folders, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from frameloom.checkpoint.model_folder import read_weights, write_model_folder
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import digest_file
from frameloom.core.random import stream
from frameloom.interop.convert.convert import Conversion, Outcome, convert_weights, find_layouts
from frameloom.models.denoisers.opensora2.weights import export_original
from frameloom.models.registry import DENOISERS, VAES, get_denoiser, get_vae

GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = {
    "a.weight": torch.randn(20, 50, generator=GENERATOR),
    "a.half": torch.randn(30, generator=GENERATOR).half(),
    "b.brain": torch.randn(7, 3, generator=GENERATOR).bfloat16(),
    "b.count": torch.tensor([2**53 + 1, -5]),
    "b.single": torch.tensor(0.1),
    "b.empty": torch.empty(3, 0),
}


def convert(source: Path, out: Path, **options: object) -> Outcome:
    return convert_weights(Conversion(source, out, **options))


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return set(ours) == set(theirs) and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs
    )


def test_pickle_to_shards_to_one_file_and_back_is_exact(tmp_path):
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    outcome = convert(tmp_path / "pytorch_model.bin", tmp_path / "shards", shard_bytes=300)
    names = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert names[0] == "model-00001-of-00002.safetensors" and names[-1] == "model.safetensors.index.json"
    assert outcome.num_tensors == 6 and outcome.dtypes["float32"] == 3
    assert all(digest_file(path) == digest for path, digest in outcome.digests.items()) and len(outcome.digests) == 2
    convert(tmp_path / "shards", tmp_path / "one.safetensors")
    assert same(load_file(tmp_path / "one.safetensors"), WEIGHTS)
    convert(tmp_path / "one.safetensors", tmp_path / "again", shard_bytes=300)
    convert(tmp_path / "again" / "model.safetensors.index.json", tmp_path / "two.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    assert not same(load_file(tmp_path / "one.safetensors"), WEIGHTS | {"b.single": torch.tensor(0.2)})


def test_other_libraries_open_the_result(tmp_path):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    model.save_pretrained(tmp_path / "theirs", safe_serialization=False)
    assert (tmp_path / "theirs" / "diffusion_pytorch_model.bin").is_file()
    convert(tmp_path / "theirs", tmp_path / "ours", shard_bytes=4000)
    assert len(list((tmp_path / "ours").glob("diffusion_pytorch_model-*.safetensors"))) > 2
    for folder in ("ours", "theirs"):
        loaded = AutoencoderKL.from_pretrained(
            tmp_path / folder, local_files_only=True, use_safetensors=folder == "ours"
        )
        assert same(loaded.state_dict(), model.state_dict())
    with safe_open(next((tmp_path / "ours").glob("*-00001-*")), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tied_tensors_are_stored_once_and_read_under_every_name(tmp_path):
    shared = torch.randn(50, 8, generator=GENERATOR)
    torch.save({"shared.weight": shared, "encoder.weight": shared, "x": torch.ones(3)}, tmp_path / "a.bin")
    once = convert(tmp_path / "a.bin", tmp_path / "once.safetensors")
    assert once.num_tied == 1 and set(load_file(tmp_path / "once.safetensors")) == {"shared.weight", "x"}
    convert(tmp_path / "once.safetensors", tmp_path / "shards", shard_bytes=100)
    convert(tmp_path / "shards", tmp_path / "all.safetensors", copy_tied=True)
    for path in (tmp_path / "once.safetensors", tmp_path / "shards", tmp_path / "all.safetensors"):
        assert read_weights(path).tensors["encoder.weight"].equal(shared)
    assert set(load_file(tmp_path / "all.safetensors")) == {"shared.weight", "encoder.weight", "x"}


def test_sharded_pickles_are_read_through_their_index(tmp_path):
    shared = torch.ones(10)
    parts = {"pytorch_model-1.bin": {"a": shared, "tied": shared}, "pytorch_model-2.bin": {"b": torch.arange(4)}}
    for name, part in parts.items():
        torch.save(part, tmp_path / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    index = {"metadata": {"total_size": 72}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    convert(tmp_path, tmp_path / "out.safetensors", copy_tied=True)
    assert same(load_file(tmp_path / "out.safetensors"), {"a": shared, "tied": shared, "b": torch.arange(4)})


def test_number_formats_change_floats_alone(tmp_path):
    save_file(WEIGHTS, tmp_path / "a.safetensors")
    outcome = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype="bf16")
    assert outcome.dtypes == {"bfloat16": 5, "int64": 1}
    found = load_file(tmp_path / "b.safetensors")
    assert found["a.weight"].equal(WEIGHTS["a.weight"].bfloat16()) and found["b.count"].equal(WEIGHTS["b.count"])


def test_wrappers_and_prefixes_are_stripped_and_told(tmp_path, caplog):
    torch.save({f"module.{name}": tensor for name, tensor in WEIGHTS.items()}, tmp_path / "parallel.pt")
    torch.save({f"_orig_mod.{name}": tensor for name, tensor in WEIGHTS.items()}, tmp_path / "compiled.pt")
    inner = {name.replace(".", "._orig_mod."): tensor for name, tensor in WEIGHTS.items()}
    torch.save({f"module._orig_mod.{name}": tensor for name, tensor in inner.items()}, tmp_path / "both.pt")
    with caplog.at_level("INFO"):
        for name in ("parallel", "compiled", "both"):
            convert(tmp_path / f"{name}.pt", tmp_path / f"{name}.safetensors")
            assert same(load_file(tmp_path / f"{name}.safetensors"), WEIGHTS)
    assert "stripped 'module.' from 6 of 6 names" in caplog.text and "'_orig_mod.' from 6" in caplog.text
    save_file({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "mixed.safetensors")
    convert(tmp_path / "mixed.safetensors", tmp_path / "kept.safetensors")
    assert set(load_file(tmp_path / "kept.safetensors")) == {"module.a", "b"}
    convert(tmp_path / "mixed.safetensors", tmp_path / "stripped.safetensors", prefixes=("module.",))
    assert set(load_file(tmp_path / "stripped.safetensors")) == {"a", "b"}
    with pytest.raises(CheckpointError, match="no tensor begins with the prefix 'modul'"):
        convert(tmp_path / "stripped.safetensors", tmp_path / "x.safetensors", prefixes=("modul",))
    save_file({"module.b": torch.ones(1), "b": torch.ones(1)}, tmp_path / "clash.safetensors")
    with pytest.raises(CheckpointError, match="would be renamed to 'b', as"):
        convert(tmp_path / "clash.safetensors", tmp_path / "x.safetensors", prefixes=("module.",))


@pytest.fixture(scope="module")
def wfvae(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A trainer's file with averaged weights, as published, with its config.json; and the weights it should give."""
    folder = tmp_path_factory.mktemp("vae")
    family = get_vae("wfvae")
    config = family.sizes["tiny"]
    torch.manual_seed(0)
    state = family.build(config).state_dict()
    trained = {name: tensor for name, tensor in state.items() if "wavelet" not in name}
    content = {
        "epoch": 1,
        "ema_state_dict": {f"module.{name}": tensor for name, tensor in trained.items()},
        "state_dict": {"gen_model": {name: tensor + 1 for name, tensor in state.items()}, "dics_model": {}},
        "optimizer_state": {"gen_optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}}},
    }
    torch.save(content, folder / "merged.ckpt")
    (folder / "config.json").write_text(json.dumps(config.to_original()))
    return folder / "merged.ckpt", state


def test_a_published_wfvae_becomes_a_model_folder_with_its_filters(tmp_path, wfvae):
    path, state = wfvae
    convert(path, tmp_path / "vae", family="wfvae", section="ema_state_dict")
    found = read_weights(tmp_path / "vae")
    assert (found.kind, found.name) == ("vae", "wfvae") and same(dict(found.tensors), state)
    family = get_vae("wfvae")
    assert family.config_class(**found.config) == family.sizes["tiny"]
    convert(path, tmp_path / "raw", family="wfvae", section="state_dict.gen_model")
    assert not same(dict(read_weights(tmp_path / "raw").tensors), state)


def test_weights_alone_need_the_size_and_must_fit_it(tmp_path, wfvae):
    path, state = wfvae
    alone = shutil.copy(path, tmp_path / "alone.ckpt")
    with pytest.raises(ConfigError, match=r"--size: needed, because no config.json.*16ch.*tiny"):
        convert(alone, tmp_path / "vae", family="wfvae", section="ema_state_dict")
    with pytest.raises(ConfigError, match="--size of wfvae"):
        convert(alone, tmp_path / "vae", family="wfvae", section="ema_state_dict", size="tinny")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        convert(alone, tmp_path / "vae", family="wfvae", section="ema_state_dict", size="8ch")
    assert not (tmp_path / "vae").exists()
    convert(alone, tmp_path / "vae", family="wfvae", section="ema_state_dict", size="tiny")
    assert same(dict(read_weights(tmp_path / "vae").tensors), state)


@pytest.fixture(scope="module")
def mmdit() -> SimpleNamespace:
    family = get_denoiser("opensora2")
    model = family.build(family.sizes["tiny"], generator=stream(0, "denoiser weights"))
    layouts = {layout: export_original(model, layout) for layout in ("fused", "split", "diffusers")}
    return SimpleNamespace(model=model, layouts=layouts, config=dataclasses.asdict(family.sizes["tiny"]))


@pytest.mark.parametrize("given", ["fused", "split", "diffusers"])
def test_published_layouts_become_each_other_bit_for_bit(tmp_path, mmdit, given):
    save_file(mmdit.layouts[given], tmp_path / "in.safetensors")
    for layout, expected in mmdit.layouts.items():
        convert(tmp_path / "in.safetensors", tmp_path / layout, family="opensora2", size="tiny", layout=layout)
        assert same(dict(read_weights(tmp_path / layout).tensors), expected)
    other = "split" if given != "split" else "fused"
    assert not same(dict(read_weights(tmp_path / given).tensors), mmdit.layouts[other])


@pytest.mark.parametrize("name", [*DENOISERS, *VAES])
def test_every_family_leaves_in_all_its_layouts_and_comes_back(tmp_path, name):
    """Through files, on deferred tensors: so no family's key map looks at the numbers of a tensor."""
    kind, family = ("denoiser", get_denoiser(name)) if name in DENOISERS else ("vae", get_vae(name))
    torch.manual_seed(0)
    config, state = family.sizes["tiny"], family.build(family.sizes["tiny"]).state_dict()
    own = tmp_path / "own"
    write_model_folder(own, kind=kind, name=name, config=dataclasses.asdict(config), tensors=state)
    convert(own, tmp_path / "keys.safetensors", to="single")
    convert(tmp_path / "keys.safetensors", tmp_path / "back", family=name, size="tiny")
    assert same(dict(read_weights(tmp_path / "back").tensors), state)
    for layout in find_layouts(family):
        first, second = tmp_path / f"{layout}.safetensors", tmp_path / f"{layout}-again.safetensors"
        convert(own, first, layout=layout)
        convert(first, tmp_path / layout, family=name, size="tiny")
        convert(tmp_path / layout, second, layout=layout)
        assert first.read_bytes() == second.read_bytes()


def test_a_model_folder_is_exported_without_naming_its_family(tmp_path, mmdit):
    state = mmdit.model.state_dict()
    write_model_folder(tmp_path / "own", kind="denoiser", name="opensora2", config=mmdit.config, tensors=state)
    convert(tmp_path / "own", tmp_path / "out.safetensors", layout="diffusers")
    assert same(load_file(tmp_path / "out.safetensors"), mmdit.layouts["diffusers"])
    convert(tmp_path / "own", tmp_path / "half", dtype="bf16")
    half = read_weights(tmp_path / "half")
    assert half.name == "opensora2" and half.config == read_weights(tmp_path / "own").config
    assert {tensor.dtype for tensor in half.tensors.values()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="holds the denoiser 'opensora2'"):
        convert(tmp_path / "own", tmp_path / "x", family="wfvae")


def test_wrong_families_layouts_and_forms_are_told(tmp_path, mmdit):
    save_file(mmdit.layouts["split"], tmp_path / "in.safetensors")
    with pytest.raises(ConfigError, match="did you mean 'opensora2'"):
        convert(tmp_path / "in.safetensors", tmp_path / "x", family="opensora3")
    with pytest.raises(ConfigError, match=r"--layout of opensora2: 'fuse' is not known.*'fused'"):
        convert(tmp_path / "in.safetensors", tmp_path / "x", family="opensora2", size="tiny", layout="fuse")
    with pytest.raises(ConfigError, match="--to model"):
        convert(tmp_path / "in.safetensors", tmp_path / "x", to="model")
    with pytest.raises(CheckpointError, match="no sections"):
        convert(tmp_path / "in.safetensors", tmp_path / "x", section="ema")
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_nothing_is_replaced_unless_forced_and_never_the_source(tmp_path):
    save_file(WEIGHTS, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"is there already.*--force"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert set(load_file(tmp_path / "b.safetensors")) == {"b"}
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", force=True)
    assert same(load_file(tmp_path / "b.safetensors"), WEIGHTS)
    with pytest.raises(CheckpointError, match="holds what is to be converted"):
        convert(tmp_path / "a.safetensors", tmp_path / "a.safetensors", force=True, dtype="bf16")
    convert(tmp_path / "a.safetensors", tmp_path / "shards", shard_bytes=300)
    with pytest.raises(CheckpointError, match="is there already"):
        convert(tmp_path / "a.safetensors", tmp_path / "shards")
    convert(tmp_path / "a.safetensors", tmp_path / "shards", force=True)
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="holds what is to be converted"):
        convert(tmp_path / "shards", tmp_path / "shards", force=True)
    (tmp_path / "shards" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds tokenizer.json, which no conversion wrote"):
        convert(tmp_path / "a.safetensors", tmp_path / "shards", force=True)
    (tmp_path / "shards").rename(tmp_path / "shards.safetensors")
    with pytest.raises(CheckpointError, match="is a folder, and a file is to be written"):
        convert(tmp_path / "a.safetensors", tmp_path / "shards.safetensors", force=True)
    with pytest.raises(CheckpointError, match=r"ends with .safetensors"):
        convert(tmp_path / "a.safetensors", tmp_path / "name.bin", to="single")


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    save_file({"a": torch.zeros(5_000_000)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=20_000_000))
    with pytest.raises(CheckpointError, match="needs 20,000,000 bytes, and 20,000,000 are free"):
        convert(tmp_path / "a.safetensors", tmp_path / "deep" / "b.safetensors")
    assert not (tmp_path / "deep").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=40_000_000))
    convert(tmp_path / "a.safetensors", tmp_path / "deep" / "b.safetensors")


@pytest.mark.parametrize("form", ["single", "sharded"])
def test_a_failure_leaves_nothing_and_keeps_what_was_there(tmp_path, form):
    save_file({"a": torch.ones(100), "z": torch.full((4,), 1e30)}, tmp_path / "a.safetensors")
    out = tmp_path / "out" / ("x.safetensors" if form == "single" else "x")
    with pytest.raises(CheckpointError, match="z: 4 of its numbers are too large"):
        convert(tmp_path / "a.safetensors", out, dtype="fp16", shard_bytes=100)
    assert list((tmp_path / "out").iterdir()) == []
    convert(tmp_path / "a.safetensors", out, shard_bytes=100)
    before = read_weights(out).digest
    with pytest.raises(CheckpointError, match="too large"):
        convert(tmp_path / "a.safetensors", out, dtype="fp16", shard_bytes=100, force=True)
    assert read_weights(out).digest == before and [path.name for path in (tmp_path / "out").iterdir()] == [out.name]
