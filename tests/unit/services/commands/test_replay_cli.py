"""``farsight replay``: logged traffic through the simulator, beside how it really went."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.forecast import Forecast
from farsight.core.messages.log import FinishedRequest
from farsight.services.cli import app
from farsight.services.commands.logged_traffic import read_traffic
from farsight.simulator.experiment import Experiment, make_arrivals
from farsight.simulator.run import run
from tests.command_line import CliRunner
from tests.unit.actors.components import append, append_forecasts, finished, forecast_record, opened
from tests.unit.actors.redis_server import RedisServer, redis_server

RECEIVED_AT = 1.7e9
EXPERIMENT = Experiment(
    scheduler=SchedulerConfig(preset="past-future"), num_requests=60, kv_tokens=6000, max_num_seqs=16
)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["replay", *words], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["sqlite", "redis"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "log.sqlite")
    running: RedisServer = request.getfixturevalue("server")
    running.empty()
    return running.url


async def write_run(path: str) -> float:
    """A log as a server would have left it that is like the simulator in everything; returns the mean JCT."""
    outcome = run(EXPERIMENT, make_arrivals(EXPERIMENT))
    records = [
        FinishedRequest(
            record.arrival.request_id,
            record.replica,
            1,
            record.arrival.prompt_len,
            record.num_tokens,
            record.arrival.max_new_tokens,
            "stop",
            RECEIVED_AT + record.arrival.arrived_at,
            record.ttft_s,
            record.jct_s,
        )
        for record in outcome.recorder.done
    ]
    async with opened(path=path) as store:
        await append(store, *records)
    mean = outcome.summary.jct_s.mean
    assert mean is not None
    return mean


async def test_under_its_own_preset_traffic_is_what_it_was(path: str) -> None:
    mean = await write_run(path)
    args = [path, "--preset", "past-future,fcfs", "--preset", "magnus", "--kv-tokens", "6000", "--max-num-seqs", "16"]
    result = await asyncio.to_thread(invoke, *args, "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["preset"] for row in rows] == ["logged", "past-future", "fcfs", "magnus"]
    logged, same, other, _ = rows
    assert logged["num_requests"] == same["num_requests"] == 60
    assert logged["jct_s_mean"] == pytest.approx(mean)
    for name in ("jct_s_mean", "jct_s_p99", "ttft_s_mean", "ttft_s_p99"):
        assert same[name] == pytest.approx(logged[name], rel=1e-4), "instants of the log are floats of the epoch"
    assert other["jct_s_mean"] != same["jct_s_mean"]
    table = (await asyncio.to_thread(invoke, *args)).output
    assert all(text in table for text in ("logged", "mean JCT to logged", "1.00", "step times are those of a 7B model"))


async def test_forecasts_come_with_their_requests_and_what_had_no_output_is_left_out(path: str) -> None:
    async with opened(path=path) as store:
        await append_forecasts(store, forecast_record("b", 9.0), forecast_record("never"))
        await append(store, finished("a"), finished("b"), finished("c", 0), finished("d", 3, "error"))
        traffic = await asyncio.to_thread(read_traffic, path)  # while the store writes it
    assert ([each.request.request_id for each in traffic.logged], traffic.num_left_out) == (["a", "b"], 2)
    made = forecast_record("b", 9.0)
    first, second = traffic.arrivals()
    assert first.forecast is None
    assert second.forecast == Forecast(9.0, made.quantiles, 1, "forest", 3, None)
    assert (second.arrived_at, second.prompt_len, second.output_len, second.max_new_tokens) == (0.0, 5, 7, 100)


async def test_an_empty_log_is_no_traffic(path: str) -> None:
    async with opened(path=path) as store:
        await append(store, finished("c", 0))
    result = await asyncio.to_thread(invoke, path, "--preset", "fcfs")
    assert result.exit_code == 1
    assert "a log with traffic; this one has 1 requests, none of them with an output" in result.output


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.write_text("a letter " * 100), "file is not a database"),
        (foreign, "expected a log of Farsight of version"),
    ],
)
def test_what_is_no_log_is_named_and_left_alone(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "log.sqlite"
    make(path)
    before = path.read_bytes() if path.exists() else None
    result = invoke(str(path), "--preset", "fcfs")
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert result.output.startswith(f"farsight: LOG: got '{path}'") and message in result.output
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_redis_database_without_a_log_stays_empty(server: RedisServer) -> None:
    server.empty()
    assert "a Redis database with a log of Farsight; there is none" in invoke(server.url, "--preset", "fcfs").output
    assert "there is none" in invoke(server.url, "--preset", "fcfs").output
    assert "a Redis server with a log" in invoke("redis://127.0.0.1:1", "--preset", "fcfs").output


@pytest.mark.parametrize("presets", ["fcsf", "fcfs,fcfs", "fcfs,"])
def test_presets_are_checked_before_the_log_is_read(presets: str) -> None:
    result = invoke("nowhere", "--preset", presets)
    assert result.exit_code == 1
    assert result.output.startswith("farsight: --preset: got ")


def conversations_file(tmp_path: Path) -> Path:
    turn = {"in": 70, "out": 5, "h": [[1, 1]], "think": 1.0, "after": "user"}
    turns = [turn, turn | {"in": 200, "h": [[1, 3]], "after": "tool"}, {"sub": [turn]}]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"c{n}", "block": 64, "requests": turns}) for n in range(3)), "utf-8")
    return path


def test_a_trace_of_conversations_is_replayed_over_tiers(tmp_path: Path) -> None:
    page = tmp_path / "replay.html"
    result = invoke("--trace", str(conversations_file(tmp_path)), "--part", "1/2", "--json", "--html", str(page))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert [run["name"] for run in report["runs"]] == ["one tier", "tiers", "all kept"]
    assert {(run["turns"], run["sessions"]) for run in report["runs"]} == {(4, 2)}
    assert set(report["runs"][0]["by_class"]) == {"first turn", "after a tool"}
    assert report["turns_of_subagents_left_out"] == 2 and report["ratios"]["computed_to_new"] >= 1.0
    text = page.read_text("utf-8")
    assert "prefers-color-scheme: dark" in text and "<script" not in text and "http" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--part", "3/2"], "--part: got '3/2'"),
        (["--part", "half"], "--part: got 'half'"),
        (["--prices", "a-stone"], "--prices: got 'a-stone'"),
        (["--scale", "0"], "--scale: got 0"),
        (["--every", "-1"], "--every: got -1"),
        (["--preset", "fcfs,farsight"], "--preset: got 'fcfs,farsight'"),
        (["--profile", "p.json"], "--profile: got 'p.json'"),
        (["log.sqlite"], "LOG: got 'log.sqlite'"),
        (["--disk-kv-bytes", "much"], "memory: got 'much'"),
    ],
)
def test_a_wrong_flag_of_a_trace_is_named(tmp_path: Path, words: list[str], expected: str) -> None:
    result = invoke("--trace", str(conversations_file(tmp_path)), *words)
    assert result.exit_code == 1 and expected in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_single_requests_are_replayed_and_their_sessions_found(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * n, "input_length": 600 + 512 * n, "output_length": 3, "hash_ids": list(range(n + 2))}
        for n in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    result = invoke("--trace", str(path), "--json")
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout.splitlines()[-1])["runs"]
    assert {(run["turns"], run["sessions"]) for run in runs} == {(3, 1)}
    refused = invoke("--trace", str(path), "--every", "3")
    assert refused.exit_code == 1 and "--every" in refused.output
