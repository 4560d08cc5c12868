"""The demo from nothing to its page, with a few steps instead of thousands."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from frameloom.demo.demo import DemoPlan, run_demo


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]


@pytest.mark.slow
def test_the_demo_makes_a_self_contained_page_and_goes_on_where_it_was(tmp_path):
    few = (
        "--train.steps",
        "4",
        "--train.save_every",
        "2",
        "--train.log_every",
        "1",
        "--optim.schedule.warmup_steps",
        "1",
    )
    quick = ("--sample.steps", "2", "--validation.batches", "1", "--data.workers", "0")
    plan = DemoPlan(tmp_path / "demo", num_clips=60, num_prompts=4, num_shown=2, overrides=(*few, *quick))
    said: list[str] = []
    report = run_demo(plan, said.append)
    page = Page()
    page.feed(report.read_text())
    assert page.tags.count("video") == 8 and page.tags.count("svg") >= 2 and page.tags.count("table") == 3
    assert page.sources and all(source.startswith("data:") for source in page.sources)
    scores = json.loads((plan.folder / "samples" / "scores.json").read_text())
    assert scores["count"] == 4 and set(scores["accuracy"]) == {"colour", "shape", "motion", "background", "speed"}
    assert any("dB on held-out clips" in line for line in said)
    before = {path: path.stat().st_mtime_ns for path in plan.folder.rglob("*.safetensors")}
    run_demo(plan, said.append)
    assert before == {path: path.stat().st_mtime_ns for path in plan.folder.rglob("*.safetensors")}
