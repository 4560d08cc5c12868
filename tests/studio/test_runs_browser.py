"""Runs and Generate in a real browser: a run is started, watched and stopped; a video is made and played."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.studio.conftest import BROWSER
from tests.studio.tiny_run import PROMPT, make_root

_EACH_CARD_HAS_ITS_OWN_CLIP = """[...document.querySelectorAll('#generate-history .rg-clip')].every(
    (card) => card.querySelector('video').currentSrc.includes(card.dataset.file))"""

pytestmark = BROWSER


@pytest.fixture(scope="module")
def root(shared_world, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    source = make_root(shared_world)
    shutil.copytree(source / "runs" / "tiny", folder / "runs" / "tiny")
    for name in ("base.yaml", "long.yaml", "bad.yaml"):
        shutil.copy(source / name, folder / name)
    return folder.resolve()


def choose(page, field: str, name: str) -> None:
    page.locator(f"#{field} input").click()
    page.get_by_role("option", name=name, exact=True).click()


def test_a_run_is_started_watched_live_and_stopped(page, root):
    page.get_by_role("tab", name="Runs").click()
    page.locator("#runs-table").get_by_text("runs/tiny").wait_for()
    page.locator("#runs-samples video").first.wait_for()
    choose(page, "runs-recipe", "bad.yaml")
    page.locator("#runs-start").click()
    page.locator("#runs-answer [role=alert]").get_by_text("learning_rate").wait_for()
    assert not (root / "runs" / "bad").exists()
    choose(page, "runs-recipe", "long.yaml")
    page.locator("#runs-overrides textarea").fill("--name watched")
    page.locator("#runs-start").click()
    row = page.locator("#runs-table tr", has_text="runs/watched")
    row.get_by_text("running").wait_for()
    choose(page, "runs-shown", "runs/watched")
    chart = page.locator("#runs-charts svg", has_text="Training loss")
    page.wait_for_function("document.querySelector('#runs-charts svg')?.textContent.includes('runs/watched')")
    before = int(chart.get_attribute("data-points"))
    page.wait_for_function(f"+document.querySelector('#runs-charts svg').dataset.points > {before + 2}")
    page.reload()
    page.get_by_role("tab", name="Runs").click()
    row.get_by_role("button", name="save and end").click()
    page.locator("#runs-logs").get_by_text("stopped after saving (exit code 143)").wait_for()
    row.get_by_text("stopped", exact=True).wait_for()
    assert any((root / "runs" / "watched" / "checkpoints").iterdir())


def test_a_video_is_made_played_and_its_settings_used_again(page, root):
    page.get_by_role("tab", name="Generate").click()
    page.locator("#generate-steps input").wait_for()
    page.wait_for_function("document.querySelector('#generate-steps input').value == '3'")
    page.locator("#generate-prompt textarea").fill("x" * 5_000)
    page.locator("#generate-go").click()
    page.locator("#generate-answer [role=alert]").get_by_text("at most 4,000").wait_for()
    shown: list[str] = []
    page.on("dialog", lambda dialog: (shown.append(dialog.message), dialog.dismiss()))
    page.locator("#generate-prompt textarea").fill(PROMPT + " <img src=x onerror=alert(1)> ${alert(2)} {{value}}")
    page.locator("#generate-go").click()
    page.locator("#generate-queue tr[data-state=done]").wait_for()
    page.locator("#generate-history .rg-clip", has_text="{{value}}").wait_for()
    page.wait_for_function("document.querySelector('#generate-history video')?.readyState >= 2")
    seconds = page.evaluate("document.querySelector('#generate-history video').currentTime")
    page.wait_for_function(f"document.querySelector('#generate-history video').currentTime != {seconds}")
    assert page.evaluate("document.querySelector('#generate-history video').videoWidth") == 64
    page.locator("#generate-prompt textarea").fill("another")
    page.locator("#generate-go").click()
    page.wait_for_function("document.querySelectorAll('#generate-history video').length == 2")
    page.wait_for_function(_EACH_CARD_HAS_ITS_OWN_CLIP)
    page.get_by_role("button", name="Use the settings of a-red").click()
    page.wait_for_function("document.querySelector('#generate-prompt textarea').value.includes('onerror')")
    page.get_by_role("button", name="as gif").first.click()
    page.locator("#generate-answer a[download]").wait_for()
    assert shown == [] and len(list((root / "studio" / "downloads").glob("*.gif"))) == 1
