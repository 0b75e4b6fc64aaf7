"""Servers as child processes, and how peers are started."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.common import servers
from benchmarks.common.servers import RunningServer, ServerCommand, vocab_size
from benchmarks.common.tagged import wait_until_gone
from benchmarks.peers.commands import PeerOptions, installed_versions, peer
from tests.free_ports import free_port
from tests.published import smollm2

ROOT = Path(__file__).parents[4]
LONG_S = 240.0
"""For what a busy machine may delay."""

SCRIPT = """
import http.server, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
try:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
except KeyboardInterrupt:
    pass
"""


def start(log: Path, script: str = SCRIPT) -> RunningServer:
    port = free_port()
    return RunningServer(ServerCommand([sys.executable, "-c", script, str(port)], port, "m"), log)


PARENT = """
import signal, sys, time
from pathlib import Path
from benchmarks.common.servers import RunningServer, ServerCommand

command = ServerCommand([sys.executable, "-c", "import time; time.sleep(3600)"], 1, "m")
server = RunningServer(command, Path(sys.argv[1]))
print(server.pid, flush=True)
time.sleep(3600)
"""


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_ended(process: psutil.Process) -> None:
    deadline = time.monotonic() + LONG_S
    while not has_ended(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_benchmark(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
    wait_ended(server)


def test_what_a_server_leaves_behind_is_named_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself has all the time that it needs to end; what it leaves would never do so."""

    def wait_briefly(variable: str, value: str, timeout_s: float) -> list[psutil.Process]:
        return wait_until_gone(variable, value, min(timeout_s, 0.5))

    monkeypatch.setattr(servers, "STOP_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(servers, "wait_until_gone", wait_briefly)
    server = start(tmp_path / "log")
    try:
        assert server.wait_until_ready(LONG_S) > 0
        (child,) = psutil.Process(server.pid).children()
        assert server.tree.cpu_s() > 0
    finally:
        end = server.stop()
    assert end["exit_status"] == 0
    assert [int(line.split()[0]) for line in end["left_behind"]] == [child.pid]
    wait_ended(child)


def test_a_server_that_ends_tells_why(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "raise SystemExit('no memory')")
    with pytest.raises(RuntimeError, match="status 1:\nno memory"):
        server.wait_until_ready(LONG_S)
    assert server.stop()["left_behind"] == []


def test_each_peer_is_started_in_its_own_words(tmp_path: Path) -> None:
    vllm = peer("vllm", PeerOptions(tmp_path, tmp_path / "tiny", threads=3, more=["--enforce-eager"]))
    assert vllm.takes_ids and vllm.takes_extensions and vllm.command.model_name == "tiny"
    assert vllm.command.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and vllm.command.env["OMP_NUM_THREADS"] == "3"
    words = " ".join(vllm.command.words)
    assert "--distributed-executor-backend uni --enforce-eager" in words and "--no-enable-prefix-caching" in words
    transformers = peer("transformers", PeerOptions(tmp_path, tmp_path / "tiny"))
    assert not transformers.takes_ids and not transformers.takes_extensions
    assert transformers.command.model_name == str(tmp_path / "tiny")  # it knows its model by the path alone
    llama = peer("llama.cpp", PeerOptions(tmp_path, tmp_path / "m.gguf", max_model_len=512, threads=2, in_flight=16))
    words = " ".join(llama.command.words)
    assert "--threads 2" in words and "--parallel 16 --ctx-size 8192" in words and "--no-cache-prompt" in words
    assert llama.command.model_name == "m.gguf"
    options = PeerOptions(tmp_path, tmp_path / "m", threads=2, more=["--preset", "fcfs"], dtype="float32")
    other = peer("farsight", options)
    words = " ".join(other.command.words)
    assert "services.cli serve --benchmark-mode" in words and words.endswith("--threads 2 --preset fcfs")
    assert f"--model {tmp_path / 'm'} --dtype float32" in words and other.name != "farsight"
    found = installed_versions(Path(sys.prefix))
    assert found["python"].startswith("3.") and found["torch"]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 77}))
    assert vocab_size(tmp_path) == 77


def test_the_vocabulary_of_a_gguf_file_is_in_its_header() -> None:
    assert vocab_size(smollm2()) == 49_152
