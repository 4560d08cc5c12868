"""One page in a real browser for all tests of a module; the module's `root` is the folder that it shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.studio.studio_process import PATIENCE_S, Studio

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(_CHROMIUM is None, reason="there is no chromium to open the page with"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def studio(root: Path) -> Iterator[Studio]:
    pytest.importorskip("gradio", reason="the studio needs the extra of that name")
    studio = Studio(root)
    yield studio
    studio.close()


@pytest.fixture(scope="module")
def page(studio: Studio) -> Iterator[Any]:
    """Errors of the page, and requests to anywhere else, fail the tests."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(1000 * PATIENCE_S)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        own = (studio.url, "data:", "blob:")
        page.on("request", lambda request: request.url.startswith(own) or complaints.append(request.url))
        page.goto(studio.url)
        yield page
        browser.close()
    assert complaints == []
