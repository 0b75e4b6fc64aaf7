"""From ``farsight train`` to a server that foresees the lengths of its answers."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import httpx

from services.launch import EMBEDDED_NAME
from tests.e2e.server import farsight, start_server


def train(folder: Path) -> Path:
    data = folder / "requests.jsonl"
    rows = [
        {"instruction": instruction, "user_input": f"number {i}", "output_len": length + i % 5}
        for i in range(40)
        for instruction, length in (("Say:", 10), ("Tell:", 200))
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(farsight("train", str(data), "--out", str(folder / "out")), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "out"


def sample(base_url: str, name: str) -> float:
    page = httpx.get(f"{base_url}/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def test_every_request_is_foreseen_and_the_forecast_is_logged(tmp_path: Path) -> None:
    server = start_server(tmp_path / "log", "--preset", "farsight", "--predictor", str(train(tmp_path)))
    try:
        for prompt in ("Say:\nnumber 3", "Tell:\nnumber 4", [1, 2, 3]):
            body = {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": 5}
            assert httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60).status_code == 200
        for name in ('farsight:forecasts_total{source="forest"}', 'farsight:log_records_total{kind="forecasts"}'):
            until = time.monotonic() + 30
            while sample(server.base_url, name) < 2 and time.monotonic() < until:
                time.sleep(0.1)
            assert sample(server.base_url, name) == 2, "token ids have no text to go by"
        assert sample(server.base_url, "farsight:forecast_version") == 1
    finally:
        server.stop()


def test_what_is_no_artefact_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(farsight("serve", "--predictor", str(tmp_path)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "predictor.artefact" in done.stderr and "farsight train" in done.stderr
