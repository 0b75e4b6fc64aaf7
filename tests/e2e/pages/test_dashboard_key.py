"""The operators' pages on a server with keys: a key goes into the tab and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from farsight.services.api.text.prompts import PromptEncoder
from tests.e2e.pages.test_dashboard_page import NO_TIME_LIMIT, chromium_path, open_page
from tests.unit.services.api.access.access_support import GuardedServer, guarded_server
from tests.unit.services.api.api_support import write_model_dir

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="neither chromium nor google-chrome is installed")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    folder = tmp_path_factory.mktemp("guarded")
    with guarded_server(folder, PromptEncoder(write_model_dir(folder / "model"))) as server:
        yield server


@pytest.mark.parametrize(("address", "shown"), [("dashboard", "kind-ModelWorker"), ("dashboard/placement", "policy")])
def test_a_page_asks_for_a_key_and_keeps_it_in_the_tab(
    browser: Browser, guarded: GuardedServer, address: str, shown: str
) -> None:
    page = open_page(browser)
    page.add_init_script(NO_TIME_LIMIT)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    page.goto(f"{guarded.base_url}/{address}")
    form, field = page.get_by_test_id("key-form"), page.get_by_test_id("key")
    expect(form).to_be_visible()
    for name, note in (("serve", "has not the role 'observe'"), ("observe", "")):
        field.fill(guarded.keys[name])
        form.get_by_role("button").click()
        expect(field).to_have_value("")
        expect(page.get_by_test_id("key-note")).to_contain_text(note)
    expect(form).to_be_hidden()
    expect(page.get_by_test_id(shown)).to_be_visible()
    page.reload()
    expect(page.get_by_test_id(shown)).to_be_visible()
    expect(form).to_be_hidden()
    assert page.evaluate("Object.keys(localStorage)") == []
    assert page.context.cookies() == []
    assert not any(key in url for url in [*sent, page.url] for key in guarded.keys.values())
    page.close()
    fresh = open_page(browser)  # another tab knows no key
    fresh.goto(f"{guarded.base_url}/{address}")
    expect(fresh.get_by_test_id("key-form")).to_be_visible()
    fresh.close()


def test_an_injected_script_does_not_run(browser: Browser, guarded: GuardedServer) -> None:
    page = open_page(browser)
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(f"{guarded.base_url}/dashboard")
    page.evaluate(
        "() => { const made = document.createElement('script'); made.textContent = 'window.ran = true';"
        " document.body.append(made); document.body.setAttribute('onclick', 'window.ran = true');"
        " document.body.click(); }"
    )
    assert page.evaluate("window.ran === undefined")
    assert any("Content Security Policy" in text for text in refused)
    page.close()
