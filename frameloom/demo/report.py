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
from frameloom.core.text_files import read_records
from frameloom.data.buckets.policy import assign, bucket_table
from frameloom.data.loading.batch import Batch
from frameloom.data.loading.loader import iterate_batches
from frameloom.data.loading.reader import BatchReader
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.transforms import to_signed_range, to_uint8
from frameloom.data.media.writing import contact_sheet, write_image
from frameloom.evaluate.charts import Axis, Line
from frameloom.evaluate.reports import write_page

_SHOWN_REAL = 6
_LEAD = (
    "A text-to-video model trained on this machine, from nothing, by the real system: manifest, buckets, batch plan, "
    "caches, autoencoder, denoiser, checkpoints, sampler. Only the sizes are small."
)


def write_report(path: Path, folder: Path, seconds: Mapping[str, float]) -> None:
    """Write the self-contained page from what the demo left in `folder`."""
    scores = json.loads((folder / "samples" / "scores.json").read_text())
    vae_metrics = read_records(folder / "vae" / "metrics.jsonl")
    psnr = series(vae_metrics, "validation/psnr_db")
    curves = {
        "reconstruction": series(vae_metrics, "train/reconstruction"),
        "psnr": psnr,
        "loss": series(read_records(folder / "denoiser" / "metrics.jsonl"), "train/loss"),
    }
    manifest = Manifest.read(folder / "data" / "manifest.parquet", where={"kind": "video"})
    rows = [
        [name, f"{share:.0%}", f"{scores['chance'].get(name, 0):.0%}"] for name, share in scores["accuracy"].items()
    ]
    write_page(
        path,
        "demo/report.html",
        title="Frameloom demo: Moving Shapes",
        lead=_LEAD,
        folder=folder,
        scores=scores,
        headline={
            "all attributes right": f"{scores['all_right']:.0%}",
            **{name: f"{share:.0%}" for name, share in scores["accuracy"].items()},
            "autoencoder PSNR": f"{psnr[-1][1]:.1f} dB",
            "in all": f"{sum(seconds.values()) / 60:.1f} min",
        },
        real=[(manifest.file(row), manifest.caption(row)) for row in range(_SHOWN_REAL)],
        score_rows=[*rows, ["all of them", f"{scores['all_right']:.0%}", ""]],
        lines={name: [Line("", points)] for name, points in curves.items()},
        log_axis=Axis(is_log=True),
        reconstructions=_reconstructions(folder),
        buckets=_buckets(folder),
        times=[[name, round(value)] for name, value in seconds.items()],
    )


def series(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) of one metric."""
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def _buckets(folder: Path) -> list[list[str | int]]:
    recipe = load_recipe(folder / "denoiser" / "recipe.yaml")
    policy = build_policy(recipe)
    return [
        [
            use.bucket.resolution,
            use.bucket.ratio,
            f"{use.bucket.width}x{use.bucket.height}",
            use.bucket.frames,
            use.num_clips,
            use.bucket.batch_size,
            use.num_batches,
        ]
        for use in bucket_table(assign(read_manifest(recipe), policy, recipe.seed, 0), policy)
    ]


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
    reader = BatchReader(manifest, policy, recipe.data, recipe.seed)
    batches = iterate_batches(build_plan(recipe, manifest, policy)(0), reader)
    batch = next(batch for batch in batches if batch.bucket.frames > 1)
    assert batch.pixels_BCFHW is not None
    vae = build_vae(recipe.vae, seed=recipe.seed).model.eval()
    with torch.no_grad():
        decoded = to_uint8(vae.decode(vae.encode(to_signed_range(batch.pixels_BCFHW)).mean_BCFHW))
    return batch, decoded
