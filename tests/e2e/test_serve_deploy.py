"""``serve deploy deploy/serve.yaml`` and ``farsight down`` on a Ray cluster that was there before.

A Ray cluster with its dashboard, and Ray Serve within it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.batch.batch_runs import wait_no_hosts
from tests.e2e.ray_head import ROOT, TIMEOUT_S, Head, running_head
from tests.e2e.server import farsight, wait_until
from tests.free_ports import free_port

FILE = ROOT / "deploy" / "serve.yaml"


@pytest.fixture
def head() -> Iterator[Head]:
    with running_head() as running:
        yield running


def file_with(path: Path, port: int, **model: object) -> str:
    """A copy of the file for another port, and other settings of the model."""
    content = yaml.safe_load(FILE.read_text())
    content["http_options"]["port"] = port
    content["applications"][0]["args"]["model"] |= model
    path.write_text(yaml.safe_dump(content))
    return str(path)


def wait_for(status: str, head: Head) -> str:
    """Until that is the status of the application; returns the message that goes with it."""
    token = Path(head.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    url, headers = f"{head.dashboard}/api/serve/applications/", {"Authorization": f"Bearer {token}"}
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        found = httpx.get(url, headers=headers, timeout=TIMEOUT_S).json()["applications"].get("farsight", {})
        if found.get("status") == status:
            return str(found["message"])
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def wait_running(head: Head, client: httpx.Client) -> None:
    """Until the application runs, and the proxy has heard of it."""
    wait_for("RUNNING", head)
    wait_until(lambda: answers(client), "it runs, but the proxy does not pass requests on")


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def workers(client: httpx.Client) -> list[int]:
    """Once they are ready: one that answers late on a busy machine is shown as dead, by a new ingress without pid."""
    found: list[int] = []

    def are_ready() -> bool:
        rows = [row for row in client.get("/status").json()["actors"] if row["kind"] == "ModelWorker"]
        found[:] = [row["pid"] for row in rows]
        return bool(rows) and all(row["state"] == "ready" for row in rows)

    wait_until(are_ready, "no worker is ready")
    return found


BODY = {"model": EMBEDDED_NAME, "prompt": "hello", "max_tokens": 4, "ignore_eos": True}


@dataclass
class Deployed:
    """The file as it is, on a cluster, and a client of its server."""

    head: Head
    client: httpx.Client
    port: int

    def deploy(self, path: Path, **model: object) -> None:
        serve = str(Path(sys.executable).with_name("serve"))
        self.head.run(serve, "deploy", file_with(path, self.port, **model), "--address", self.head.dashboard)


@pytest.fixture
def deployed(head: Head, tmp_path: Path) -> Iterator[Deployed]:
    port = free_port()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
        found = Deployed(head, client, port)
        found.deploy(tmp_path / "a.yaml")
        wait_running(head, client)
        yield found


@pytest.mark.timeout(6 * TIMEOUT_S)
def test_deploy_and_down(head: Head, deployed: Deployed) -> None:
    client = deployed.client
    assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 4
    scale: dict[str, Any] = {"headers": {"Authorization": "Bearer of the cluster"}}
    refused = client.post("/admin/scale", json={"kind": "ingress", "count": 2}, **scale)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kind")

    said = head.run(*farsight("down", "--address", head.gcs))
    assert "ended application farsight" in said
    assert "ended actor worker-0" in said
    assert head.run(*farsight("down", "--address", head.gcs)).strip() == "No actor of Farsight was running."
    wait_no_hosts(head.children)


@pytest.mark.timeout(6 * TIMEOUT_S)
def test_deploy_again(head: Head, deployed: Deployed, tmp_path: Path) -> None:
    client = deployed.client
    first = workers(client)
    deployed.deploy(tmp_path / "b.yaml", dtype="bfloat16")
    assert "`farsight down` first" in wait_for("DEPLOY_FAILED", head)
    assert client.post("/v1/completions", json=BODY).status_code == 200, "the components that ran go on"

    deployed.deploy(tmp_path / "c.yaml")
    wait_running(head, client)
    assert workers(client) == first, "the same file finds the components that run"


def test_down_without_a_cluster_says_so() -> None:
    command = farsight("down", "--address", f"127.0.0.1:{free_port()}")
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 1
    assert "no Ray cluster answers" in result.stderr
    assert "Traceback" not in result.stderr
