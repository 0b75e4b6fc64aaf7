"""``farsight explain``: a timeline that people can read, errors that say what is wrong, and what any command takes from
a server that it asks: the key goes nowhere else, and an answer has an end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from farsight.actors.log.log_backend import Retention
from farsight.actors.log.log_sqlite import SqliteLog
from farsight.core.decisions import Decision, on_clock, pack_decisions
from farsight.core.errors import FarsightError
from farsight.core.messages.log import FinishedRequest, RequestTrace
from farsight.services.api.pages.explain import explanation
from farsight.services.cli import app
from farsight.services.commands import ask as asking
from tests.command_line import CliRunner

RESPONSE_ID = "cmpl-" + "0" * 32
PATH = f"/v1/requests/{RESPONSE_ID}"


def explained(num_left_out: int = 0) -> dict[str, Any]:
    decisions = [
        Decision("received", 0.0, {"prompt_tokens": 7, "max_new_tokens": 20}),
        Decision("placed", 0.001, {"replica": "1", "reason": "in turn", "hit_len": 0}),
        Decision("waits", 0.002, {"reason": "places", "max_num_seqs": 4, "num_admitted": 4, "num_waiting": 9}),
        Decision("admitted", 1.502, {"waited_s": 1.5, "num_admitted": 4, "num_waiting": 8}),
        Decision("answered", 2.25, {"reason": "stop", "output_tokens": 5, "jct_s": 2.25, "ttft_s": 1.6, "attempts": 1}),
    ]
    packed = on_clock(1000.0, pack_decisions(decisions))
    trace = RequestTrace(f"{RESPONSE_ID}/i-0/ingress", "i-0", 0, b"", "ingress", 0, True, num_left_out, packed)
    return explanation(RESPONSE_ID, [trace]).model_dump()


class Server(HTTPServer):
    """Keeps path and key of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None]] = []
        self.reply: tuple[int, Any] = 200, explained()
        self.what_if: Any = None
        self.elsewhere = ""  # where it sends who asks
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        status, body = (200, self.server.what_if) if "/what-if?" in self.path else self.server.reply
        self.send_response(status)
        self.send_header("Location", self.server.elsewhere)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        """Tests are quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("FARSIGHT_API_KEY", raising=False)
    monkeypatch.setenv("FARSIGHT_ADMIN_TOKEN", "admin")
    running = Server()
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def run(server: Server, *args: str) -> Any:
    return CliRunner().invoke(app, ["explain", RESPONSE_ID, "--url", f"{server.url}/", *args])


other_server = server


def test_a_redirect_does_not_take_the_key_elsewhere(server: Server, other_server: Server) -> None:
    server.reply, server.elsewhere = (302, {}), f"{other_server.url}/v1/models"
    with pytest.raises(FarsightError, match="302"):
        asking.ask(server.url, "/elsewhere", 60.0, "secret")
    assert server.asked == [("/elsewhere", "Bearer secret")]
    assert other_server.asked == []


def test_an_answer_that_is_too_long_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.reply = 200, {}
    monkeypatch.setattr(asking, "MAX_ANSWER_BYTES", 2)
    assert asking.ask(server.url, "/status", 60.0) == {}
    monkeypatch.setattr(asking, "MAX_ANSWER_BYTES", 1)
    with pytest.raises(FarsightError, match="more than 1 bytes"):
        asking.ask(server.url, "/status", 60.0)


def test_it_is_told_as_a_timeline(server: Server) -> None:
    result = run(server)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines[0] == (
        "request i-0: ended, on replica 1, took 2.250 s, first token after 1.600 s, waited 1.500 s, 5 tokens"
    )
    assert "2.0 ms +1.0 ms ingress Waits for a batch slot: all 4 are taken (4 requests are admitted, 9 wait)." in lines
    assert "1.502 s +1.500 s ingress Admitted after a wait of 1.50 s (4 requests are admitted, 8 wait)." in lines
    assert server.asked == [(PATH, "Bearer admin")], "the operator of the machine may ask about all requests"


def test_what_was_left_out_is_said(server: Server) -> None:
    server.reply = 200, explained(num_left_out=12)
    assert "Dropped between these, as too many to keep: 12 decisions." in run(server).output


def test_json_is_what_the_server_says(server: Server) -> None:
    result = run(server, "--json", "--api-key", "mine")
    assert json.loads(result.output) == json.loads(json.dumps(explained()))
    assert server.asked == [(PATH, "Bearer mine")]


def test_an_address_that_is_none_is_named() -> None:
    result = CliRunner().invoke(app, ["explain", "x", "--url", "localhost:8000"])
    assert result.exit_code == 1
    assert "--url: got 'localhost:8000', expected an address as http://127.0.0.1:8000" in result.output


def test_the_server_says_what_would_have_been(server: Server) -> None:
    server.what_if = {"if": "preset=farsight,replicas=3", "text": "With preset=farsight,replicas=3 it would have ..."}
    result = run(server, "--if", "preset=farsight,replicas=3", "--api-key", "mine")
    assert (result.exit_code, result.output) == (0, "With preset=farsight,replicas=3 it would have ...\n")
    question = f"{PATH}/what-if?preset=farsight&replicas=3&choice=0"
    assert server.asked == [(PATH, "Bearer mine"), (question, "Bearer mine")]
    assert json.loads(run(server, "--if", "priority=-1", "--json").output) == server.what_if


async def write_log(path: Path) -> None:
    """Three requests of 8 tokens that one replica served one after the other, the explained one last."""
    log = SqliteLog(path, Retention(100, 1))
    await log.open()
    await log.write(
        [FinishedRequest(f"i-{2 - n}", "0", 1, 7, 8, 20, "stop", 1000.0 + n / 1000, 0.1, 0.3) for n in range(3)]
    )
    await log.close()


def test_what_would_have_been_is_told_of_that_request_alone(server: Server, tmp_path: Path) -> None:
    asyncio.run(write_log(tmp_path / "log.sqlite"))
    words = ("--if", "replicas=3", "--log", str(tmp_path / "log.sqlite"), "--max-num-seqs", "1")
    result = run(server, *words)
    assert result.exit_code == 0
    assert result.output.startswith("With replicas=3 it would have taken 0.1"), result.output
    found = json.loads(run(server, *words, "--json").output)
    assert (found["if"], found["logged_jct_s"], found["num_requests"]) == ("replicas=3", 0.3, 3)
    assert "i-1" not in json.dumps(found)


@pytest.mark.parametrize("looks_up", [False, True])
def test_what_the_server_refuses_is_told_in_its_words_and_not_looked_up(
    server: Server, tmp_path: Path, looks_up: bool
) -> None:
    asyncio.run(write_log(tmp_path / "log.sqlite"))
    server.reply = 404, {"error": {"message": "id: got 'x', expected another"}}
    result = run(server, *(["--if", "replicas=3", "--log", str(tmp_path / "log.sqlite")] if looks_up else []))
    assert (result.exit_code, result.output) == (1, "farsight: id: got 'x', expected another\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--if", "speed=2"), "--if: got 'speed=2'"),
        (("--if", "speed=2", "--log", "x"), "--if: got 'speed=2'"),
        (("--if", "replicas=3", "--log", "x"), "there is no such file"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(server: Server, words: tuple[str, ...], message: str) -> None:
    result = run(server, *words)
    assert result.exit_code == 1 and message in result.output
