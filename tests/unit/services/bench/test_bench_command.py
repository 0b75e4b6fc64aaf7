"""``farsight bench`` from its options to its table and files."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli import app
from tests.command_line import CliRunner, Result
from tests.unit.services.bench.fake_server import FakeServer, fake_server


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with fake_server() as first, fake_server() as second:
        yield first, second


def invoke(*words: str) -> Result:
    return CliRunner().invoke(
        app, ["bench", "--num-requests", "6", "--warm-up", "2", "--max-output-tokens", "8", *words]
    )


def test_side_by_side(servers: tuple[FakeServer, FakeServer], tmp_path: Path) -> None:
    path, pid = tmp_path / "out.json", str(os.getpid())
    words = [word for server in servers for word in ("--url", server.base_url, "--server-pid", pid)]
    words += ["--label", "old", "--label", "new", "--repeats", "3", "--concurrency", "1,4", "--sla", "ttft=240s"]
    result = invoke(*words, "--json", str(path), "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert "new / old" in result.stdout and "skewed, 4 in flight" in result.stdout
    text = path.read_text()
    assert "secret" not in text
    record = json.loads(text)
    assert record["config"]["repeats"] == 3 and record["versions"]["aiohttp"]
    assert [case["load"] for case in record["cases"]] == [1, 4]
    for case in record["cases"]:
        assert [len(target["runs"]) for target in case["targets"]] == [3, 3]
        assert case["ratios"][0]["ratios"]["output_tokens"] == {"min": 1.0, "median": 1.0, "max": 1.0}
        run = case["targets"][1]["runs"][0]
        assert run["metrics"]["sla_percent"] == 100 and len(run["requests"]) == 6
        assert run["tokens_counted_by"] == {"usage": 6}


def test_prompts_differ_between_runs_unless_they_shall_not(servers: tuple[FakeServer, FakeServer]) -> None:
    server = servers[0]
    for flags, num_prompts in ([], 6 + 6 + 2), (["--same-prompts"], 6):
        server.begin()
        assert invoke("--url", server.base_url, "--repeats", "2", *flags).exit_code == 0
        assert len({body["prompt"] for body in server.bodies}) == num_prompts


def test_servers_side_by_side_answer_the_same_prompts_and_none_twice(servers: tuple[FakeServer, FakeServer]) -> None:
    first, second = servers
    for server in servers:
        server.begin()
    words = ["--url", first.base_url, "--url", second.base_url, "--url", f"{first.base_url}/v1", "--warm-up", "0"]
    for number, label in enumerate("abc"):
        words += ["--label", label, *(["--repeats", "2"] if number == 0 else [])]
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    prompts, others = ([body["prompt"] for body in server.bodies] for server in servers)
    assert len(set(prompts)) == len(prompts) == 24 and len(set(others)) == len(others) == 12
    assert set(others) < set(prompts)


def test_errors_are_told_and_end_with_one(servers: tuple[FakeServer, FakeServer]) -> None:
    result = invoke("--url", servers[0].base_url, "--extra-body", '{"user": "full"}')
    assert result.exit_code == 1
    assert "6 times: HTTP 503" in result.stdout


@pytest.mark.parametrize(("flags", "least_words"), [([], 20), (["--hide-lengths"], 8)])
def test_without_limits_requests_are_cut_to_the_served_context(
    servers: tuple[FakeServer, FakeServer], flags: list[str], least_words: int
) -> None:
    server = servers[0]
    server.begin()
    server.max_model_len = 160
    words = ["bench", "--url", server.base_url, "--num-requests", "12", "--warm-up", "0", *flags]
    try:
        result = CliRunner().invoke(app, words)
    finally:
        server.max_model_len = 0
    assert result.exit_code == 0, result.output
    assert "skewed, 32 in flight: 12 of 12 requests are cut to fit the served context of 160 tokens" in result.stdout
    assert max(len(body["prompt"].split()) for body in server.bodies[1:]) >= least_words  # not cut more than need be


def test_limits_that_are_given_are_taken_as_they_are(servers: tuple[FakeServer, FakeServer]) -> None:
    server = servers[0]
    server.begin()
    server.max_model_len = 160
    try:
        result = invoke("--url", server.base_url)
    finally:
        server.max_model_len = 0
    assert result.exit_code == 1
    assert "requests that do not fit the context" in result.stdout and "are cut" not in result.stdout


def test_a_wrong_option_is_refused() -> None:
    result = invoke("--url", "http://127.0.0.1:1", "--concurrency", "4;8")
    assert result.exit_code == 1
    assert "--concurrency: got '4;8', expected numbers as 32 or 1,32,128" in result.stderr


def test_plots(servers: tuple[FakeServer, FakeServer], tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    words = ["--url", servers[0].base_url, "--url", servers[1].base_url, "--plots", str(tmp_path / "plots")]
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    (picture,) = (tmp_path / "plots").iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_line_stays_light() -> None:
    script = (
        "import sys, services.cli, services.bench.compare; print({'ray', 'torch', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
