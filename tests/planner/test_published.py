"""Published figures find their bucket, and the table of the page holds every one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from docs.tools.published_figures import (
    BEGIN,
    END,
    FIGURES,
    Checked,
    Figure,
    predict,
    render,
    write_table,
)
from frameloom.builders.data import build_policy
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import DataError
from frameloom.planner.devices import DEVICES

OWN = Figure(
    *("ours", "shapes/demo", ("--data.buckets", "{64px: {9: [1.0, 8]}}"), "cpu", 1, 9, "64px", "seconds", 1.0, 8),
    "a remark",
)


def test_a_step_is_predicted_in_proportion_to_its_batch_and_a_batch_as_a_whole_number() -> None:
    seconds = predict(OWN)
    assert seconds > 0 and predict(replace(OWN, batch=16)) == pytest.approx(2 * seconds)
    largest = predict(replace(OWN, kind="batch"))
    assert largest == int(largest) > 8
    with pytest.raises(DataError, match="no bucket of 17 frames"):
        predict(replace(OWN, frames=17))


@pytest.mark.parametrize("figure", FIGURES, ids=lambda one: f"{one.recipe} {one.frames} {one.kind} {one.batch:g}")
def test_every_figure_names_a_bucket_of_a_shipped_recipe_and_says_why_it_differs(figure: Figure) -> None:
    buckets = build_policy(load_recipe(figure.recipe, list(figure.overrides))).buckets
    assert any(one.frames == figure.frames and figure.resolution in ("", one.resolution) for one in buckets)
    assert figure.device in DEVICES and figure.remark


def test_the_table_goes_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "planning.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    checked = [Checked(OWN, 0.5)]
    write_table(page, checked)
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert render(checked) in text and "| 1 | 0.5 | 2.00 |" in text and "a remark" in text
    page.write_text("no marks")
    with pytest.raises(DataError, match="once each"):
        write_table(page, checked)
