"""One browser for all pages, and a server whose components a test changes at will."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from farsight.services.api.text.prompts import PromptEncoder
from tests.e2e.pages.test_dashboard_page import LiveServer, start_browser
from tests.e2e.pages.test_pages_over_time import history, trace, view
from tests.unit.services.api.api_support import write_model_dir


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = start_browser(playwright)
        yield running
        running.close()


@pytest.fixture(scope="package")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder(write_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture
def live(encoder: PromptEncoder) -> Iterator[LiveServer]:
    server = LiveServer(encoder)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def filled(live: LiveServer) -> LiveServer:
    live.backend.history, live.backend.on_replicas, live.backend.traces = history(), view(), [trace()]
    return live
