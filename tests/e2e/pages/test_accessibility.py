"""No page has a serious accessibility fault by the rules of axe-core, in light and dark, at three widths.

axe-core comes from the npm registry when the tests run: it is a tool of the tests alone.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile

import pytest
from playwright.sync_api import Browser, Page

from farsight.services.api.pages.dashboard import PAGES
from tests.e2e.pages.test_dashboard_page import LONG_S, LiveServer, chromium_path
from tests.e2e.pages.test_pages_over_time import RUNS, WIDTHS

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="neither chromium nor google-chrome is installed")

AXE = "axe-core@4.10.2"
NPM_S = 120.0
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("npm, which brings axe-core, is not installed")
    packed = subprocess.run([npm, "pack", AXE], cwd=folder, capture_output=True, text=True, timeout=NPM_S)
    if packed.returncode:
        pytest.skip(f"npm does not bring axe-core: {packed.stderr.strip()[-200:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return (folder / "package" / "axe.min.js").read_text(encoding="utf-8")


def faults(page: Page, axe: str) -> list[str]:
    page.evaluate(axe)
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{page.url} at {page.viewport_size}: {each['id']}: {node['html'][:120]}"
        for each in result["violations"]
        if each["impact"] in SERIOUS
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_no_page_has_a_serious_fault(browser: Browser, filled: LiveServer, axe: str, scheme: str) -> None:
    found: list[str] = []
    page = browser.new_page(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(1000 * LONG_S)
    for address in (*PAGES, "/docs"):
        page.goto(f"http://127.0.0.1:{filled.port}{address.format(response_id=RUNS)}")
        page.wait_for_timeout(500)  # what is polled has been drawn
        if address == "/dashboard":
            page.get_by_test_id("strip").locator("summary").click()
        if address == "/":
            page.get_by_test_id("prompt").fill("hello")
            page.get_by_test_id("send").click()
            page.get_by_test_id("regenerate").wait_for()
            page.get_by_test_id("settings").click()
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            found += faults(page, axe)
    page.close()
    assert not found, "\n".join(found)
