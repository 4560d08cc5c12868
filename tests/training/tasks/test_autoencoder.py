"""The task `autoencoder`: its losses, what trains, where it starts, what it shows, and what it reads."""

from __future__ import annotations

import dataclasses
import io
import math
from itertools import islice
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file, save_file

from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import read_weights
from frameloom.core.errors import CheckpointError, DataError
from frameloom.data.curation.scan import ScanOptions, finish_scan, scan_files
from frameloom.data.loading.batch import Batch
from frameloom.data.manifest.sources.reading import read_source
from frameloom.models.registry import VAES
from frameloom.models.vaes.lpips import LPIPS
from frameloom.training.loop import Trainer
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.task import StepContext
from frameloom.training.tasks.autoencoder import AutoencoderTask, draw_grid
from frameloom.training.train import train
from tests.faults.runs import digests, stop_after
from tests.recipes.twins import write_lpips
from tests.training.test_loop import make_trainer, records

CLIPS = {"buckets": {"_delete_": True, "64px": {"5": [1.0, 2]}}}
SMALL = (
    "--data.policy",
    "fixed",
    "--data.buckets",
    "null",
    "--data.fixed",
    "{height: 32, width: 32, frames: 5, batch: 4}",
)
CHANNELS = 4


def start(world, *overrides: str, **sections: Any) -> tuple[Trainer, AutoencoderTask]:
    chosen = {"task": "autoencoder", "data": CLIPS, **sections}
    trainer = make_trainer(world, "--run.trackers", "[]", *overrides, **chosen)
    assert isinstance(trainer.task, AutoencoderTask)
    return trainer, trainer.task


def first_values(trainer: Trainer) -> dict[str, float]:
    """What is logged of the first step."""
    return trainer.take_step(next(trainer.feed.steps(0, 0, 1))[0]).values


@pytest.fixture
def lpips_file(tmp_path: Path) -> Path:
    write_lpips(tmp_path / "lpips.safetensors", CHANNELS)
    return tmp_path / "lpips.safetensors"


def lpips_section(file: Path, **more: Any) -> dict[str, Any]:
    return {"lpips": {"weights": str(file), "channels": CHANNELS, **more}}


def test_lpips_counts_in_the_loss_with_its_weight_once_for_every_number_of_a_frame(world, lpips_file):
    values = {
        weight: first_values(start(world, autoencoder=lpips_section(lpips_file, weight=weight))[0])
        for weight in (0.0, 0.5, 1.0)
    }
    assert "lpips" not in values[0.0] and values[0.5]["lpips"] == values[1.0]["lpips"] > 0
    per_unit = values[1.0]["lpips"] * 3 * 64 * 64
    assert values[1.0]["loss"] - values[0.0]["loss"] == pytest.approx(per_unit, rel=1e-3)
    assert values[0.5]["loss"] - values[0.0]["loss"] == pytest.approx(per_unit / 2, rel=1e-3)


def test_lpips_is_validated_and_not_exported(world, lpips_file):
    validation = {"every": 2, "where": {"split": "heldout"}, "batches": 1}
    chosen = {"autoencoder": lpips_section(lpips_file, weight=0.0), "validation": validation}
    run = train(world.recipe("--train.steps", "2", task="autoencoder", data=CLIPS, **chosen))
    assert records(run, "validation/lpips")[0] > 0 and not records(run, "train/lpips")
    assert not any(name.startswith(("net.", "lin")) for name in read_weights(run).tensors)


def test_lpips_may_come_as_a_plain_vgg_with_its_heads_beside(world, lpips_file, tmp_path):
    tensors = load_file(lpips_file)
    plain = {f"features.{name.split('.', 2)[2]}": value for name, value in tensors.items() if name.startswith("net.")}
    save_file({**plain, "classifier.0.weight": torch.zeros(2, 2)}, tmp_path / "vgg.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if name.startswith("lin")}, tmp_path / "heads.safetensors"
    )
    whole = start(world, autoencoder=lpips_section(lpips_file))[1].lpips
    parts = lpips_section(tmp_path / "vgg.safetensors", heads=str(tmp_path / "heads.safetensors"))
    joined = start(world, autoencoder=parts)[1].lpips
    assert whole is not None and joined is not None
    assert all(torch.equal(value, joined.state_dict()[name]) for name, value in whole.state_dict().items())
    with pytest.raises(CheckpointError, match="weights of LPIPS"):
        start(world, autoencoder=lpips_section(tmp_path / "vgg.safetensors"))
    with pytest.raises(CheckpointError, match="weights of LPIPS"):
        start(world, autoencoder={"lpips": {"weights": str(lpips_file)}})  # as wide as published: other shapes


def test_a_learned_log_variance_trains_resumes_to_the_bit_and_is_not_exported(world):
    chosen = {"task": "autoencoder", "data": CLIPS, "autoencoder": {"logvar": 1.0, "learn_logvar": True}}
    recipe = world.recipe("--train.steps", "4", "--train.keep", "9", "--train.save_every", "1", **chosen)
    run = train(recipe)
    logged = records(run, "train/logvar")
    assert logged[0] == 1.0 and len(set(logged)) == 4
    assert "beside.safetensors" in digests(run, 4)
    stop_after(run, 2, world.folder / "again" / "run")
    train(recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": str(world.folder / "again")})}))
    assert digests(world.folder / "again" / "run", 4) == digests(run, 4)
    assert digests(run, 2)["beside.safetensors"] != digests(run, 4)["beside.safetensors"]
    assert not any("logvar" in name for name in read_weights(run).tensors)
    with pytest.raises(CheckpointError, match=r"learn_logvar.* was switched"):
        train(world.recipe(task="autoencoder", data=CLIPS), ResumeChoices(accept_recipe_change=True))


def test_a_fixed_log_variance_scales_the_error_and_adds_itself(world):
    plain = first_values(start(world)[0])
    scaled = first_values(start(world, "--autoencoder.logvar", "0.5")[0])
    numbers = 3 * 64 * 64
    expected = plain["reconstruction"] * float(torch.exp(torch.tensor(-0.5))) + 0.5 * numbers
    assert scaled["reconstruction"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_one_half_trains_alone(world, half):
    trainer, task = start(world, "--autoencoder.train_only", half)
    before = {name: value.clone() for name, value in task.vae.state_dict().items()}
    steps = trainer.feed.steps(0, 0, 1)
    for _ in range(3):
        trainer.take_step(next(steps)[0])
    moved = {
        name.split(".")[0] for name, value in task.vae.state_dict().items() if not torch.equal(before[name], value)
    }
    assert moved == {half}


def test_a_share_of_clips_is_trained_on_as_images(world):
    _, task = start(world, "--autoencoder.image_share", "0.5")
    trainer, whole = start(world)
    batches = [batch for step, _ in islice(trainer.feed.steps(0, 0, 1), 8) for batch in step]
    lengths = [task.reconstruct(batch).decoded_BCFHW.shape[2] for batch in batches]
    assert set(lengths) == {1, 5}
    assert [task.count_tokens(batch) < whole.count_tokens(batch) for batch in batches] == [n == 1 for n in lengths]


def test_images_and_clips_of_a_set_are_mixed_by_buckets(world):
    """The set has both; each micro-batch is of one kind."""
    trainer, task = start(world, data={"buckets": {"64px": {"_delete_": True, "1": [1.0, 4], "5": [1.0, 2]}}})
    batches = [batch for step, _ in islice(trainer.feed.steps(0, 0, 1), 12) for batch in step]
    assert {batch.bucket.frames for batch in batches} == {1, 5}
    assert all(torch.isfinite(task.losses(StepContext(0), batch)[0]).all() for batch in batches[:4])


def test_a_csv_with_one_column_of_videos_is_scanned_and_trained_on(world, tmp_path):
    """The published way of naming a training set: no captions, no sizes."""
    table = polars.read_parquet(world.shared / "data" / "manifest.parquet").filter(kind="video").head(6)
    file = tmp_path / "train.csv"
    file.write_text("\n".join(['"video"', *table["path"].to_list()]) + "\n")
    fixed = {"height": 64, "width": 64, "frames": 5, "batch": 2}
    data = {"manifest": str(file), "root": str(world.shared / "data"), "policy": "fixed", "fixed": fixed}
    chosen = {"task": "autoencoder", "data": {**data, "where": {"_delete_": True}}}
    few = ("--data.buckets", "null", "--train.steps", "2")
    with pytest.raises(DataError, match="frameloom data scan"):
        train(world.recipe(*few, **chosen))
    listed, out = read_source(file, root=world.shared / "data"), tmp_path / "manifest.parquet"
    scan_files(listed.table, listed.root, out, ScanOptions(workers=1))
    finish_scan(listed.table, listed.root, out)
    run = train(world.recipe(*few, "--data.manifest", str(out), **chosen))
    assert len(records(run, "train/loss")) == 2


def write_image_vae(folder: Path) -> AutoencoderKL:
    """A diffusers AutoencoderKL of the widths of CausalVAE's tiny size."""
    torch.manual_seed(0)
    model = AutoencoderKL(
        block_out_channels=(8, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=1,
    )
    model.save_pretrained(folder)
    return model


def test_a_video_autoencoder_starts_from_an_image_one_when_asked(world, tmp_path):
    model = write_image_vae(tmp_path / "image")
    vae = {"_delete_": True, "name": "causal", "size": "tiny", "weights": str(tmp_path / "image")}
    with pytest.raises(CheckpointError, match=r"image autoencoder; set vae\.inflate"):
        start(world, vae=vae)
    trainer, task = start(world, vae={**vae, "inflate": True})
    weight = dict(task.vae.state_dict())["decoder.conv_in.conv.weight"]
    assert torch.equal(weight[:, :, -1], model.state_dict()["decoder.conv_in.weight"])
    assert not weight[:, :, :-1].any()
    assert all(math.isfinite(value) for value in first_values(trainer).values())


def test_only_an_image_autoencoder_can_be_inflated(world, tmp_path):
    image = {"decoder.conv_in.weight": torch.ones(1, 1, 3, 3)}
    assert [name for name, spec in VAES.items() if spec.inflates is not None and spec.inflates(image)] == ["causal"]
    assert [name for name, spec in VAES.items() if spec.can_inflate] == ["causal"]
    video = VAES["causal"].build(VAES["causal"].sizes["tiny"]).state_dict()
    save_file(video, tmp_path / "video.safetensors")
    vae = {"_delete_": True, "name": "causal", "weights": str(tmp_path / "video.safetensors"), "inflate": True}
    with pytest.raises(CheckpointError, match="no image autoencoder"):
        start(world, vae=vae)


def test_pictures_stand_over_their_reconstructions() -> None:
    clip = torch.full((5, 3, 9, 8, 6), -1.0)
    result = torch.full_like(clip, 1.0)
    picture = draw_grid(clip, result)
    assert picture.dtype == torch.uint8 and picture.shape == (4 * 16 + 3 * 4, 4 * 6 + 3 * 4, 3)
    assert picture[:8, :6].eq(0).all() and picture[8:16, :6].eq(255).all() and picture[16:20].eq(255).all()
    assert draw_grid(clip[:1, :, :1], result[:1, :, :1]).shape == (16, 6, 3)


def test_validation_leaves_a_grid_in_the_folder_and_in_tensorboard(world):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    validation = {"every": 1, "where": {"split": "heldout"}, "batches": 2}
    chosen = {"validation": validation, "run": {"trackers": ["jsonl", "tensorboard"]}}
    run = train(world.recipe("--train.steps", "2", task="autoencoder", data=CLIPS, **chosen))
    files = sorted((run / "reconstructions").iterdir())
    assert [file.name for file in files] == ["step-00000001.png", "step-00000002.png"]
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    shown = events.Images("validation/reconstructions")
    assert [event.step for event in shown] == [1, 2]
    with Image.open(io.BytesIO(shown[1].encoded_image_string)) as seen, Image.open(files[1]) as written:
        assert seen.size == written.size and seen.tobytes() == written.tobytes()
    assert files[0].read_bytes() != files[1].read_bytes()


def test_a_frozen_autoencoder_may_take_a_few_clips_at_a_time(world):
    section = world.recipe(task="autoencoder").vae
    whole = build_vae(section, seed=0).model
    sliced = build_vae(section.model_copy(update={"mini_batch": 2}), seed=0)
    assert sliced.digest == build_vae(section, seed=0).digest
    pixels = torch.rand(3, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    seen = []
    encode = sliced.model.encode_piece
    sliced.model.encode_piece = lambda clips: seen.append(len(clips)) or encode(clips)
    with torch.no_grad():
        ours, theirs = sliced.model.encode(pixels), whole.encode(pixels)
        assert seen == [2, 1]
        assert torch.allclose(ours.mean_BCFHW, theirs.mean_BCFHW, atol=1e-5)
        assert torch.allclose(ours.logvar_BCFHW, theirs.logvar_BCFHW, atol=1e-5)
        decoded = sliced.model.decode(ours.mean_BCFHW)
        assert torch.allclose(decoded, whole.decode(theirs.mean_BCFHW), atol=1e-4)
        assert not torch.allclose(decoded.flip(0), whole.decode(theirs.mean_BCFHW), atol=1e-4)
    assert dataclasses.asdict(sliced.config) == dataclasses.asdict(build_vae(section, seed=0).config)


def test_the_published_lpips_is_the_default_width() -> None:
    with torch.device("meta"):
        assert sum(value.numel() for value in LPIPS().net.parameters()) == 14_714_688


def test_the_wavelet_loss_brings_the_decoders_fine_bands_to_those_of_the_clips(world):
    """Measured on held-out clips: the part of the encoder's high-frequency energy that the decoder's bands miss."""
    missed = {}
    for weight in ("0", "1"):
        validation = {"every": 99, "where": {"split": "heldout"}, "batches": 2}
        chosen = ("--autoencoder.wavelet_weight", weight, "--optim.lr", "2e-3")
        trainer, task = start(world, *SMALL, *chosen, validation=validation)
        for batches, _ in islice(trainer.feed.steps(0, 0, 1), 30):
            trainer.take_step(batches)
        with torch.no_grad():
            missed[weight] = sum(miss_fine_bands(task, batch) for batch in trainer.feed.validation_batches())
    assert missed["1"] < 0.9 * missed["0"]


def miss_fine_bands(task: AutoencoderTask, batch: Batch) -> float:
    made = task.reconstruct(batch)
    pairs = [(ours[:, 3:], theirs[:, 3:]) for theirs, ours in zip(made.encoder_bands, made.decoder_bands, strict=True)]
    return float(sum((ours - theirs).square().sum() / theirs.square().sum() for ours, theirs in pairs))
