"""The caches of a recipe: written by several processes, grown while training, refused when stale, taken from others."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from frameloom.builders.data import build_policy, read_manifest
from frameloom.builders.text import build_text
from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import read_weights
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import CacheError, ConfigError, FrameloomError
from frameloom.data.buckets.policy import possible_buckets
from frameloom.data.cache.filling import CacheJob
from frameloom.data.manifest.manifest import Manifest, write_manifest
from frameloom.training.caching import open_caches, write_caches
from frameloom.training.train import train
from tests.faults.warm import warm_parent

ROOT = Path(__file__).parents[2]


def cached(world, *overrides: str, name: str = "run", folder: str = "cache", **cache: object) -> Recipe:
    places = {part: str(world.folder / folder / part) for part in ("latents", "text")}
    data = {"frame_start": "first", "cache": places | cache}
    return world.recipe("--name", name, *overrides, data=data)


def losses(run: Path) -> list[str]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [float(line["train/loss"]).hex() for line in lines if "train/loss" in line]


def weights(run: Path) -> bytes:
    return (run / "export" / "model.safetensors").read_bytes()


def read_all(recipe: Recipe) -> dict[tuple[str, str], torch.Tensor]:
    """Every latent and embedding that training may ask for."""
    manifest, policy = read_manifest(recipe), build_policy(recipe)
    caches = open_caches(recipe, manifest, policy)
    assert caches.latents is not None and caches.text is not None
    found = {("text", text): caches.text.get([text])["tokens_BKD"] for text in manifest.column("caption").unique()}
    for row in range(len(manifest)):
        for bucket in policy.buckets:
            try:
                found[f"{row}", bucket.name] = caches.latents.get(np.array([row]), bucket)[0]
            except CacheError:
                continue
    return found


def assert_equal(one: dict[tuple[str, str], torch.Tensor], other: dict[tuple[str, str], torch.Tensor]) -> None:
    assert one.keys() == other.keys() and len(one) > 40
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_on_a_growing_cache_equals_one_on_a_full_cache(world):
    full = cached(world, name="full", folder="full")
    list(write_caches(full))
    wanted = train(full)
    grown = train(cached(world, name="grown", folder="grown", on_demand=True))
    assert losses(grown) == losses(wanted)
    assert weights(grown) == weights(wanted)
    other = train(cached(world, "--seed", "43", name="other", folder="other", on_demand=True))
    assert losses(other) != losses(wanted)
    shared = set((world.folder / "grown" / "latents" / "shards").iterdir())
    assert shared
    # What is there is used: a second run adds only what the first did not ask for, and gets the same numbers.
    assert losses(train(cached(world, name="again", folder="grown", on_demand=True))) == losses(wanted)
    assert set((world.folder / "grown" / "latents" / "shards").iterdir()) == shared


def test_a_run_from_caches_needs_no_clips_to_the_end(world):
    """People cache in order to delete: steps, resume and export of a denoiser read the caches alone."""
    data = world.folder / "data"
    shutil.copytree(world.shared / "data", data)
    own = ("--data.manifest", str(data / "manifest.parquet"))
    list(write_caches(cached(world, *own)))
    wanted = train(cached(world, *own, name="with-clips"))
    paths = [data / path for path in read_manifest(cached(world, *own)).column("path").unique()]
    assert len(paths) > 10
    for path in paths:
        path.unlink()
    run = train(cached(world, *own, name="without-clips"))
    assert losses(run) == losses(wanted) and weights(run) == weights(wanted)
    exported, expected = (json.loads((one / "export" / "config.json").read_text()) for one in (run, wanted))
    assert exported == expected
    assert read_weights(run).name == cached(world).model.family
    # Without the caches it is the clips that are missed.
    with pytest.raises(FrameloomError):
        train(world.recipe("--name", "uncached", *own, data={"frame_start": "first"}))


def test_a_grown_cache_is_completed_by_the_command(world):
    train(cached(world, "--train.steps", "2", on_demand=True))
    with pytest.raises(CacheError, match=r"lacks \d+ of 36 latents"):
        train(cached(world, name="fixed"))
    lines = list(write_caches(cached(world)))
    num_new = int(lines[0].split("latents, ")[1].split()[0])
    assert 0 < num_new < 36
    list(write_caches(cached(world, folder="whole")))
    assert_equal(read_all(cached(world)), read_all(cached(world, folder="whole")))


def test_latents_and_text_can_be_written_alone(world):
    recipe = cached(world)
    assert [line.split(":")[0] for line in write_caches(recipe, CacheJob(text=True))] == [recipe.data.cache.text]
    assert not (world.folder / "cache" / "latents").exists()
    assert len(list(write_caches(recipe, CacheJob(latents=True)))) == 1
    both = list(write_caches(recipe, CacheJob(latents=True, text=True)))
    assert len(both) == 2 and all(", 0 of them encoded now" in line for line in both)
    with pytest.raises(ConfigError, match=r"--text: data\.cache\.text names no folder"):
        list(write_caches(cached(world, "--data.cache.text", "null"), CacheJob(text=True)))
    with pytest.raises(ConfigError, match="--prune works with one process"):
        list(write_caches(recipe, CacheJob(prune=True, num_ranks=2)))


def test_a_new_encoder_is_spelled_out_and_its_old_latents_can_be_dropped(world):
    list(write_caches(cached(world)))
    text = cached(world, "--text.encoders.0.max_length", "12")
    with pytest.raises(CacheError, match=r"encoder\.max_length: wanted 12, cache has 16"):
        train(text)
    lines = list(write_caches(text, CacheJob(prune=True)))
    assert ", 0 of them encoded now" in lines[0] and "others dropped" not in lines[0]
    assert "others dropped" in lines[1]
    train(text)


def test_stored_samples_train_and_differ_from_moments(world):
    moments, sample = cached(world, name="m"), cached(world, name="s", store="sample")
    list(write_caches(moments))
    with pytest.raises(CacheError, match=r'store\.kind: wanted "sample", cache has "moments"'):
        train(sample)
    assert "36 of them encoded now" in next(iter(write_caches(sample)))
    assert losses(train(sample)) != losses(train(moments))


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"} | more


@pytest.mark.slow
def test_two_ranks_and_two_strangers_at_once_write_one_right_cache(world):
    list(write_caches(cached(world, folder="whole")))
    wanted = read_all(cached(world, folder="whole"))
    cached(world, group=5)
    words = ["data", "cache", world.folder / "recipe.yaml"]
    starts = [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}, {}, {}]
    parent = warm_parent()
    started = [parent.start_frameloom(words, env=environment(**start)) for start in starts]
    results = [parent.finish(child, 240) for child in started]
    assert [done.returncode for done in results] == [0] * 4, results
    assert "rank 1 of 2: " in results[1].stdout
    assert_equal(read_all(cached(world, group=5)), wanted)
    counts = [int(out.splitlines()[0].split("latents, ")[1].split()[0]) for out in (done.stdout for done in results)]
    # Portions are claimed, so the strangers share the work instead of doing it twice.
    assert sum(counts) == 36, counts
    again = parent.finish(parent.start_frameloom(words, env=environment()), 240)
    assert again.returncode == 0, again.stderr
    assert "36 latents, 0 of them encoded now" in again.stdout


def write_foreign(world, kind: str) -> Path:
    """A manifest of the world's images with another system's files beside them; gives its folder."""
    recipe = world.recipe()
    table = pl.read_parquet(recipe.data.manifest).filter((pl.col("kind") == "image") & (pl.col("split") == "train"))
    folder = world.folder / kind
    text = build_text(recipe.text, recipe.model)
    latent_channels = build_vae(recipe.vae, seed=0).model.latent_channels
    write_manifest(folder / "images.parquet", table)
    policy = build_policy(recipe)
    bucket_of = dict(zip(*possible_buckets(Manifest.read(folder / "images.parquet"), policy), strict=True))
    for number, row in enumerate(table.iter_rows(named=True)):
        states = text.encode([row["caption"]])
        stem = Path(row["path"]).with_suffix("")
        shape = policy.buckets[bucket_of[number]]
        latent = np.full((1, latent_channels, shape.height // 8, shape.width // 8), number, dtype=np.float32)
        files = {
            "open_sora_plan": {
                f"emb/{stem}-0.npz": {"text_emb": states.tokens_BKD[0], "mask": states.mask_BK[0].byte()}
            },
            "sdxl": {
                f"latent_cache/{stem.name}.npy": latent,
                f"crossattn_cache/{stem.name}.npy": states.tokens_BKD,
                f"vector_cache/{stem.name}.npy": torch.cat([states.pooled_BD, torch.ones(1, 20)], 1),
            },
        }[kind]
        for name, value in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(value, dict):
                np.savez(path, **{key: np.asarray(part) for key, part in value.items()})
            else:
                np.save(path, np.asarray(value))
    return folder


def foreign_recipe(world, kind: str, folder: Path, *overrides: str) -> Recipe:
    path = world.write_recipe(data={"frame_start": "first", "cache": {"external": kind}})
    place = folder / "emb" if kind == "open_sora_plan" else folder
    words = ["--data.manifest", str(folder / "images.parquet"), "--data.root", str(world.shared / "data")]
    return load_recipe(path, [*words, "--data.cache.external_folders", f"[{place}]", *overrides])


def test_open_sora_plan_embeddings_train_like_fresh_ones(world):
    folder = write_foreign(world, "open_sora_plan")
    recipe = foreign_recipe(world, "open_sora_plan", folder)
    caches = open_caches(recipe, read_manifest(recipe), build_policy(recipe))
    assert caches.row_text is not None and caches.latents is None
    found = caches.row_text.get_rows([1, 0])
    wanted = build_text(recipe.text, recipe.model).encode([read_manifest(recipe).caption(row) for row in (1, 0)])
    assert torch.equal(found["tokens_BKD"], wanted.tokens_BKD) and torch.equal(found["mask_BK"], wanted.mask_BK)
    assert len(losses(train(recipe))) == 6


def test_an_sdxl_cache_trains_and_says_what_it_has_frozen(world, caplog, monkeypatch):
    folder = write_foreign(world, "sdxl")
    monkeypatch.setattr(logging.getLogger("frameloom"), "propagate", True)
    with caplog.at_level("WARNING", logger="frameloom"):
        run = train(foreign_recipe(world, "sdxl", folder))
    assert len(losses(run)) == 6
    told = [record.getMessage() for record in caplog.records if "SDXL cache" in record.getMessage()]
    assert len(told) == 1 and "one draw of each latent" in told[0] and "one random crop" in told[0]
