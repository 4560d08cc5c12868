"""Clips through an autoencoder: files, metrics, bad clips, shares of processes, and settings that cannot work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from frameloom.builders.vae import check_frames, load_vae, use_policy
from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.data.loading.clip_view import ClipView, list_clips
from frameloom.data.media.decode import probe_clip, read_clip
from frameloom.data.media.transforms import to_signed_range, to_uint8
from frameloom.data.media.writing import write_image, write_video
from frameloom.evaluate.autoencoder import (
    Reconstruction,
    draw_clips,
    format_statistics,
    measure_latents,
    name_results,
    read_for,
    reconstruct,
    reconstruct_files,
    report_statistics,
)
from frameloom.evaluate.pair_metrics import build_measures
from frameloom.models.vaes.base import EncodePolicy, VideoVAE

MEASURES = build_measures(["psnr"])


@pytest.fixture(scope="module")
def vae() -> VideoVAE:
    return load_vae(name="wfvae", size="tiny").model


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    rng = np.random.default_rng(0)
    for name, frames in (("a/one", 11), ("a/two", 5)):
        soft = np.kron(rng.integers(0, 255, (frames, 5, 6, 3)), np.ones((1, 8, 8, 1))).astype(np.uint8)
        write_video(folder / f"{name}.mp4", soft, 24)
    write_image(folder / "b" / "still.png", rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
    (folder / "b" / "broken.mp4").write_bytes(b"\0" * 100)
    return folder


def test_files_metrics_and_bad_clips(vae: VideoVAE, clips: Path, tmp_path: Path) -> None:
    records = reconstruct_files(vae, list_clips(clips), tmp_path / "out", Reconstruction(), measure=MEASURES)
    assert records is not None
    assert [record["name"] for record in records] == ["a/one.mp4", "a/two.mp4", "b/broken.mp4", "b/still.png"]
    assert "broken.mp4" in records[2]["error"] and [bool(record["error"]) for record in records] == [0, 0, 1, 0]
    assert records[0]["file"] == "a/one.mp4" and records[0]["frames"] == 9
    files = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*"))
    assert files == ["a/one.mp4", "a/two.mp4", "b/still.png"]
    facts = probe_clip(tmp_path / "out" / "a" / "one.mp4")
    assert (facts.frames, facts.height, facts.width, facts.fps) == (9, 40, 48, 24)
    clip = read_for(vae, list_clips(clips)[0], ClipView())
    pixels = to_signed_range(clip.pixels_CFHW[None])
    expected = MEASURES(reconstruct(vae, pixels).clamp(-1, 1), pixels)["psnr_db"]
    assert records[0]["psnr_db"] == expected != records[1]["psnr_db"]


def test_a_grid_has_the_original_on_the_left(vae: VideoVAE, clips: Path, tmp_path: Path) -> None:
    source = list_clips(clips / "b" / "still.png")
    options = Reconstruction(grid=True)
    reconstruct_files(vae, source, tmp_path, options, measure=MEASURES)
    from frameloom.data.media.decode import read_image

    shown = read_image(tmp_path / "still.png", height=24, width=64)
    original = read_image(clips / "b" / "still.png", height=24, width=32)
    decoded = to_uint8(reconstruct(vae, to_signed_range(original[None])).clamp(-1, 1))[0]
    assert (shown[..., :32] == original).all() and (shown[..., 32:] == decoded).all()
    assert (decoded != original).any()


def test_views_and_rates_reach_the_file(vae: VideoVAE, clips: Path, tmp_path: Path) -> None:
    view = ClipView(frames=5, sample_rate=2, height=16, width=24)
    options = Reconstruction(view, fps=10)
    reconstruct_files(vae, list_clips(clips / "a" / "one.mp4"), tmp_path, options, measure=MEASURES)
    facts = probe_clip(tmp_path / "one.mp4")
    assert (facts.frames, facts.height, facts.width, facts.fps) == (5, 16, 24, 10)


def test_nothing_is_replaced_without_force(vae: VideoVAE, clips: Path, tmp_path: Path) -> None:
    source = list_clips(clips / "a" / "two.mp4")
    (tmp_path / "two.mp4").write_bytes(b"mine")
    with pytest.raises(DataError, match="--force"):
        reconstruct_files(vae, source, tmp_path, Reconstruction(), measure=MEASURES)
    assert (tmp_path / "two.mp4").read_bytes() == b"mine"
    reconstruct_files(vae, source, tmp_path, Reconstruction(force=True), measure=MEASURES)
    assert read_clip(tmp_path / "two.mp4", indices=[0], height=40, width=48).shape == (3, 1, 40, 48)
    assert not list(tmp_path.glob(".partial-*"))


def test_a_seed_samples_the_latent_and_means_the_same_every_time(vae: VideoVAE) -> None:
    pixels = torch.zeros(1, 3, 1, 16, 16)
    mean, one, again, other = (
        reconstruct(vae, pixels, seed=seed, index=index) for seed, index in ((None, 0), (1, 0), (1, 0), (1, 1))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, mean) and not torch.equal(one, other)


def test_names_that_would_meet_are_told_apart() -> None:
    assert name_results(["x/a.mp4", "x/a.mov", "x/A.mp4", "x/a.mov"]) == ["x/a", "x/a-mov", "x/A-mp4", "x/a-3"]
    assert name_results(["/etc/../a.mp4"]) == ["etc/a"]


def test_pieces_give_the_same_clip_and_tiles_nearly() -> None:
    whole = load_vae(name="wfvae", size="tiny")
    cut = use_policy(load_vae(name="wfvae", size="tiny"), EncodePolicy(chunk_frames=4))
    pixels = torch.rand(1, 3, 13, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = reconstruct(whole.model, pixels)
    torch.testing.assert_close(reconstruct(cut, pixels), expected, rtol=0, atol=1e-5)
    tiled = use_policy(whole, EncodePolicy(tile_px=16, tile_overlap=0.5))
    assert not torch.allclose(reconstruct(tiled, pixels), expected, rtol=0, atol=1e-5)


def test_an_autoencoder_without_exact_pieces_names_its_own_settings() -> None:
    loaded = load_vae(name="dc_ae", size="tiny")
    with pytest.raises(ConfigError, match="--set temporal_tiling"):
        use_policy(loaded, EncodePolicy(chunk_frames=8))
    assert [loaded.model.usable_frames(count) for count in (1, 2, 7, 8, 15)] == [1, 1, 1, 8, 12]


def test_lengths_are_those_that_come_back(vae: VideoVAE) -> None:
    assert [vae.usable_frames(count) for count in (1, 4, 5, 16, 17)] == [1, 1, 5, 13, 17]
    check_frames(vae, 17)
    with pytest.raises(ConfigError, match="takes 13 or 17"):
        check_frames(vae, 16)


def test_an_autoencoder_that_is_not_told_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which autoencoder"):
        load_vae()
    with pytest.raises(CheckpointError, match="no such file"):
        load_vae(tmp_path / "gone")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="--name"):
        load_vae(tmp_path / "model.safetensors")


def test_statistics_of_a_set_skip_bad_clips(vae: VideoVAE, clips: Path) -> None:
    listed = list_clips(clips)
    found, bad = measure_latents(vae, listed, ClipView())
    assert [name for name, _ in bad] == ["b/broken.mp4"]
    # 9 and 5 frames of 40x48 are 3 and 2 latent frames of 5x6, and a picture of 24x32 is one of 3x4.
    assert found.count == 3 * 30 + 2 * 30 + 12
    report = report_statistics(found, bad, num_clips=3, now=vae)
    assert len(report["mean"]) == vae.latent_channels and report["clips"] == 3
    assert any("vae.overrides" in line for line in format_statistics(report))
    assert draw_clips(listed, 2, 0) == draw_clips(listed, 2, 0) and len(draw_clips(listed, 2, 0)) == 2
    with pytest.raises(DataError, match="no clip could be encoded"):
        measure_latents(vae, list_clips(clips / "b" / "broken.mp4"), ClipView())
