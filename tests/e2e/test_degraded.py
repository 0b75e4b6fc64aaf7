"""A server whose Redis goes away serves on, says what is wrong where one looks, and is well again by itself."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from pathlib import Path

import httpx

from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import LONG_S, Server, farsight, start_server, wait_until
from tests.unit.actors.redis_server import redis_server


def complete(server: Server) -> None:
    body = {"model": EMBEDDED_NAME, "prompt": "hello", "max_tokens": 2}
    reply = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=LONG_S)
    assert reply.status_code == 200, reply.text


def reasons(server: Server) -> dict[str, str]:
    return {row["kind"]: row["degraded"] for row in server.get("/status")["actors"] if row["degraded"]}


def causes(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=LONG_S) as reply:
        text = reply.read().decode()
    return {
        cause: float(value) for cause, value in re.findall(r'^farsight:degraded\{cause="(\w+)".* (\S+)$', text, re.M)
    }


def test_a_redis_that_is_away_is_seen_and_forgotten(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        config = tmp_path / "config.toml"
        config.write_text(f'[server]\ningress_replicas = 1\n[log]\npath = "{redis.url}"\n')
        server = start_server(tmp_path / "server.log", "--config", str(config))
        try:
            complete(server)
            wait_until(lambda: not reasons(server), "degraded from the start")
            redis.kill()
            complete(server)
            seen = {"LogStore": "cannot write the log", "Ingress": "log records wait", "LengthPredictor": "the log"}
            wait_until(
                lambda: all(words in reasons(server).get(kind, "") for kind, words in seen.items()), "nothing is said"
            )
            assert {row["state"] for row in server.get("/status")["actors"]} == {"ready"}
            assert {"log_write", "log_read", "records_wait"} <= {cause for cause, on in causes(server).items() if on}
            shown = subprocess.run(
                farsight("status", "--port", str(server.port)), capture_output=True, text=True, timeout=LONG_S
            )
            assert "degraded" in shown.stdout and "cannot write the log" in shown.stdout, shown
            redis.start()
            wait_until(lambda: not reasons(server), "it is said still")
            assert not any(causes(server).values())
            complete(server)
        finally:
            server.stop()
