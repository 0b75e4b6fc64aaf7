"""What a command takes from a server that it asks: the key goes nowhere else, and an answer has an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from core.errors import FarsightError
from services.cli import app
from services.commands import ask as asking
from services.commands.ask import ask
from tests.command_line import CliRunner
from tests.free_ports import free_port


class Server(HTTPServer):
    """Sends ``/elsewhere`` on to ``elsewhere``, and says {} to all else.

    Attributes:
        asked: The path and the key of each request.
    """

    asked: list[tuple[str, str | None]]
    elsewhere: str


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self.send_response(302 if self.path == "/elsewhere" else 200)
        self.send_header("Location", self.server.elsewhere)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: Any) -> None:
        """Tests are quiet."""


def started() -> Server:
    server = Server(("127.0.0.1", 0), Handler)
    server.asked, server.elsewhere = [], ""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    pair = started(), started()
    yield pair
    for server in pair:
        server.shutdown()
        server.server_close()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_a_redirect_does_not_take_the_key_elsewhere(servers: tuple[Server, Server]) -> None:
    asked, other = servers
    asked.elsewhere = f"{url(other)}/v1/models"
    with pytest.raises(FarsightError, match="302"):
        ask(url(asked), "/elsewhere", 60.0, "secret")
    assert asked.asked == [("/elsewhere", "Bearer secret")]
    assert other.asked == []


def test_an_answer_that_is_too_long_is_refused(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = servers
    monkeypatch.setattr(asking, "MAX_ANSWER_BYTES", 2)
    assert ask(url(server), "/status", 60.0) == {}
    monkeypatch.setattr(asking, "MAX_ANSWER_BYTES", 1)
    with pytest.raises(FarsightError, match="more than 1 bytes"):
        ask(url(server), "/status", 60.0)


@pytest.mark.parametrize(
    "command",
    [["status"], ["explain", "cmpl-1"], ["scale", "replica", "1"], ["drain", "0"], ["upgrade", "--model", "x"]],
)
def test_every_command_that_asks_a_server_takes_its_url_or_its_host_and_port(command: list[str]) -> None:
    port = str(free_port())
    for flags in (["--url", f"http://127.0.0.1:{port}/"], ["--host", "127.0.0.1", "--port", port]):
        found = CliRunner().invoke(app, [*command, *flags])
        assert found.exit_code == 1
        assert f"no server answers at http://127.0.0.1:{port}" in found.output
    found = CliRunner().invoke(app, [*command, "--url", "localhost"])
    assert found.output.startswith("farsight: --url: got 'localhost', expected an address")
