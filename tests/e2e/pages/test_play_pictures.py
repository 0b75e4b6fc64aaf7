"""Pictures in the playground, in a real browser: chosen, dropped, pasted, bounded, and sent as parts of a chat."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator

import pytest
from PIL import Image
from playwright.sync_api import Browser, FilePayload, Page, Route, TimeoutError, expect

from tests.e2e.pages.test_dashboard_page import (
    LiveServer,
    chromium_path,
    expect_width,
    visit,
    watched,
)

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="neither chromium nor google-chrome is installed")

HOSTILE = '"><img src=x onerror=window.hacked=1>.png'
SEND = """([kind, name, type, base64]) => {
  const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, {type}));
  const options = {bubbles: true, cancelable: true};
  const event = kind === "paste" ? new ClipboardEvent("paste", {clipboardData: transfer, ...options})
    : new DragEvent(kind, {dataTransfer: transfer, ...options});
  document.body.dispatchEvent(event);
  return event.defaultPrevented;
}"""


def png(colour: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def page(browser: Browser, live: LiveServer) -> Iterator[Page]:
    """The playground."""
    with watched(browser, live, 1000, 900) as (opened, _):
        visit(opened, live, "/play")
        expect(opened.get_by_test_id("model")).to_contain_text("tiny")
        yield opened


@pytest.fixture
def bodies(page: Page) -> list[dict[str, object]]:
    """What the page sends to the chat endpoint, which answers one word."""
    sent: list[dict[str, object]] = []

    def answer(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or ""))
        chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "Seen."}, "finish_reason": "stop"}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    return sent


def give(page: Page, kind: str, name: str, data: bytes, mime: str = "image/png") -> bool:
    """Drops or pastes a file; whether the page took it from the browser."""
    taken: bool = page.evaluate(SEND, [kind, name, mime, base64.b64encode(data).decode()])
    return taken


def choose_by_keyboard(page: Page, name: str, data: bytes) -> None:
    """A browser forgets within seconds that a key was pressed, and a busy machine may need longer: then once more."""
    for _ in range(10):
        page.get_by_test_id("add-picture").focus()
        try:
            with page.expect_file_chooser(timeout=20_000) as opened:
                page.keyboard.press("Enter")
        except TimeoutError:
            continue
        opened.value.set_files([FilePayload(name=name, mimeType="image/png", buffer=data)])
        return
    pytest.fail("the button opens no chooser")


def choose(page: Page, *files: tuple[str, str, bytes]) -> None:
    page.get_by_test_id("picture-file").set_input_files(
        [FilePayload(name=name, mimeType=mime, buffer=data) for name, mime, data in files]
    )


def test_chosen_dropped_and_pasted_pictures_are_sent_in_order(page: Page, bodies: list[dict[str, object]]) -> None:
    choose_by_keyboard(page, "chosen.png", png("red"))
    thumbs = page.get_by_test_id("thumbs").locator("img")
    expect(thumbs).to_have_count(1)
    assert give(page, "dragover", "dropped.png", png("blue"))
    assert give(page, "drop", "dropped.png", png("blue"))
    expect(thumbs).to_have_count(2)
    assert give(page, "paste", "", png("green"))
    expect(thumbs).to_have_count(3)
    expect(page.get_by_test_id("picture-note")).to_have_text("3 of 8 pictures")
    assert page.evaluate("[...document.querySelectorAll('#thumbs img')].map((each) => each.naturalWidth)") == [20] * 3
    page.get_by_test_id("instruction").fill("")
    page.get_by_test_id("prompt").fill("How many colours?")
    page.get_by_test_id("prompt").press("Control+Enter")
    expect(page.get_by_test_id("answer")).to_have_text("Seen.")
    urls = ["data:image/png;base64," + base64.b64encode(png(each)).decode() for each in ("red", "blue", "green")]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    [body] = bodies
    assert body["messages"] == [{"role": "user", "content": [*parts, {"type": "text", "text": "How many colours?"}]}]


def test_a_removed_picture_is_not_sent(page: Page, bodies: list[dict[str, object]]) -> None:
    choose(page, ("one.png", "image/png", png()), ("two.png", "image/png", png("blue")))
    expect(page.get_by_test_id("thumbs").locator("img")).to_have_count(2)
    page.get_by_role("button", name="Remove one.png").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Remove two.png")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("add-picture")).to_be_focused()
    page.get_by_test_id("instruction").fill("")
    page.get_by_test_id("prompt").fill("hello")
    page.get_by_test_id("send").click()
    expect(page.get_by_test_id("answer")).to_have_text("Seen.")
    assert bodies[0]["messages"] == [{"role": "user", "content": "hello"}]


def test_what_is_no_picture_or_too_large_is_left_out_with_a_reason(page: Page) -> None:
    note = page.get_by_test_id("picture-note")
    assert give(page, "drop", HOSTILE, b"<svg onload='window.hacked=1'/>", "image/svg+xml")
    expect(note).to_have_text(f"{HOSTILE} is not a PNG, JPEG, WebP or GIF picture.")
    choose(page, ("large.png", "image/png", png() + bytes(2_900_000)), ("small.png", "image/png", png()))
    expect(note).to_have_text("large.png was left out: it has 2.9 MB, and all pictures of a request may have 2.8 MB.")
    expect(page.get_by_test_id("thumbs").locator("img")).to_have_count(1)
    choose(page, *((f"{each}.png", "image/png", png()) for each in range(8)))
    expect(note).to_have_text("A request takes 8 pictures; 7.png was left out.")
    expect(page.get_by_test_id("thumbs").locator("img")).to_have_count(8)
    page.set_viewport_size({"width": 360, "height": 900})
    expect_width(page, 360)


def test_names_are_text_and_a_damaged_picture_is_said(page: Page) -> None:
    choose(page, (HOSTILE, "image/png", b"no picture at all"))
    expect(page.get_by_test_id("picture-note")).to_have_text(
        f"{HOSTILE} is no picture that this browser can show; the server may refuse it."
    )
    expect(page.get_by_test_id("thumbs").locator("img")).to_have_attribute("alt", HOSTILE)


def test_pictures_are_not_dropped_silently_from_a_completion(page: Page) -> None:
    choose(page, ("one.png", "image/png", png()))
    expect(page.get_by_test_id("thumbs").locator("img")).to_have_count(1)
    page.get_by_test_id("kind").select_option("completion")
    page.get_by_test_id("send").click()
    expect(page.get_by_test_id("numbers")).to_have_text(
        "Pictures go with a chat: choose the kind chat, or remove them."
    )


def test_text_that_is_pasted_stays_text(page: Page) -> None:
    took = page.evaluate(
        "() => { const t = new DataTransfer(); t.setData('text/plain', 'hi');"
        " const e = new ClipboardEvent('paste', {clipboardData: t, cancelable: true, bubbles: true});"
        " document.body.dispatchEvent(e); return e.defaultPrevented; }"
    )
    assert took is False
