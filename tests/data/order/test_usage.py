"""The ledger on made-up plans, where every fate is known, and on a real run with a damaged file."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import typer
from typer.testing import CliRunner

from frameloom.cli.data import ledger
from frameloom.core.errors import CheckpointError, RunError
from frameloom.data.loading.batch import BadClip
from frameloom.data.order.plan import BatchPlan, plan_epoch
from frameloom.data.order.usage import EpochUsage, account_epoch, describe_epochs
from frameloom.training.run.usage import account_run
from frameloom.training.train import train

NAMES = ["", "too small", "too short", "dropped by chance"]


def make_case(*, drop_last: bool = False, seed: int = 0) -> tuple[BatchPlan, tuple[np.ndarray, list[str]]]:
    """30 rows, 3 buckets of batch 4; six rows fit nothing."""
    assignment = np.random.default_rng(5).integers(0, 3, 30).astype(np.int32)
    assignment[[0, 3, 7, 11, 12, 29]] = -1
    why = np.zeros(30, dtype=np.int8)
    why[[0, 3]], why[[7]], why[[11, 12, 29]] = 1, 2, 3
    plan = plan_epoch(assignment, np.full(3, 4), np.ones(3), seed=seed, epoch=2, drop_last=drop_last)
    return plan, (why, NAMES)


def bad_at(*places: tuple[int, int], epoch: int = 2) -> list[BadClip]:
    """Bad clips by sample index and row."""
    return [BadClip(row, "a.mp4", "broken", epoch, index) for index, row in places]


def status(found: EpochUsage, row: int) -> str:
    return found.statuses[found.codes[row]]


def test_every_row_has_one_status_and_they_add_up() -> None:
    plan, reasons = make_case()
    position = int(plan.starts[3])
    bad_row = int(plan.order[1])
    found = account_epoch(plan, reasons, position=position, bad=bad_at((1, bad_row)))
    assert found.problems == ()
    assert sum(found.counts.values()) == 30
    assert found.counts == {
        **{"unaccounted": 0, "used": position - 1, "waiting": 24 - position, "bad file": 1, "dropped": 0},
        **{"not shown": 0, "too small": 2, "too short": 1, "dropped by chance": 3},
    }
    assert status(found, bad_row) == "bad file"
    assert [status(found, row) for row in (0, 7, 29)] == ["too small", "too short", "dropped by chance"]
    assert {status(found, row) for row in plan.order[position:].tolist()} == {"waiting"}


def test_dropped_rows_are_named() -> None:
    plan, reasons = make_case(drop_last=True)
    found = account_epoch(plan, reasons, position=plan.num_samples)
    assert found.problems == ()
    assert found.counts["used"] == plan.num_samples
    assert found.counts["dropped"] == 24 - plan.num_samples > 0
    kept = account_epoch(*make_case(), position=24)
    assert kept.counts["dropped"] == 0


def test_a_bad_clip_after_the_position_is_still_waiting() -> None:
    plan, reasons = make_case()
    position = int(plan.starts[2])
    slot = bad_at((position, int(plan.order[position])))
    assert account_epoch(plan, reasons, position=position, bad=slot).counts["bad file"] == 0
    assert account_epoch(plan, reasons, position=int(plan.starts[3]), bad=slot).counts["bad file"] == 1


def test_a_stand_in_that_was_bad_too_is_no_problem() -> None:
    plan, reasons = make_case()
    own, other = int(plan.order[0]), int(plan.order[20])
    found = account_epoch(plan, reasons, position=4, bad=bad_at((0, own), (0, other)))
    assert found.problems == ()
    assert (status(found, own), status(found, other)) == ("bad file", "waiting")


def test_lost_repeated_and_foreign_rows_are_found() -> None:
    plan, (why, names) = make_case()
    first = int(plan.shuffled[0])
    twice = plan.shuffled.copy()
    twice[0] = twice[1]
    broken = account_epoch(dataclasses.replace(plan, shuffled=twice), (why, names), position=0)
    assert len(broken.problems) == 2
    assert "1 rows are planned more often" in broken.problems[0]
    assert "1 rows have a bucket but are not in the plan" in broken.problems[1]
    assert status(broken, first) == "unaccounted"
    unfit = why.copy()
    unfit[first] = 1
    assert "although they fit no bucket" in account_epoch(plan, (unfit, names), position=0).problems[0]


def test_repeated_and_unshown_rows_are_counted() -> None:
    shown = np.array([0, 0, 0, 1, 2, 2, 4])  # row 3 is not shown, row 4 fits nothing
    assignment = np.array([0, 0, 0, 0, -1], dtype=np.int32)
    reasons = (np.array([0, 0, 0, 0, 1], dtype=np.int8), NAMES)
    plan = plan_epoch(assignment, np.array([2]), np.ones(1), seed=0, epoch=0, shown=shown)
    found = account_epoch(plan, reasons, position=6, shown=shown)
    assert found.problems == ()
    assert found.times.tolist() == [3, 1, 2, 0, 0]
    assert [status(found, row) for row in range(5)] == ["used", "used", "used", "not shown", "too small"]
    # As often as is wanted is no mistake; the same plan without the wish is one.
    wrong = account_epoch(plan, reasons, position=6)
    assert "2 rows are planned more often" in wrong.problems[0]
    assert status(wrong, 3) == "unaccounted"


def test_a_bad_image_beside_a_video_belongs_to_no_slot() -> None:
    plan, reasons = make_case()
    images = np.zeros(30, dtype=bool)
    image = int(plan.order[10])
    images[image] = True
    beside = bad_at((0, image))
    assert account_epoch(plan, reasons, position=24, bad=beside, images=images).problems == ()
    assert account_epoch(plan, reasons, position=24, bad=beside).problems != ()


@pytest.mark.parametrize("position", [-1, 25, 1])
def test_a_position_that_no_batch_ends_at_is_found(position: int) -> None:
    plan, reasons = make_case()
    assert "where no batch" in account_epoch(plan, reasons, position=position).problems[0]


def test_bad_clips_of_another_plan_are_found() -> None:
    plan, reasons = make_case()
    other, _ = make_case(seed=1)
    slot = next(slot for slot in range(4) if plan.order[slot] != other.order[slot])
    entry = bad_at((slot, int(other.order[slot])))
    assert "give" in account_epoch(plan, reasons, position=24, bad=entry).problems[0]
    assert account_epoch(other, reasons, position=24, bad=entry).problems == ()


def test_many_epochs_share_a_line() -> None:
    plan, reasons = make_case()
    epochs = [
        account_epoch(dataclasses.replace(plan, epoch=epoch), reasons, position=plan.num_samples) for epoch in range(25)
    ]
    lines = list(describe_epochs(epochs))
    assert len(lines) == 1 + 20
    assert lines[1].startswith("0 to 5 ")
    assert lines[1].split()[3] == str(6 * 24)


@pytest.fixture
def trained(world, tmp_path: Path) -> Path:
    """A run over one epoch and a part of the next, with one file that cannot be read and one row too small."""
    data = tmp_path / "data"
    shutil.copytree(world.shared / "data", data)
    table = pl.read_parquet(data / "manifest.parquet")
    rows = table.with_row_index().filter(pl.col("split") == "train")
    broken, small = rows["path"][2], int(rows["index"][5])
    (data / broken).write_bytes((data / broken).read_bytes()[:100])
    height, width = table["height"].to_list(), table["width"].to_list()
    height[small], width[small] = 8, 8
    columns = (pl.Series("height", height, table["height"].dtype), pl.Series("width", width, table["width"].dtype))
    table.with_columns(*columns).write_parquet(data / "manifest.parquet")
    overrides = ["--data.manifest", str(data / "manifest.parquet"), "--data.bad_limit", "0.2", "--train.steps", "13"]
    return train(world.recipe(*overrides))


def test_the_ledger_of_a_run_names_used_bad_and_small_rows(trained: Path, tmp_path: Path) -> None:
    found = account_run(trained)
    assert found.problems == []
    assert [epoch.epoch for epoch in found.epochs] == [0, 1]
    total = len(found.manifest)
    whole, part = found.epochs
    assert whole.counts["waiting"] == 0
    assert whole.counts["used"] == total - 2
    assert whole.counts["bad file"] == whole.counts["too small"] == 1
    assert 0 < part.counts["waiting"] < total
    assert found.num_filtered > 0
    # The bad file is the one that the run's own list names.
    records = [json.loads(line) for line in (trained / "bad_clips.jsonl").read_text().splitlines()]
    bad = np.flatnonzero(whole.codes == whole.statuses.index("bad file")).tolist()
    assert bad == sorted({record["row"] for record in records if record["epoch"] == 0})

    check_command(trained, tmp_path / "ledger.parquet")


def run_command(*words: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(ledger)
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def check_command(run: Path, out: Path) -> None:
    """The command prints the table and writes one row per row of the manifest."""
    code, output = run_command(str(run), "--out", str(out))
    assert code == 0
    assert "every row is accounted for in 2 epochs" in output
    table = pl.read_parquet(out)
    assert table["path"].to_list() == account_run(run).manifest.column("path").to_list()
    assert table.columns == ["row", "path", "times_used", "epoch_0", "epoch_1"]
    expected = (table["epoch_0"] == "used").cast(pl.Int32) + (table["epoch_1"] == "used").cast(pl.Int32)
    assert table["times_used"].to_list() == expected.to_list()


def test_a_run_whose_files_were_changed_has_an_exit_code_or_is_refused(trained: Path, tmp_path: Path) -> None:
    path = trained / "bad_clips.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "ordinal": line["ordinal"] + 1}) + "\n" for line in lines))
    code, output = run_command(str(trained))
    assert code == 1
    assert "the recipe was changed" in output
    with pytest.raises(RunError, match=r"recipe\.yaml is missing"):
        account_run(tmp_path / "data")
    path = tmp_path / "data" / "manifest.parquet"
    pl.read_parquet(path).with_columns(caption=pl.lit("other")).write_parquet(path)
    with pytest.raises(CheckpointError, match="has changed since step"):
        account_run(trained)
