"""A Farsight whose replicas are other servers: one of ours, real HTTP on both sides, and one that is not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.error import HTTPError

import pytest

from services.launch import EMBEDDED_NAME
from tests.e2e.server import Server, farsight, start_server
from tests.free_ports import free_port

LONG_S = 60.0
pytestmark = pytest.mark.timeout(300)  # two servers start


@pytest.fixture(scope="module")
def front(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its replicas are ``server`` and an address where nobody listens."""
    folder = tmp_path_factory.mktemp("front")
    config = folder / "farsight.toml"
    urls = server.base_url + "/v1", f"http://127.0.0.1:{free_port()}"
    tables = [f'[[replica]]\nbackend = "openai"\nurl = "{url}"\n' for url in urls]
    config.write_text("[server]\nfirst_token_deadline_s = 10.0\n" + "".join(tables))
    running = start_server(folder / "log", "--config", str(config))
    yield running
    running.stop()


def post(server: Server, path: str, **fields: Any) -> HTTPResponse:
    body = json.dumps({"model": EMBEDDED_NAME, **fields}).encode()
    request = urllib.request.Request(server.base_url + path, body, {"Content-Type": "application/json"})
    reply: HTTPResponse = urllib.request.urlopen(request, timeout=LONG_S)
    return reply


def completion(server: Server, **fields: Any) -> Any:
    with post(server, "/v1/completions", **fields) as reply:
        return json.load(reply)


def rows(server: Server) -> dict[str, Any]:
    return {row["name"]: row for row in server.get("/status")["actors"]}


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_chat_is_answered_as_by_the_server_itself(front: Server, server: Server) -> None:
    chat = {
        "messages": [{"role": "system", "content": "Spell the digits:"}, {"role": "user", "content": "407"}],
        "temperature": 0,
    }
    answers = []
    for asked in (server, front):
        with post(asked, "/v1/chat/completions", **chat) as reply:
            answers.append(json.load(reply))
    direct, through = answers
    assert through["choices"] == direct["choices"]
    assert through["choices"][0]["message"]["content"] == "four zero seven"
    for name in ("prompt_tokens", "completion_tokens"):
        assert through["usage"][name] == direct["usage"][name]


def test_choices_seeds_stops_and_limits_are_passed_on(front: Server, server: Server) -> None:
    fields = {
        "prompt": "Write it three times:\nabc",
        "temperature": 1.5,
        "seed": 7,
        "n": 3,
        "stop": ["b"],
        "max_tokens": 9,
    }
    assert completion(front, **fields)["choices"] == completion(server, **fields)["choices"]


def test_a_stream_counts_as_the_server_does(front: Server) -> None:
    fields = {"prompt": "Repeat the text:\nabc", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with post(front, "/v1/completions", stream=True, stream_options={"include_usage": True}, **fields) as reply:
        events = [line[6:] for line in reply.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    whole = completion(front, **fields)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_what_other_servers_are_not_asked_for_is_refused_by_name(front: Server) -> None:
    with pytest.raises(HTTPError) as caught:
        completion(front, prompt="x", logprobs=1)
    assert caught.value.code == 400
    assert json.load(caught.value)["error"]["param"] == "logprobs"


def test_what_is_there_and_what_is_not_is_shown(front: Server, server: Server) -> None:
    shown = rows(front)
    here, gone = shown["backend-0"], shown["backend-1"]
    assert (here["kind"], here["url"], here["breaker"]) == ("OpenAIBackend", server.base_url + "/v1", "closed")
    assert gone["state"] == "waiting" and "no connection" in gone["breaker"]
    assert "worker-0" not in shown, "no engine of our own runs"
    told = subprocess.run(farsight("status", "--port", str(front.port)), capture_output=True, text=True, check=True)
    assert server.base_url in told.stdout and "no connection" in told.stdout
    with urllib.request.urlopen(front.base_url + "/metrics") as reply:
        page = reply.read().decode()
    labels = f'{{engine="backend-1",model_name="{EMBEDDED_NAME}",state='
    assert f'farsight:backend_state{labels}"closed"}} 0.0' in page
    assert 'farsight:backend_failures_total{engine="backend-1",kind="connect"' in page


def test_an_answer_is_explained(front: Server) -> None:
    answer_id = completion(front, prompt="Count:\nabc", max_tokens=3)["id"]
    kinds: list[str] = []

    def whole() -> bool:
        told = front.get(f"/v1/requests/{answer_id}")
        kinds[:] = [each["kind"] for choice in told["choices"] for each in choice["decisions"]]
        return "server_ended" in kinds and "answered" in kinds

    eventually(whole)
    assert kinds[:4] == ["received", "placed", "arrived", "sent"]


def test_the_death_of_our_own_side_ends_a_stream_with_an_error_and_nothing_else(front: Server) -> None:
    fields = {"prompt": "Repeat the text:\nabc", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with post(front, "/v1/completions", **fields) as reply:
        assert reply.readline().startswith(b"data: ")
        os.kill(rows(front)["backend-0"]["pid"], signal.SIGKILL)
        events = [line[6:] for line in reply.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "another server, was lost" in json.loads(events[-2])["error"]["message"]
    eventually(lambda: rows(front)["backend-0"]["breaker"] == "closed")
    assert completion(front, prompt="Count:\nabc", max_tokens=3)["choices"][0]["finish_reason"] in ("stop", "length")


def test_while_no_server_is_there_requests_fail_inside_their_deadline(front: Server, server: Server) -> None:
    """The last one: it leaves ``server`` as it found it, but for an ingress replica that began anew."""
    pid = next(row["pid"] for row in rows(server).values() if row["kind"] == "Ingress")
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(HTTPError) as caught:
            completion(front, prompt="Count:\nabc", max_tokens=3)
        assert caught.value.code == 503
        message = json.load(caught.value)["error"]["message"]
        assert "no token within 10 s" in message
        assert time.monotonic() - began >= 10.0
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: rows(front)["backend-0"]["breaker"] == "closed")
    assert completion(front, prompt="Count:\nabc", max_tokens=3)["usage"]["completion_tokens"] > 0
