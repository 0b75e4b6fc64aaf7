"""From ``farsight train`` to a server that predicts the lengths of its answers, and learns from them."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from farsight.core.config.load import make_config
from farsight.services.api.schemas import CompletionRequest
from farsight.services.ingress import predictor_client
from farsight.services.launch.launch import EMBEDDED_NAME
from farsight.services.local.service import LocalService, local_service
from tests.e2e.server import LONG_S, Server, farsight, start_server, wait_until
from tests.unit.actors.components import until

LENGTHS = {"Say:": 10, "Tell:": 200}


def train(folder: Path, *flags: str) -> Path:
    data = folder / "requests.jsonl"
    rows = [
        {"instruction": instruction, "user_input": f"number {i}", "output_len": length + i % 5}
        for i in range(40)
        for instruction, length in LENGTHS.items()
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = farsight("train", str(data), "--out", str(folder / "out"), *flags)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "out"


def config(folder: Path, text: str) -> tuple[str, str]:
    path = folder / "farsight.toml"
    path.write_text(text)
    return "--config", str(path)


def sample(base_url: str, name: str) -> float:
    page = httpx.get(f"{base_url}/metrics", timeout=LONG_S).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def shown_learned(server: Server) -> str:
    """What ``farsight status`` has behind its table of components."""
    done = subprocess.run(farsight("status", "--port", str(server.port)), capture_output=True, text=True)
    return done.stdout.partition("learned while serving")[2]


def client_of(server: Server) -> httpx.Client:
    """One for all requests: to make one takes longer than to be answered."""
    return httpx.Client(base_url=server.base_url, timeout=LONG_S)


def complete(client: httpx.Client, prompt: str | list[int], **fields: int) -> None:
    body = {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": 5, **fields}
    assert client.post("/v1/completions", json=body).status_code == 200


def status(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.base_url}/status", timeout=LONG_S).json()
    return found


def learned(server: Server) -> list[dict[str, Any]]:
    """What the service says it has learned, once it says what holds of it: a version is marked a moment after it is
    stored, and a log that answers late tells of nothing."""
    found: list[dict[str, Any]] = []

    def shown() -> bool:
        found[:] = status(server)["learned"]
        return any(version["current"] for version in found)

    wait_until(shown, "nothing that is learned holds, or it is not shown")
    return found


def test_every_request_is_predicted_and_bad_predictions_are_learned_from(tmp_path: Path) -> None:
    settings = config(tmp_path, "[engine]\nbenchmark_mode = true\n[predictor]\nlearn_every_s = 4\n")
    predictor = str(train(tmp_path))
    server = start_server(tmp_path / "log", "--preset", "farsight", "--predictor", predictor, *settings)
    client = client_of(server)
    try:
        for prompt in ("Say:\nnumber 3", "Tell:\nnumber 4", [1, 2, 3]):
            complete(client, prompt)
        for name in ('farsight:forecasts_total{source="forest"}', 'farsight:log_records_total{kind="forecasts"}'):

            def counted(name: str = name) -> bool:
                return sample(server.base_url, name) == 2

            wait_until(counted, "not two: token ids have no text to go by")
        wait_until(
            lambda: sample(server.base_url, "farsight:forecast_version") == 1,
            "another version serves than the one that was trained",
        )
        assert status(server)["learned"] == []

        with ThreadPoolExecutor(16) as threads:  # what was short is long now
            lengths = [70 + i % 40 for i in range(160)]
            requests = [(f"Say:\nnumber {num}", {"max_tokens": 400, "benchmark_len": num}) for num in lengths]
            for done in [threads.submit(complete, client, prompt, **fields) for prompt, fields in requests]:
                done.result()
        wait_until(lambda: sample(server.base_url, "farsight:forecast_version") > 1, "no other version serves")
        versions = learned(server)
        assert [version["current"] for version in versions].count(True) == 1
        kind = versions[0]["kind"]
        assert kind.startswith("length-predictor") and versions[0]["score"] > 0
        wait_until(lambda: kind in shown_learned(server), "people are not told of it")
    finally:
        client.close()
        server.stop()


def test_another_predictor_comes_when_questions_queue(tmp_path: Path) -> None:
    """An encoder takes milliseconds a request, and may here take all the time it wants."""
    predictor = str(train(tmp_path, "--kind", "forest", "--encoder", "minilm"))
    settings = config(tmp_path, "[actors]\nmax_length_predictors = 2\n[predictor]\ncpu_share = 16.0\nlearn = false\n")
    server = start_server(tmp_path / "log", "--predictor", predictor, *settings)

    client, enough = client_of(server), threading.Event()

    def num_predictors() -> int:
        return sum(row["kind"] == "LengthPredictor" for row in status(server)["actors"])

    def ask_on(thread: int) -> None:
        for number in itertools.count():
            if enough.is_set():
                return
            complete(client, f"Tell:\n{thread}.{number}: " + "a long story of many words " * 20, max_tokens=1)

    try:
        assert num_predictors() == 1
        with ThreadPoolExecutor(32) as threads:
            asking = [threads.submit(ask_on, thread) for thread in range(32)]
            try:
                wait_until(lambda: num_predictors() == 2, "there are not two of them")
            finally:
                enough.set()
            for each in asking:
                each.result()
    finally:
        client.close()
        server.stop()


CLASSES = {"Name the colour.": 4, "Tell me of the sea.": 14, "Write down all that you know of trees.": 40}


@pytest.mark.timeout(3600)  # a fit runs in a niced process: a busy machine keeps it waiting
async def test_magnus_batches_by_an_encoder_that_sentence_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three applications with outputs of one length each: every forecast is right, and so are those of the batches.

    The components are real and in this process, which loads that library once.
    """
    monkeypatch.setattr(predictor_client, "ASK_S", LONG_S)  # a busy machine may take its time
    log = tmp_path / "log.sqlite"
    tables = {
        "model": {"name": EMBEDDED_NAME},
        "scheduler": {"preset": "magnus"},
        "engine": {"benchmark_mode": True},
        "log": {"path": str(log)},
        "predictor": {
            "encoder": "sentence-transformers:minilm",
            "learn_every_s": 1.0,
            "cpu_share": 16.0,
            "wait_s": LONG_S,  # every batch has the forecasts of its requests
        },
    }
    asked: list[float] = []

    def rows(query: str, *parameters: float) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{log}?mode=ro", uri=True) as found:
            return found.execute(query, parameters).fetchall()

    async def ask(service: LocalService, num: int) -> None:
        bodies = []
        for _ in range(num):
            instruction, length = list(CLASSES.items())[len(asked) % 3]
            body = {"instruction": instruction, "prompt": f"number {len(asked)}"}
            bodies.append(body | {"max_tokens": 200, "benchmark_len": length})
            asked.append(length)
        generations = [await service.read(CompletionRequest, {"model": EMBEDDED_NAME, **body}) for body in bodies]
        answers = await asyncio.gather(*map(service.collect, generations))
        assert [sum(choice.num_tokens for choice in choices) for choices in answers] == asked[-num:]
        await until(lambda: len(rows(lengths)) == len(asked))

    lengths = "SELECT source, mean, output_len FROM forecasts JOIN finished_requests USING (request_id)"
    newest = f"{lengths} ORDER BY finished_requests.row DESC LIMIT ?"
    async with local_service(make_config(tables)) as service:
        await ask(service, 180)  # it learns from the first hundred, and holds every fifth back
        while {source for source, _, _ in rows(newest, 3)} != {"forest"}:
            await asyncio.sleep(1.0)
            await ask(service, 3)
        [(before,)] = rows("SELECT max(row) FROM finished_batches")
        await ask(service, 60)
        last = rows(newest, 60)
        assert {source for source, _, _ in last} == {"forest"}
        assert max(abs(mean - length) for _, mean, length in last) <= 1
        since = "FROM finished_batches WHERE row > ?"
        await until(lambda: rows(f"SELECT sum(num_requests) {since}", before) == [(60,)])
        batches = rows(f"SELECT predicted_len, generation_len {since}", before)
        assert max(abs(predicted - actual) for predicted, actual in batches) <= 1
