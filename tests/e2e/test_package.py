"""What is shipped, built and started: the wheel in a directory of its own, and the container where an engine runs.

``make test-package`` runs this; building fetches the build's own requirements from the package index.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.free_ports import free_port
from tools.rooms import ROOMS

ROOT = Path(__file__).parents[2]
BUILD_S = 1800
START_S = 600

pytestmark = pytest.mark.package


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def answer_of(port: int, key: str) -> str:
    """The embedded model's answer to one chat, once the server is ready."""
    body = {
        "model": "farsight-embedded",
        "messages": [
            {"role": "system", "content": "Write in upper case:"},
            {"role": "user", "content": "hello world"},
        ],
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    address = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                text: str = json.load(reply)["choices"][0]["message"]["content"]
                return text
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code != 503:
                raise
            assert time.monotonic() < deadline, f"no answer within {START_S} s"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked into a directory; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("package")
    checkout = folder / "checkout"
    run("git", "clone", "-q", ROOT, checkout)  # what git does not have is not shipped
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder / "dist", checkout)
    (wheel,) = (folder / "dist").glob("farsight-*.whl")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder / "site", wheel)
    shutil.rmtree(checkout)
    return folder / "site"


@pytest.fixture
def elsewhere(installed: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds the wheel's modules, and builds the compiled step itself."""
    return {**os.environ, "PYTHONPATH": str(installed), "FARSIGHT_CACHE": str(tmp_path / "cache")}


def test_wheel_holds_every_module(installed: Path, elsewhere: dict[str, str], tmp_path: Path) -> None:
    tracked = run("git", "-C", ROOT, "ls-files").splitlines()
    assert [name for name in os.listdir(installed) if (installed / name / "__init__.py").exists()] == ["farsight"]
    shipped = [name for name in tracked if name.split("/")[0] in ROOMS]
    assert len(shipped) > 300
    assert [name for name in shipped if not (installed / "farsight" / name).exists()] == []
    where = run(
        sys.executable, "-c", "import farsight.services.cli as cli; print(cli.__file__)", cwd=tmp_path, env=elsewhere
    )
    assert Path(where.strip()).is_relative_to(installed)


@pytest.fixture
def from_wheel(elsewhere: dict[str, str], tmp_path: Path) -> Iterator[int]:
    port = free_port()
    (tmp_path / "core").mkdir()  # a project with a package of its own that is called like a room
    (tmp_path / "core" / "__init__.py").write_text("raise AssertionError(__file__)")
    command = [sys.executable, "-m", "farsight.services.cli", "serve", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=elsewhere, stdout=log, stderr=subprocess.STDOUT)
    yield port
    process.send_signal(signal.SIGINT)
    assert process.wait(120) in (0, 130), (tmp_path / "log").read_text()


def test_wheel_serves_with_the_compiled_step(from_wheel: int, tmp_path: Path) -> None:
    assert answer_of(from_wheel, "none") == "HELLO WORLD"
    assert list((tmp_path / "cache").glob("step-*.so"))


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    engine = shutil.which("docker")
    if engine is None or subprocess.run([engine, "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no container engine runs here")
    name = f"farsight-test-{os.getpid()}"
    run("docker", "build", "-q", "-f", ROOT / "deploy/docker/Dockerfile", "-t", name, ROOT)
    yield name
    run("docker", "image", "rm", "-f", name)


def test_container_serves(image: str) -> None:
    port = free_port()
    options = ["--rm", "-d", "--shm-size", "2g", "-p", f"127.0.0.1:{port}:8000", "-e", "FARSIGHT_API_KEY=k"]
    container = run("docker", "run", *options, image).strip()
    try:
        assert answer_of(port, "k") == "HELLO WORLD"
    finally:
        run("docker", "stop", "-t", "60", container)


def test_container_without_a_key_does_not_start(image: str) -> None:
    result = subprocess.run(["docker", "run", "--rm", image], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode != 0
    assert "farsight keys add" in result.stdout + result.stderr
