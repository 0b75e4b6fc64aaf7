"""The embedded vision model over HTTP and in the playground: newly drawn pictures are answered right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from farsight.services.launch.launch import VISION_NAME
from lab.embedded_vision.evaluate import asked_pictures
from lab.embedded_vision.words import TASKS, Question
from tests.e2e.pages.test_dashboard_page import LONG_S, NO_TIME_LIMIT, chromium_path, start_browser
from tests.e2e.pictures import data_url
from tests.e2e.server import Server, start_server

NUM_PICTURES = 10
MIN_RIGHT = 9  # the shipped table asks for 95 % of 200; a sample of 10 may miss one


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vision")
    running = start_server(folder / "server.log", "--model", "embedded-vision")
    yield running
    running.stop()


def ask(client: openai.OpenAI, picture: np.ndarray, question: Question) -> str:
    stream = client.chat.completions.create(
        model=VISION_NAME,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url(picture)}},
                    {"type": "text", "text": question.text},
                ],
            }
        ],
        temperature=0,
        stream=True,
    )
    chunks = list(stream)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop", "it ends by its own EOS"
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_held_out_pictures_are_answered_right(seeing: Server) -> None:
    asked = {task: asked_pictures(task, NUM_PICTURES, seed=11) for task in TASKS}
    client = openai.OpenAI(base_url=f"{seeing.base_url}/v1", api_key="none", max_retries=0)
    with client, ThreadPoolExecutor(16) as pool:  # all tasks in flight together
        found = {task: [pool.submit(ask, client, *each) for each in asked[task]] for task in TASKS}
        texts = {task: [each.result() for each in found[task]] for task in TASKS}
    for task in TASKS:
        wrong = [
            (question.text, question.answer, text)
            for (_, question), text in zip(asked[task], texts[task], strict=True)
            if text != question.answer
        ]
        assert NUM_PICTURES - len(wrong) >= MIN_RIGHT, (task, wrong)


@pytest.mark.skipif(chromium_path() is None, reason="neither chromium nor google-chrome is installed")
def test_the_playground_draws_pictures_that_are_answered_right(seeing: Server) -> None:
    with sync_playwright() as playwright:
        browser = start_browser(playwright)
        page = browser.new_page()
        page.set_default_timeout(1000 * LONG_S)
        page.add_init_script(NO_TIME_LIMIT)
        page.goto(f"{seeing.base_url}/play")
        right = [_counts_right(page) for _ in range(6)] + [_reads_right(page) for _ in range(6)]
        browser.close()
    assert sum(right) >= 10, right


def _shown(page: Page, example: str) -> str:
    """Sends an example and waits for the answer; what the page says that its picture shows."""
    page.get_by_test_id("examples").get_by_role("button", name=example).click()
    image = page.get_by_test_id("thumbs").locator("img")
    expect(image).to_have_count(1)
    shown = (image.get_attribute("alt") or "").removeprefix("Drawn: ")
    page.get_by_test_id("send").click()
    expect(page.get_by_test_id("numbers")).to_contain_text("all after")
    expect(page.get_by_test_id("send")).to_be_enabled()
    return shown


def _counts_right(page: Page) -> bool:
    shown = _shown(page, "How many circles?")
    return page.get_by_test_id("answer").inner_text() == str(len(re.findall("circle", shown)))


def _reads_right(page: Page) -> bool:
    shown = _shown(page, "Read the number.")
    return page.get_by_test_id("answer").inner_text() == shown.removeprefix("the number ")
