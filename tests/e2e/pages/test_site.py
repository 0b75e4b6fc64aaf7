"""The site of the documentation: built as `make site` builds it, and read in a browser."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tools.reference.site import INDEX, ROOT, llms_text

OTHER_HOST = re.compile(r"""(?:src|href|srcset|action|poster)\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)""")
LINK = re.compile(r"^- \[[^\]]+\]\(([^)]+)\): ", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "build" / "site"


def test_no_page_names_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 70
    for page in pages:
        text = re.sub(r"<(code|pre)\b.*?</\1>", "", page.read_text("utf-8"), flags=re.DOTALL)
        assert OTHER_HOST.findall(text) == [], page
    assert OTHER_HOST.findall('<script src="https://unpkg.com/x.js">') == ["https://unpkg.com/x.js"]


def test_decisions_are_pages_but_not_in_the_menu(site: Path) -> None:
    assert (site / "adr" / "0025-ranks.html").is_file()
    assert "adr/0025-ranks" not in (site / "index.html").read_text("utf-8")
    assert "how_to/python.html" in (site / "index.html").read_text("utf-8")


def test_the_index_for_programs_leads_to_every_page_of_the_menu() -> None:
    text = llms_text(ROOT / "docs")
    found = LINK.findall(text)
    assert len(found) == len(set(found)) > 60
    assert all((ROOT / "docs" / link).is_file() for link in found)
    outside = {f"{each.relative_to(ROOT / 'docs')}" for each in (ROOT / "docs").rglob("*.md")} - set(found)
    assert {each for each in outside if not each.startswith("adr/")} == set(), "a page that is not in the menu"
    assert INDEX == "llms.txt" and text.startswith("# Farsight\n\n> ")


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_reader_searches_and_turns_the_light_off_and_no_other_host_is_asked(browser: Browser, address: str) -> None:
    context = browser.new_context(color_scheme="light")
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    expect(page.get_by_role("heading", name="Farsight ¶", exact=True)).to_be_visible()
    page.get_by_text("As a server", exact=True).click()
    expect(page.get_by_text("farsight serve smollm2")).to_be_visible()
    for scheme in ("default", "slate"):
        page.locator("label[for^=__palette]:visible").click()
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", scheme)
    page.get_by_role("button", name="Search").first.click()
    page.keyboard.type("starvation limit")
    expect(page.get_by_text(re.compile(r"^[1-9]\d* results$"))).to_be_visible()
    assert len(asked) > 5 and [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    context.close()
