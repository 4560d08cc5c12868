"""Data and Recipe in a real browser: clips are found, played and retold; a recipe is filled in, refused and saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.data.manifest.manifest import Manifest
from tests.studio.conftest import BROWSER

_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

pytestmark = BROWSER


@pytest.fixture(scope="module")
def root(shared_world, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(shared_world / "data", folder / "data")
    (folder / "mine.yaml").write_text("# mine\n_base_: shapes/demo\nname: mine\noptim:\n  lr: 1.0e-3  # slow\n")
    return folder.resolve()


def test_clips_are_found_played_and_their_captions_changed_in_a_new_manifest(page, root):
    rows = Manifest.read(root / "data" / "manifest.parquet")
    words = rows.caption(0)
    num_alike = sum(words.lower() in rows.caption(row).lower() for row in range(len(rows)))
    page.locator("#clip-position", has_text=f"of {len(rows)}").wait_for()
    page.wait_for_function("document.querySelector('#clip-table img')?.naturalWidth > 0")
    page.locator("#clip-search textarea, #clip-search input").first.fill(words)
    page.locator("#clip-position", has_text=f"of {num_alike}").wait_for()
    page.locator("#clip-search textarea, #clip-search input").first.fill("")
    page.locator("#clip-position", has_text=f"of {len(rows)}").wait_for()

    video = next(row for row in range(len(rows)) if rows.clip(row).kind == "video")
    button = page.locator(f"#clip-table [data-row='{video}'] button")
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#clip-viewer video')?.currentTime > 0")
    assert page.evaluate("document.querySelector('#clip-viewer video').videoWidth") == rows.clip(video).width

    caption = page.locator("#clip-caption textarea")
    assert caption.input_value() == rows.caption(video)
    caption.fill("<img src=x onerror=alert(1)> retold {{value}}")
    page.get_by_role("button", name="Keep this caption").click()
    page.locator("#clip-table .fl-edited", has_text="retold {{value}}").wait_for()
    page.locator("#write-manifest").click()
    page.wait_for_function("document.querySelector('#manifest input')?.value == 'data/manifest-edited-1.parquet'")
    edited = Manifest.read(root / "data" / "manifest-edited-1.parquet")
    assert edited.caption(video) == "<img src=x onerror=alert(1)> retold {{value}}"
    assert (
        len(edited) == len(rows) and Manifest.read(root / "data" / "manifest.parquet").fingerprint == rows.fingerprint
    )


def test_buckets_and_broken_files_are_shown(page):
    page.get_by_role("tab", name="Buckets").click()
    page.locator("#bucket-chart .fl-bar").first.wait_for()
    page.get_by_role("tab", name="Broken files").click()
    page.locator("#broken-files", has_text="No broken files").wait_for()


def retype(page, field, text: str) -> None:
    field.click()
    page.keyboard.press("Control+A")
    page.keyboard.type(text)


def test_a_recipe_is_filled_in_checked_refused_and_saved(page, root):
    page.get_by_role("tab", name="Recipe").click()
    answer = page.locator("#recipe-answer")
    answer.get_by_text("The recipe is valid").wait_for()
    page.get_by_role("button", name="optim:").click()
    rate = page.locator("#field-optim-lr textarea, #field-optim-lr input").first
    page.wait_for_function(
        "document.querySelector('#field-optim-lr textarea, #field-optim-lr input')?.value == '0.001'"
    )
    retype(page, rate, "fast")
    answer.get_by_text("optim.lr is 'fast'").wait_for()
    page.locator("#recipe-save").click()
    page.get_by_text("not saved, 1 to fix first").first.wait_for()
    assert [path.name for path in root.glob("*.yaml")] == ["mine.yaml"]
    retype(page, rate, "5e-4")
    answer.get_by_text("The recipe is valid").wait_for()
    page.locator("#recipe-save").click()
    page.wait_for_function("document.querySelector('#recipe-pick input')?.value == 'mine-2.yaml'")
    assert load_recipe(root / "mine-2.yaml").optim.lr == 5e-4
    assert "lr: 5e-4  # slow" in (root / "mine-2.yaml").read_text()


def test_the_text_can_be_typed_and_the_form_follows(page):
    page.get_by_role("tab", name="Recipe").click()
    page.locator("#recipe-text .cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.type("_base_: shapes/demo\nname: typed\ntrain:\n  steps: 777")
    page.get_by_role("button", name="train:").click()
    page.wait_for_function(
        "document.querySelector('#field-train-steps textarea, #field-train-steps input')?.value == '777'"
    )
    page.locator("#recipe-answer").get_by_text("The recipe is valid").wait_for()


def test_the_plan_of_a_recipe_is_shown(page):
    page.get_by_role("tab", name="Recipe").click()
    page.locator("#plan-button").click()
    page.locator("#plan-result").get_by_text("Every bucket fits").wait_for()


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(page, width):
    page.set_viewport_size({"width": width, "height": 844})
    for place in ("Data", "Recipe"):
        page.get_by_role("tab", name=place).first.click()
        page.wait_for_function(f"{_OVERFLOW} <= 0")
