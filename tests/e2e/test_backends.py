"""A Farsight whose replicas are other servers: one of ours, real HTTP on both sides, and one that is not there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import LONG_S, Server, farsight, start_server, wait_until
from tests.stage import on_stage

MAX_TRIES = 5
DEADLINE_S = 10.0


@on_stage(level=1)
def front(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its replicas are ``server`` and an address where no server listens."""
    folder = tmp_path_factory.mktemp("front")
    config = folder / "farsight.toml"
    with socket.socket() as held:  # no other process is given the port
        held.bind(("127.0.0.1", 0))
        urls = server.base_url + "/v1", f"http://127.0.0.1:{held.getsockname()[1]}"
        tables = [f'[[replica]]\nbackend = "openai"\nurl = "{url}"\n' for url in urls]
        config.write_text(f"[server]\nfirst_token_deadline_s = {DEADLINE_S}\n" + "".join(tables))
        running = start_server(folder / "log", "--config", str(config))
        wait_until(lambda: row(running, "backend-0")["breaker"] == "closed", "the server is not found")
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
    """By name, once no component is dead: on a busy machine one that answers late is shown so, with what it said
    before."""
    found: dict[str, Any] = {}

    def all_live() -> bool:
        found.clear()
        found.update({row["name"]: row for row in server.get("/status")["actors"]})
        return all(row["state"] != "dead" for row in found.values())

    wait_until(all_live, "a component is dead")
    return found


def row(server: Server, name: str) -> Any:
    return rows(server)[name]


def answered(server: Server) -> Any:
    """A completion of a server that has been away; it may still be finding its way back."""
    answers: list[Any] = []

    def one() -> bool:
        try:
            answers.append(completion(server, prompt="Count:\nabc", max_tokens=3))
        except HTTPError as error:
            assert error.code == 503, error.read()
        return bool(answers)

    wait_until(one, "requests are not answered again")
    return answers[0]


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


def test_what_other_servers_are_not_asked_for_is_refused_by_name(front: Server) -> None:
    with pytest.raises(HTTPError) as caught:
        completion(front, prompt="x", logprobs=1)
    assert caught.value.code == 400
    assert json.load(caught.value)["error"]["param"] == "logprobs"


def test_what_is_there_and_what_is_not_is_shown(front: Server, server: Server) -> None:
    shown: dict[str, Any] = {}

    def found_out() -> bool:
        shown.update(rows(front))
        return shown["backend-0"]["breaker"] == "closed" and "cannot connect" in shown["backend-1"]["breaker"]

    wait_until(found_out, "who is there, and who is not, is not shown")
    assert (shown["backend-0"]["kind"], shown["backend-0"]["url"]) == ("OpenAIBackend", server.base_url + "/v1")
    assert shown["backend-1"]["state"] == "waiting"
    assert "worker-0" not in shown, "no engine of our own runs"

    def told() -> bool:
        table = subprocess.run(farsight("status", "--port", str(front.port)), capture_output=True, text=True).stdout
        return server.base_url in table and "cannot connect" in table

    wait_until(told, "the command does not tell it")
    labels = f'{{engine="backend-1",model_name="{EMBEDDED_NAME}",state='

    def counted() -> bool:
        with urllib.request.urlopen(front.base_url + "/metrics") as reply:
            page = reply.read().decode()
        failed = 'farsight:backend_failures_total{engine="backend-1",kind="connect"'
        return f'farsight:backend_state{labels}"closed"}} 0.0' in page and failed in page

    wait_until(counted, "the metrics do not have it")


def test_the_death_of_our_own_side_ends_a_stream_with_an_error_and_nothing_else(front: Server) -> None:
    """Where the machine is too busy for the kill to come before the end of the stream, it is tried again."""
    for _ in range(MAX_TRIES):
        pid, events = kill_midway(front)
        wait_until(partial(is_another, front, "backend-0", pid), "it does not come back")
        if "error" in json.loads(events[-2]):
            break
    assert events[-1] == "[DONE]"
    assert "another server, was lost" in json.loads(events[-2])["error"]["message"]
    assert answered(front)["choices"][0]["finish_reason"] in ("stop", "length")


def kill_midway(front: Server) -> tuple[int, list[str]]:
    """The process that was killed after the first chunk of a stream, and the events of that."""
    fields = {"prompt": "Repeat the text:\nabc", "max_tokens": 900, "ignore_eos": True, "stream": True}
    pid = row(front, "backend-0")["pid"]
    with post(front, "/v1/completions", **fields) as reply:
        assert reply.readline().startswith(b"data: ")
        os.kill(pid, signal.SIGKILL)
        return pid, [line[6:] for line in reply.read().decode().splitlines() if line.startswith("data: ")]


def is_another(server: Server, name: str, pid: int) -> bool:
    """Whether the component lives in another process, and sends requests to its server."""
    found = row(server, name)
    return bool(found["pid"] != pid and found["breaker"] == "closed")


def test_one_command_stands_before_a_server(server: Server, tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = start_server(log, server.base_url, command="front")
    try:
        fields = {"prompt": "Repeat the text:\nabc", "max_tokens": 8, "temperature": 0}
        assert completion(running, **fields)["choices"] == completion(server, **fields)["choices"]
        assert row(running, "backend-0")["url"] == server.base_url
        assert f"{server.base_url} is farsight and serves {EMBEDDED_NAME}: prompts as tokens." in log.read_text()
    finally:
        running.stop()
