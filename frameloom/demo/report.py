"""The report of the demo, an HTML page: training curves, scores, real clips beside generated ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from frameloom.builders.data import build_plan, build_policy, read_manifest
from frameloom.builders.vae import build_vae
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.files import write_text
from frameloom.core.text_files import read_records
from frameloom.data.buckets.policy import assign, bucket_table
from frameloom.data.loading.batch import Batch
from frameloom.data.loading.loader import iterate_batches
from frameloom.data.loading.reader import BatchReader
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.transforms import to_signed_range, to_uint8
from frameloom.data.media.writing import contact_sheet, write_image
from frameloom.evaluate.page import clip, clip_grid, curve, page, paragraph, picture, section, table, tiles

_SHOWN_REAL = 6
_LEAD = (
    "A text-to-video model trained on this machine, from nothing, by the real system: manifest, buckets, batch plan, "
    "caches, autoencoder, denoiser, checkpoints, sampler. Only the sizes are small."
)


def write_report(path: Path, folder: Path, seconds: Mapping[str, float]) -> None:
    """Write the self-contained page from what the demo left in `folder`."""
    scores = json.loads((folder / "samples" / "scores.json").read_text())
    vae_metrics = read_records(folder / "vae" / "metrics.jsonl")
    denoiser_metrics = read_records(folder / "denoiser" / "metrics.jsonl")
    sections = [
        _headline(scores, vae_metrics, seconds),
        _generated(folder, scores),
        section("Scores on held-out prompts", paragraph(_SCORES_TEXT), _score_table(scores)),
        section(
            "Autoencoder",
            curve("reconstruction loss", series(vae_metrics, "train/reconstruction"), is_log=True),
            curve("PSNR on held-out clips, dB", series(vae_metrics, "validation/psnr_db")),
            paragraph("Held-out clips: each pair of rows is the original above its reconstruction."),
            picture(_reconstructions(folder), "held-out clips and their reconstructions"),
        ),
        section("Denoiser", curve("training loss", series(denoiser_metrics, "train/loss"))),
        section("Buckets", paragraph(_BUCKETS_TEXT), _buckets(folder)),
        section("Time", table(["stage", "seconds"], [[name, round(value)] for name, value in seconds.items()])),
    ]
    write_text(path, page("Frameloom demo: Moving Shapes", _LEAD, sections))


_SCORES_TEXT = (
    "A measuring program without any learning reads colour, shape, motion, background and speed back from the pixels. "
    "The combinations of colour, shape, motion and background in these prompts never occurred in training."
)
_BUCKETS_TEXT = "Clips of many sizes, ratios and lengths are sorted into shapes that can share a batch."


def series(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) of one metric."""
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def _headline(scores: Mapping[str, Any], vae_metrics: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]) -> str:
    shares = {name: f"{share:.0%}" for name, share in scores["accuracy"].items()}
    psnr = series(vae_metrics, "validation/psnr_db")[-1][1]
    return tiles(
        {
            "all attributes right": f"{scores['all_right']:.0%}",
            **shares,
            "autoencoder PSNR": f"{psnr:.1f} dB",
            "in all": f"{sum(seconds.values()) / 60:.1f} min",
        }
    )


def _generated(folder: Path, scores: Mapping[str, Any]) -> str:
    """Generated clips, each beside a real one that shows as many of the same things as can be found."""
    manifest = Manifest.read(folder / "data" / "manifest.parquet", where={"kind": "video"})
    made = [
        clip(
            folder / "samples" / item["file"],
            item["prompt"],
            "generated, all right" if item["right"] else "generated, not all right",
            is_right=item["right"],
        )
        for item in scores["clips"]
    ]
    real = [
        clip(manifest.file(row), manifest.caption(row), "real, from the training set") for row in range(_SHOWN_REAL)
    ]
    return section(
        "Generated and real clips",
        paragraph("Held-out prompts, sampled with the averaged weights:"),
        clip_grid(made),
        paragraph("Real clips for comparison:"),
        clip_grid(real),
        paragraph("The generated clips frame by frame:"),
        picture(folder / "samples" / "contact-sheet.png", "frames of the generated clips"),
    )


def _score_table(scores: Mapping[str, Any]) -> str:
    rows = [
        [name, f"{share:.0%}", f"{scores['chance'].get(name, 0):.0%}"] for name, share in scores["accuracy"].items()
    ]
    return table(["attribute", "right", "by chance"], [*rows, ["all of them", f"{scores['all_right']:.0%}", ""]])


def _buckets(folder: Path) -> str:
    recipe = load_recipe(folder / "denoiser" / "recipe.yaml")
    policy = build_policy(recipe)
    used = bucket_table(assign(read_manifest(recipe), policy, recipe.seed, 0), policy)
    rows: list[list[str | float | int]] = [
        [
            use.bucket.resolution,
            use.bucket.ratio,
            f"{use.bucket.width}x{use.bucket.height}",
            use.bucket.frames,
            use.num_clips,
            use.bucket.batch_size,
            use.num_batches,
        ]
        for use in used
    ]
    return table(["resolution", "ratio", "pixels", "frames", "clips", "batch", "batches"], rows)


def _reconstructions(folder: Path) -> Path:
    """A contact sheet of a few held-out clips, original above reconstruction."""
    batch, decoded = _reconstruct(folder)
    assert batch.pixels_BCFHW is not None
    rows, labels = [], []
    for original, ours, caption in zip(batch.pixels_BCFHW, decoded, batch.captions, strict=True):
        for clip_CFHW, label in ((original, caption), (ours, "reconstruction")):
            rows.append(list(np.asarray(clip_CFHW.permute(1, 2, 3, 0))))
            labels.append(label)
    path = folder / "reconstructions.png"
    write_image(path, contact_sheet(rows[:8], labels[:8]))
    return path


def _reconstruct(folder: Path) -> tuple[Batch, Any]:
    import torch

    heldout = ["--vae.weights", str(folder / "vae"), "--data.where.split", "heldout", "--validation", "null"]
    recipe = load_recipe(folder / "vae" / "recipe.yaml", heldout)
    policy, manifest = build_policy(recipe), read_manifest(recipe)
    reader = BatchReader(manifest, policy, recipe.data, seed=recipe.seed)
    batches = iterate_batches(build_plan(recipe, manifest, policy)(0), reader)
    batch = next(batch for batch in batches if batch.bucket.frames > 1)
    assert batch.pixels_BCFHW is not None
    vae = build_vae(recipe.vae, seed=recipe.seed).model.eval()
    with torch.no_grad():
        decoded = to_uint8(vae.decode(vae.encode(to_signed_range(batch.pixels_BCFHW)).mean_BCFHW))
    return batch, decoded
