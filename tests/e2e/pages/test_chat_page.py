"""The chat in a real browser: history, settings, markdown, stop, the promise of the end, and pictures."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import time
from collections.abc import Iterator

import pytest
from PIL import Image
from playwright.sync_api import Browser, FilePayload, Page, Route, TimeoutError, expect

from farsight.core.decisions import Decision, pack_decisions
from farsight.core.messages.log import RequestTrace
from farsight.services.api.backend import ImageInput
from tests.e2e.pages.test_dashboard_page import (
    LiveServer,
    chromium_path,
    expect_width,
    visit,
    watched,
)
from tests.e2e.server import wait_until
from tests.unit.services.api.api_support import delta

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
    """The chat of a model that sees and has room for several turns."""
    sight = ImageInput("<image>", 5, 8)
    live.backend.model = dataclasses.replace(
        live.backend.model, image_input=sight, max_model_len=4096, preset="fastserve"
    )
    with watched(browser, live, 1000, 900) as (opened, _):
        visit(opened, live, "/")
        expect(opened.get_by_test_id("health")).to_have_text("tiny · 4,096 tokens · preset fastserve")
        yield opened


@pytest.fixture
def bodies(page: Page) -> list[dict[str, object]]:
    """What the page sends to the chat endpoint."""
    sent: list[dict[str, object]] = []

    def note(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or ""))
        route.fallback()

    page.route("**/v1/chat/completions", note)
    return sent


@pytest.fixture
def answered(page: Page, bodies: list[dict[str, object]]) -> list[dict[str, object]]:
    """The same, answered by one word: no model here reads pictures."""

    def answer(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "Seen."}, "finish_reason": "stop"}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    return bodies


def say(page: Page, text: str) -> None:
    page.get_by_test_id("prompt").fill(text)
    page.get_by_test_id("prompt").press("Enter")


def test_a_chat_has_turns_settings_and_outlives_a_reload(page: Page, bodies: list[dict[str, object]]) -> None:
    expect(page.get_by_test_id("examples").get_by_role("button")).not_to_have_count(0)
    page.get_by_test_id("settings").click()
    page.get_by_test_id("instruction").fill("Be brief.")
    page.get_by_test_id("temperature").fill("0.5")
    say(page, "hello")
    answers, again = page.get_by_test_id("answer"), page.get_by_test_id("regenerate")
    expect(answers).to_have_text(["Hello!"])
    expect(page.get_by_test_id("said-note")).to_contain_text(re.compile("tokens in "))
    expect(page.get_by_test_id("numbers")).to_contain_text(re.compile("First tokenafter .*Prompt.*Endstop"))
    expect(page.get_by_test_id("timing").locator("rect")).not_to_have_count(0)
    again.wait_for()
    say(page, "and again")
    expect(answers).to_have_text(["Hello!", "Hello!"])
    again.click()
    wait_until(lambda: len(bodies) == 3, "the answer is not asked for again")
    expect(answers).to_have_text(["Hello!", "Hello!"])
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}
    turns = [system, first, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "and again"}]
    assert [body["messages"] for body in bodies] == [turns[:2], turns, turns]
    assert {name: bodies[0][name] for name in ("model", "temperature", "max_tokens", "stream")} == {
        **{"model": "tiny", "temperature": 0.5, "max_tokens": 1024, "stream": True}
    }
    assert "top_p" not in bodies[0]  # what is left empty is the model's own
    page.reload()
    expect(answers).to_have_text(["Hello!", "Hello!"])
    page.get_by_test_id("fresh").click()
    expect(answers).to_have_count(0)


MARKDOWN = """# Title

Some **bold**, `code <b>` and [a link](https://example.org/x) and [no link](javascript:window.hacked=1).

1. one
   - inner

| a | b |
|---|---|
| 1 | <i>2</i> |

```html
<script>window.hacked = 1</script>
```

<img src=x onerror=window.hacked=1> <b>bold</b>

<script>window.hacked = 1</script>

![picture](https://example.org/track.png) ![p](x" onerror="window.hacked=1) &lt;img src=y&gt;

<svg/onload=window.hacked=1><iframe srcdoc="<script>parent.hacked=1</script>"></iframe>
"""


def test_an_answer_is_markdown_and_never_markup(page: Page, live: LiveServer) -> None:
    """Nothing of it runs, loads or becomes an element that is not among those of Markdown."""
    pieces = [MARKDOWN[at : at + 40] for at in range(0, len(MARKDOWN), 40)]
    live.backend.script = (*map(delta, pieces), delta("", "stop"))
    say(page, "hello <b>you</b>")
    page.get_by_test_id("regenerate").wait_for()
    expect(page.locator(".said")).to_have_text("hello <b>you</b>")
    answer = page.get_by_test_id("answer")
    names = answer.evaluate("node => [...new Set([...node.querySelectorAll('*')].map(each => each.localName))].sort()")
    known = "a br button code div h3 li ol p pre span strong table tbody td th thead tr ul"
    assert set(names) <= set(known.split())
    assert {"h3", "strong", "table", "ol", "ul", "pre"} <= set(names)
    links = answer.locator("a").evaluate_all("all => all.map(each => [each.href, each.rel])")
    safe = "noopener noreferrer"
    assert links == [["https://example.org/x", safe], ["https://example.org/track.png", safe]]
    attributes = "node => [...node.querySelectorAll('*')].flatMap(each => each.getAttributeNames())"
    assert not [name for name in answer.evaluate(attributes) if name.startswith("on") or name in ("src", "style")]
    for text in ("<img src=x onerror=window.hacked=1> <b>bold</b>", "<i>2</i>", "<img src=y>", "<svg/onload"):
        expect(answer).to_contain_text(text)
    expect(answer.locator("pre")).to_have_text("<script>window.hacked = 1</script>")
    page.reload()  # what was kept is drawn in the same way
    expect(answer.locator("h3")).to_have_text("Title")


def test_the_promised_end_is_shown_while_it_streams_and_stop_stops(page: Page, live: LiveServer) -> None:
    live.backend.script = (delta("One "), *(0.05 for _ in range(2000)), delta("two", "stop"))
    say(page, "hello")
    expect(page.get_by_test_id("answer")).to_have_text("One")
    origin = live.backend.origins[-1]
    assert origin is not None
    now = time.time()
    facts: dict[str, float | str] = {"state": "running", "output_tokens": 1, "p50_s": 500.0, "p90_s": 700.0}
    told = pack_decisions([Decision("received", now, {"prompt_tokens": 7}), Decision("outlook", now, facts)])
    trace_id = f"{origin.response_id}/i-1/ingress"
    live.backend.traces = [RequestTrace(trace_id, "i-1", 0, origin.owner, "ingress", 0, False, 0, told)]
    eta = page.get_by_test_id("eta")
    expect(eta).to_have_text(re.compile(r"ends in [45]\d\d\.\d s \(9 of 10 times within [67]\d\d\.\d s\)"))
    expect(page.get_by_test_id("timing").locator(".ends")).to_have_count(1)
    expect(page.get_by_test_id("explanation")).to_contain_text("Request received: prompt of 7 tokens")
    page.get_by_test_id("stop").click()
    expect(page.get_by_test_id("said-note")).to_have_text("Stopped; the server frees its memory within a step.")
    expect(eta).to_contain_text("stopped after")
    wait_until(lambda: live.backend.num_closed == live.backend.num_opened, "the request goes on")
    live.backend.script = (RuntimeError("broken"),)
    page.get_by_test_id("regenerate").click()
    expect(page.get_by_test_id("said-note")).to_have_attribute("role", "alert")
    expect(page.get_by_test_id("regenerate")).to_have_text("Try again")


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


def test_chosen_dropped_and_pasted_pictures_are_sent_in_order(page: Page, answered: list[dict[str, object]]) -> None:
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
    say(page, "How many colours?")
    expect(page.get_by_test_id("answer")).to_have_text("Seen.")
    urls = ["data:image/png;base64," + base64.b64encode(png(each)).decode() for each in ("red", "blue", "green")]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    expect(page.locator(".user .thumbs img")).to_have_count(3)
    [body] = answered
    assert body["messages"] == [{"role": "user", "content": [*parts, {"type": "text", "text": "How many colours?"}]}]


def test_a_removed_picture_is_not_sent(page: Page, answered: list[dict[str, object]]) -> None:
    choose(page, ("one.png", "image/png", png()), ("two.png", "image/png", png("blue")))
    expect(page.get_by_test_id("thumbs").locator("img")).to_have_count(2)
    page.get_by_role("button", name="Remove one.png").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Remove two.png")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("add-picture")).to_be_focused()
    page.get_by_test_id("prompt").fill("hello")
    page.get_by_test_id("send").click()
    expect(page.get_by_test_id("answer")).to_have_text("Seen.")
    assert answered[0]["messages"] == [{"role": "user", "content": "hello"}]


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


def test_pictures_are_not_dropped_silently(page: Page, live: LiveServer) -> None:
    choose(page, ("one.png", "image/png", png()))
    expect(page.get_by_test_id("thumbs").locator("img")).to_have_count(1)
    page.get_by_test_id("settings").click()
    page.get_by_test_id("kind").select_option("completion")
    say(page, "hello")
    expect(page.get_by_test_id("said-note")).to_have_text("Pictures go with a chat: send as a chat, or remove them.")
    live.backend.model = dataclasses.replace(live.backend.model, image_input=None)
    page.reload()
    expect(page.get_by_test_id("health")).to_contain_text("tiny")
    expect(page.get_by_test_id("add-picture")).to_be_hidden()
    assert give(page, "drop", "two.png", png())
    expect(page.get_by_test_id("picture-note")).to_have_text("two.png was left out: tiny reads text alone.")


def test_text_that_is_pasted_stays_text(page: Page) -> None:
    took = page.evaluate(
        "() => { const t = new DataTransfer(); t.setData('text/plain', 'hi');"
        " const e = new ClipboardEvent('paste', {clipboardData: t, cancelable: true, bubbles: true});"
        " document.body.dispatchEvent(e); return e.defaultPrevented; }"
    )
    assert took is False
