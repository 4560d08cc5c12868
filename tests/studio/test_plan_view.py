"""Buckets and plan on the page are the numbers of the commands."""

from __future__ import annotations

import re
import shutil

import pytest

from frameloom.builders.data import build_policy
from frameloom.config.loading.recipe import load_recipe
from frameloom.data.buckets.policy import assign, bucket_table
from frameloom.data.manifest.manifest import Manifest
from frameloom.studio.data.clips import ClipMedia
from frameloom.studio.data.controller import show_broken, show_buckets, show_shapes
from frameloom.studio.recipe.controller import show_plan
from frameloom.studio.server.context import StudioContext


@pytest.fixture
def context(shared_world, tmp_path):
    shutil.copy(shared_world / "data" / "manifest.parquet", tmp_path / "manifest.parquet")
    return StudioContext(tmp_path.resolve(), tmp_path.resolve())


def test_buckets_are_those_of_the_report(context, world):
    recipe = world.write_recipe()
    table = ClipMedia(context).open(context.root / "manifest.parquet")
    shown = show_buckets(table, recipe)
    loaded = load_recipe(recipe)
    rows = Manifest.read(table.path, where=loaded.data.where)
    policy = build_policy(loaded)
    for use in bucket_table(assign(rows, policy, loaded.seed, 0), policy):
        assert f"{use.bucket.name} · {use.bucket.width}x{use.bucket.height}" in shown
        assert f"{use.num_clips:,} in {use.num_batches:,} batches" in shown
    shapes = re.findall(r"<span>(\d+)</span></div>", show_shapes(table))
    assert sum(map(int, shapes)) == table.table.height


def test_a_plan_says_what_fits_and_what_would_help(context, world):
    recipe = load_recipe(world.write_recipe())
    roomy = show_plan(context, recipe, "h100", 1, "")
    assert "Every bucket fits" in roomy and "No times of an epoch" in roomy
    tight = show_plan(context, recipe, "h100", 1, "1MB")
    assert "do not fit" in tight and "Every bucket fits" not in tight


def test_broken_files_of_scan_and_of_runs_are_listed(context):
    table = ClipMedia(context).open(context.root / "manifest.parquet")
    assert "No broken files" in show_broken(context, table)
    run = context.root / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: mine\ndata: {manifest: manifest.parquet}\n")
    (run / "bad_clips.jsonl").write_text(
        '{"row": 2, "path": "x.mp4", "reason": "cut short", "epoch": 0, "ordinal": 1}\n'
    )
    shown = show_broken(context, table)
    assert "runs/mine" in shown and "cut short" in shown and str(table.table["path"][2]) in shown
