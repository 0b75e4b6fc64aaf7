"""What a terminal is told: growing Markdown, the numbers of an answer, a server in one line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from farsight.services.console.doctor import LOOKS
from farsight.services.console.screen import GrowingBlocks, Shown, show_markdown, write_plain
from farsight.services.console.status import MEASURED_S, age, headline
from farsight.services.console.talk import Piece

TEXT = "# One\n\nTwo\nlines\n\n```python\na = 1\n\nb = 2\n```\n\nlast"


@pytest.mark.parametrize("size", [1, 3, len(TEXT)])
def test_blocks_end_at_blank_lines_outside_of_code(size: int) -> None:
    blocks = GrowingBlocks()
    found = [block for at in range(0, len(TEXT), size) for block in blocks.add(TEXT[at : at + size])]
    assert [each.strip() for each in found] == ["# One", "Two\nlines", "```python\na = 1\n\nb = 2\n```"]
    assert "".join(found) + blocks.rest == TEXT


def test_a_terminal_shows_each_block_once_and_a_pipe_the_text() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=20, highlight=False)
    pieces = [Piece(eta_s=(1.0, 2.0)), Piece(reasoning="hm"), *(Piece(letter) for letter in TEXT)]
    shown = show_markdown(pieces, console)
    plain, out = Console(file=io.StringIO(), width=60), io.StringIO()
    assert isinstance(console.file, io.StringIO) and isinstance(plain.file, io.StringIO)
    assert shown.text == TEXT and shown.eta_s == (1.0, 2.0) and not shown.stopped
    assert "b = 2" in _visible(console.file.getvalue())
    assert write_plain(iter(pieces), out).text == TEXT and out.getvalue() == f"{TEXT}\n"


def _visible(text: str) -> str:
    from rich.text import Text

    return Text.from_ansi(text).plain


def test_ctrl_c_ends_an_answer_and_keeps_what_came() -> None:
    def broken_off() -> object:
        yield Piece("Half a sen")
        raise KeyboardInterrupt

    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=20)
    shown = show_markdown(broken_off(), console)  # type: ignore[arg-type]
    assert shown.stopped and shown.text == "Half a sen"


def test_the_numbers_of_an_answer() -> None:
    shown = Shown()
    shown.add(Piece(eta_s=(2.0, 3.5)), 0.1)
    shown.add(Piece("a"), 0.5)
    shown.add(Piece("b"), 2.5)
    assert shown.facts(21) == (
        "21 tokens, the first after 0.50 s, 10.0 tokens/s, about 2.0 s (9 of 10 within 3.5 s) was predicted"
    )
    assert Shown(took_s=1.0).facts(0) == "no text, 1.0 s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 0 s"), (3661, "1 h 1 min"), (90_000, "1 d 1 h"), (45, "45 s")]
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_a_server_in_one_line() -> None:
    names = ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:num_requests_waiting")
    before = dict(zip(names, (10.0, 100.0, 0.0), strict=True))
    after = dict(zip(names, (10.0 + 3 * MEASURED_S, 100.0 + 250 * MEASURED_S, 4.0), strict=True))
    body = {"kv": {"num_blocks": 200, "free_blocks": 150}, "queue_delay_s": 0.25}
    line = headline("http://127.0.0.1:8000", {"id": "m", "created": 0}, before, after, body)
    assert line.startswith("m: up ")
    assert line.endswith(
        "3.0 requests/s, 250 tokens/s, KV 25% in use, 4 waiting (a new request: 0.25 s), http://127.0.0.1:8000"
    )


def test_a_machine_in_ten_lines() -> None:
    findings = [look() for look in LOOKS]
    assert len({each.about for each in findings}) == 10
    assert all(each.found and "\n" not in each.found + each.advice for each in findings)
