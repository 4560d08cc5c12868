"""Caches of other systems are read as they lie; what does not fit is refused with the file's name, pickles always."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import save_file

from frameloom.config.schema.buckets import FixedSection
from frameloom.config.schema.data import DataSection
from frameloom.core.errors import ConfigError, DataError
from frameloom.data.buckets.fixed import Fixed
from frameloom.data.buckets.policy import Bucket
from frameloom.data.cache.external import (
    TextShape,
    column_latents,
    column_text,
    open_sora_plan_text,
    read_arrays,
    sdxl_latents,
    sdxl_text,
)
from frameloom.data.loading.batch import BatchRequest
from frameloom.data.loading.reader import BatchReader, Stores
from frameloom.data.manifest.manifest import Manifest, write_manifest
from frameloom.data.media.decode import ClipError

SHAPE = TextShape(max_length=6, width=4, pooled_width=3)
BUCKET = Bucket(0, "64px", 1, "1:1", 32, 64, 2)


def latent_shape(bucket: Bucket) -> tuple[int, int, int, int]:
    return 4, bucket.frames, bucket.height // 8, bucket.width // 8


def make_manifest(folder: Path, paths: list[str], captions: list[str] | None = None, **columns: list[Any]) -> Manifest:
    facts = {"kind": "image", "height": 64, "width": 64, "frames": 1}
    table = pl.DataFrame({"path": paths, "caption": captions or [f"about {path}" for path in paths], **columns})
    table = table.with_columns(*(pl.lit(value).alias(name) for name, value in facts.items()), pl.lit(None).alias("fps"))
    write_manifest(folder / "m.parquet", table)
    return Manifest.read(folder / "m.parquet")


def embedding(key: int, length: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """States with padding that is not zero, as T5 gives it, and the mask."""
    states = np.random.default_rng(key).normal(size=(length, 4)).astype(np.float32)
    return states, (np.arange(length) < 2 + key).astype(np.uint8)


def save(path: Path, **arrays: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Our warnings, also after a command has set up logging of its own."""
    logger = logging.getLogger("frameloom")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level("WARNING", logger="frameloom"):
        yield caplog
    logger.propagate = before


def test_plan_embeddings_of_both_versions_are_found_by_name(tmp_path: Path) -> None:
    paths = ["sub/a.mp4.jpg", "b.jpg", "c.jpg", "d.jpg"]
    manifest = make_manifest(tmp_path, paths, frame_idx=["0:65", "0:65", "65:130", "0:65"])
    folder = tmp_path / "emb"
    data = [embedding(key) for key in range(4)]
    save(folder / "sub/a.mp4-0.npz", text_emb=data[0][0], mask=data[0][1])
    save(folder / "b-frame_idx-0:65.npz", text_emb=data[1][0][None], mask=data[1][1][None])
    save_file(
        {"text_emb": torch.from_numpy(data[2][0]), "mask": torch.from_numpy(data[2][1])}, folder / "c-0.safetensors"
    )
    np.save(folder / "d.npy", data[3][0][:3])
    source = open_sora_plan_text(manifest, [folder], SHAPE)
    found = source.get_rows(np.array([2, 0, 1, 3]))
    assert {name: tuple(part.shape) for name, part in found.items()} == {
        "tokens_BKD": (4, 6, 4),
        "mask_BK": (4, 6),
        "pooled_BD": (4, 3),
    }
    for place, key in enumerate((2, 0, 1)):
        states, mask = (torch.from_numpy(part) for part in data[key])
        assert torch.equal(found["mask_BK"][place], mask.bool())
        assert torch.equal(found["tokens_BKD"][place], states * mask[:, None])
    assert found["mask_BK"][3].tolist() == [True] * 3 + [False] * 3


def test_a_name_can_be_spelled_with_columns(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, ["a.jpg"], part=["7"])
    save(tmp_path / "emb" / "a-part-7.npz", text_emb=embedding(1)[0], mask=embedding(1)[1])
    assert (
        open_sora_plan_text(manifest, [tmp_path / "emb"], SHAPE, name="{stem}-part-{part}")
        .get_rows([0])["mask_BK"]
        .sum()
        == 3
    )
    with pytest.raises(DataError, match="no column 'prt'"):
        open_sora_plan_text(manifest, [tmp_path / "emb"], SHAPE, name="{stem}-{prt}")


def test_a_second_folder_brings_pooled_vectors_and_without_one_they_are_zero_with_a_warning(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    manifest = make_manifest(tmp_path, ["a.jpg"])
    save(tmp_path / "t5" / "a-0.npz", text_emb=embedding(1)[0], mask=embedding(1)[1])
    save(tmp_path / "clip" / "a-0.npz", text_emb=np.array([[1.0, 2.0, 3.0]]), mask=np.ones(1))
    both = open_sora_plan_text(manifest, [tmp_path / "t5", tmp_path / "clip"], SHAPE).get_rows([0])
    assert both["pooled_BD"].tolist() == [[1.0, 2.0, 3.0]]
    assert not [record for record in log.records if "pooled" in record.getMessage()]
    assert not open_sora_plan_text(manifest, [tmp_path / "t5"], SHAPE).get_rows([0])["pooled_BD"].any()
    assert [record for record in log.records if "pooled vectors are zero" in record.getMessage()]
    with pytest.raises(ConfigError, match="names 3 folders"):
        open_sora_plan_text(manifest, [tmp_path] * 3, SHAPE)


@pytest.mark.parametrize(
    ("states", "mask", "message"),
    [
        (np.zeros((6, 5)), np.ones(6), r"shape \(6, 5\); this recipe expects at most 6 tokens of width 4"),
        (np.zeros((7, 4)), np.ones(7), "at most 6 tokens"),
        (np.zeros((2, 6, 4)), np.ones(6), r"shape \(2, 6, 4\)"),
        (np.zeros((6, 4)), np.ones(5), r"mask of shape \(5,\) for 6 tokens"),
    ],
)
def test_embeddings_of_another_shape_are_refused_with_their_file(
    tmp_path: Path, states: np.ndarray, mask: np.ndarray, message: str
) -> None:
    manifest = make_manifest(tmp_path, ["a.jpg"])
    save(tmp_path / "emb" / "a-0.npz", text_emb=states, mask=mask)
    with pytest.raises(DataError, match=rf"a-0\.npz: .*{message}"):
        open_sora_plan_text(manifest, [tmp_path / "emb"], SHAPE).get_rows([0])


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "ran")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, ["a.jpg", "b.jpg", "c.jpg"])
    canary, folder = tmp_path / "canary", tmp_path / "emb"
    folder.mkdir()
    (folder / "a-0.pt").write_bytes(pickle.dumps(Canary(canary)))
    np.savez(folder / "b-0.npz", text_emb=np.array([Canary(canary)], dtype=object))
    (folder / "c-0.npy").write_bytes(pickle.dumps(Canary(canary)))
    source = open_sora_plan_text(manifest, [folder], SHAPE)
    with pytest.raises(DataError, match=r"a-0\.pt: a pickle, which can run code.*frameloom convert"):
        source.get_rows([0])
    for row, name in ((1, "b-0.npz"), (2, "c-0.npy")):
        with pytest.raises(DataError, match=f"{name}: cannot be read"):
            source.get_rows([row])
    assert not canary.exists()
    pickle.loads((folder / "a-0.pt").read_bytes())
    assert canary.exists()


@pytest.mark.parametrize("content", [b"", b"no numbers", b"\x93NUMPY\x01\x00", b"PK\x03\x04 cut"])
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\{suffix}: cannot be read"):
        read_arrays(path)


def test_a_missing_embedding_and_one_outside_its_folder_are_refused(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, ["a.jpg"], up=["../../secret"])
    (tmp_path / "emb").mkdir()
    with pytest.raises(DataError, match=r"no embedding for .* row 0; tried a-0\.npz, a\.npz"):
        open_sora_plan_text(manifest, [tmp_path / "emb"], SHAPE).get_rows([0])
    with pytest.raises(DataError, match="leaves"):
        open_sora_plan_text(manifest, [tmp_path / "emb"], SHAPE, name="{up}").get_rows([0])


def write_sdxl(folder: Path, name: str, key: int, shape: tuple[int, ...] = (1, 4, 4, 8)) -> None:
    for part in ("latent_cache", "vector_cache", "crossattn_cache"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(key)
    np.save(folder / "latent_cache" / f"{name}.npy", rng.normal(size=shape).astype(np.float32))
    np.save(folder / "vector_cache" / f"{name}.npy", rng.normal(size=(1, 9)).astype(np.float16))
    np.save(folder / "crossattn_cache" / f"{name}.npy", rng.normal(size=(1, 6, 4)).astype(np.float16))


def test_sdxl_folders_give_latents_without_deviation_and_text_by_row(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, ["x/a.b.png", "c.jpg"], captions=[" ", " "])
    write_sdxl(tmp_path / "cache", "a", 1)
    write_sdxl(tmp_path / "cache", "c", 2)
    latents = sdxl_latents(manifest, tmp_path / "cache", latent_shape)
    mean, std = latents.get(np.array([1, 0]), BUCKET)
    assert mean.shape == (2, 4, 1, 4, 8) and not std.any()
    assert torch.equal(mean[0, :, 0], torch.from_numpy(np.load(tmp_path / "cache/latent_cache/c.npy"))[0])
    text = sdxl_text(manifest, tmp_path / "cache", SHAPE)
    found = text.get_rows([1, 0])
    assert torch.equal(
        found["pooled_BD"][0], torch.from_numpy(np.load(tmp_path / "cache/vector_cache/c.npy"))[0, :3].float()
    )
    assert not torch.equal(found["tokens_BKD"][0], found["tokens_BKD"][1])


def test_sdxl_caveats_are_logged_once_and_clashing_names_are_refused(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    manifest = make_manifest(tmp_path, ["a.png"])
    write_sdxl(tmp_path / "cache", "a", 1, shape=(1, 4, 8, 8))
    source = sdxl_latents(manifest, tmp_path / "cache", latent_shape)
    (told,) = [record.getMessage() for record in log.records]
    assert "one draw of each latent" in told and "one random crop" in told
    with pytest.raises(DataError, match=r"a\.npy: latent of shape \(1, 4, 8, 8\); bucket .* needs \(4, 1, 4, 8\)"):
        source.get(np.array([0]), BUCKET)
    assert len(log.records) == 1
    clash = make_manifest(tmp_path, ["x/a.png", "y/a.b.png"])
    with pytest.raises(DataError, match=r"x/a\.png and y/a\.b\.png have the same name 'a'"):
        sdxl_latents(clash, tmp_path / "cache", latent_shape)


def test_open_sora_2_columns_name_the_files(tmp_path: Path) -> None:
    names = {"latents_path": ["l/0.npy", "l/1.npy"], "text_t5_path": ["t/0.npz"] * 2, "text_clip_path": ["c/0.npy"] * 2}
    manifest = make_manifest(tmp_path, ["a.jpg", "b.jpg"], **names)
    for folder in ("l", "c"):
        (tmp_path / folder).mkdir()
    np.save(tmp_path / "l" / "0.npy", np.full((4, 1, 4, 8), 3, dtype=np.float32))
    save(tmp_path / "t" / "0.npz", y=embedding(0)[0])
    np.save(tmp_path / "c" / "0.npy", np.array([1.0, 2.0, 3.0]))
    latents = column_latents(manifest, latent_shape)
    assert latents.get(np.array([0]), BUCKET)[0].unique().tolist() == [3]
    latents.check(0, BUCKET)
    with pytest.raises(ClipError, match=r"l/1\.npy: no such latent"):
        latents.check(1, BUCKET)
    found = column_text(manifest, SHAPE).get_rows([1])
    assert found["mask_BK"].all() and found["pooled_BD"].tolist() == [[1.0, 2.0, 3.0]]
    with pytest.raises(DataError, match="no column 'latents_path'"):
        column_latents(make_manifest(tmp_path, ["a.jpg"]), latent_shape)
    outside = make_manifest(tmp_path, ["a.jpg"], latents_path=["../l.npy"])
    with pytest.raises(DataError, match="leaves"):
        column_latents(outside, latent_shape).get(np.array([0]), BUCKET)


def test_batches_carry_the_text_of_the_rows_that_were_read(tmp_path: Path) -> None:
    columns = {"latents_path": ["none.npy", "1.npy"]}
    manifest = make_manifest(tmp_path, ["a.jpg", "b.jpg"], captions=["same", "same"], **columns)
    np.save(tmp_path / "1.npy", np.ones((4, 1, 4, 8), dtype=np.float32))
    for key, name in enumerate("ab"):
        save(tmp_path / "emb" / f"{name}-0.npz", text_emb=embedding(key)[0], mask=embedding(key)[1])
    text = open_sora_plan_text(manifest, [tmp_path / "emb"], SHAPE)
    policy = Fixed(FixedSection(height=32, width=64, frames=1, batch=2), fps_max=24)
    latents = column_latents(manifest, latent_shape)
    reader = BatchReader(manifest, policy, DataSection(), 1, Stores(latents, row_text=text))
    rows = np.array([0, 1])
    batch = reader.read(BatchRequest(0, 0, 0, rows, rows, fallback_rows=np.array([[0, 1], [1, 0]])))
    assert batch.text is not None and [bad.row for bad in batch.bad] == [0]
    assert torch.equal(batch.text["tokens_BKD"], text.get_rows([1, 1])["tokens_BKD"])
    assert not torch.equal(batch.text["tokens_BKD"], text.get_rows([0, 1])["tokens_BKD"])
