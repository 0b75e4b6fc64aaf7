"""A conversation from a pipe with a model in this process, and with a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from farsight.services.cli import app
from farsight.services.console.talk import ServerTalk
from tests.command_line import CliRunner

LOCAL = ["--local", "--threads", "1", "--temperature", "0", "--max-tokens", "30", "--system", "Write in upper case:"]


def test_a_conversation_goes_on_until_its_end() -> None:
    lines = "/explain\nhello world\n/explain\n/nothing\n/new\nhello\n/quit\nnever asked\n"
    done = CliRunner().invoke(app, ["chat", *LOCAL], input=lines)
    assert done.exit_code == 0, done.output
    assert "nothing has been answered yet" in done.stdout
    assert "\nHELLO WORLD\n" in done.stdout and "\nHELLO\n" in done.stdout
    assert "Admitted at once" in done.stdout and "the conversation" in done.stdout
    assert "NEVER" not in done.stdout


def test_one_question() -> None:
    done = CliRunner().invoke(app, ["run", "", "-", *LOCAL, "--json"], input="hello world")
    answer = json.loads(done.stdout)
    assert (answer["text"], answer["finish_reason"], answer["model"]) == ("HELLO WORLD", "stop", "farsight-embedded")
    assert answer["tokens"] == 12 and 0 < answer["ttft_s"] <= answer["took_s"]


class Scripted(BaseHTTPRequestHandler):
    """Answers as a server of another make, which breaks off in its second answer."""

    answers = 0

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).answers += 1
        deltas: list[dict[str, str]] = [
            {"role": "assistant"},
            {"reasoning_content": "hm"},
            {"content": f"you said {body['messages'][-1]['content']}"},
        ]
        choices = [[{"delta": delta, "finish_reason": None}] for delta in deltas]
        events: list[dict[str, Any]] = [{"id": "chatcmpl-1", "choices": each} for each in choices]
        events.append({"id": "chatcmpl-1", "choices": [], "usage": {"completion_tokens": 9}})
        if self.answers == 2:
            events = [events[2], {"error": {"message": "no more"}}]
        self._send("text/event-stream", b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events))

    def _send(self, kind: str, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("farsight-eta-p50", "1.5")
        self.send_header("farsight-eta-p90", "2.5")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_is_asked_where_one_is_named(url: str) -> None:
    done = CliRunner().invoke(app, ["chat", "--url", url], input="one\ntwo\n")
    assert done.exit_code == 0, done.output
    assert "you said one\n" in done.stdout and "farsight: no more" in done.stdout
    talk = ServerTalk(url, "")
    pieces = list(talk.say([{"role": "user", "content": "three"}], {}))
    assert pieces[0].eta_s == (1.5, 2.5) and pieces[2].reasoning == "hm"
    assert (talk.model, talk.last.response_id, talk.last.num_tokens) == ("m", "chatcmpl-1", 9)
