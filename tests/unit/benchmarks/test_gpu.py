"""The measurements for a GPU run on any device, and their table says what was missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, gpu_engine
from benchmarks.gpu_check import Check, Ladder, Outcome, speed_rows, table


def test_every_speed_is_measured() -> None:
    torch.set_num_threads(1)
    record = gpu_engine.run("cpu", "tiny")
    assert [each["sequences"] for each in record["decode"]] == [1, 4]
    for name in ("decode", "prefill"):
        assert all(value > 0 for each in record[name] for value in each.values())
    shown = gpu_engine.tables(record)
    assert "| sequences | step ms |" in shown and "| MiB | offload GB/s |" in shown.replace("  ", " ")
    rows = speed_rows(record)
    shares = [each["share of limit %"] for each in record["decode"]] + [
        each["share of matmul %"] for each in record["prefill"]
    ]
    wanted = [gpu_check.DECODE_SHARE] * len(record["decode"]) + [gpu_check.PREFILL_SHARE] * len(record["prefill"])
    verdicts = ["ok" if share >= least else "off" for share, least in zip(shares, wanted, strict=True)]
    assert [row[1] for row in rows[: len(shares)]] == verdicts
    assert "decode, 4 sequences" in table(rows)


@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_host_beside_a_gpu_is_measured_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from benchmarks import gpu_host

    record = gpu_host.run(4)
    assert list(record["cases"]) == [case.name for case in gpu_host.CASES]
    assert all(ms["launch"] > 0 and ms["all"] >= ms["launch"] for ms in record["cases"].values())
    assert record["kernels compiled at start"] > 0 == record["kernels compiled while serving"]


def test_what_was_measured_before_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: object, limits: object) -> dict[str, float]:
        raise RuntimeError("no link")

    monkeypatch.setattr(gpu_engine.EngineBench, "swap", fail)
    told: list[str] = []
    with pytest.raises(RuntimeError, match="no link"):
        gpu_engine.run("cpu", "tiny", tell=lambda record: told.append(json.dumps(record)))
    record = json.loads(told[-1])
    assert [row[0] for row in speed_rows(record)] == [
        "decode, 1 sequences",
        "decode, 4 sequences",
        "prefill, 64 tokens",
        "prefill, 256 tokens",
        *(each["step"] for each in record["steps"]),
    ]
    assert "TFLOP/s" in gpu_engine.tables(json.loads(told[0])) and "| sequences" in gpu_engine.tables(record)
    assert len(told) == 2 + 4 + 5


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_no_check_stops_another() -> None:
    """Some run at once, those that want to be alone behind them, and what takes too long is ended."""
    kept: dict[str, Outcome] = {}
    checks = [
        Check("alone", command("print('2 skipped')"), alone=True),
        Check("fails", command("raise SystemExit('first')")),
        Check("passes", command("print('1 passed, 1 skipped')")),
    ]

    def run(checks: list[Check], budget_s: float, limit_s: float) -> dict[str, str]:
        Ladder(budget_s, limit_s, 3, lambda check, outcome: kept.__setitem__(check.name, outcome)).run(checks)
        return {name: each.result for name, each in kept.items()}

    assert run(checks, 200, 200) == {"fails": "failed", "passes": "ok", "alone": "skipped"}
    assert list(kept)[-1] == "alone" and "first" in kept["fails"].tail
    kept.clear()
    assert run([Check("lasts", command("import time; time.sleep(600)"))], 200, 0.1) == {"lasts": "cut off"}
    kept.clear()
    assert set(run(checks, 0, 200).values()) == {"no time"}


@pytest.mark.timeout(1800)
def test_the_ladder_without_a_gpu(tmp_path: Path) -> None:
    """All of it but most of the tests, which would be skipped; the record is that of the last check."""
    record = tmp_path / "all.json"
    program = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--jobs", "2", "-k", "draws"]
    program += ["--budget", "1700", "--limit", "1700"]
    done = subprocess.run([*program, "--json", str(record)], capture_output=True, text=True)
    found = json.loads(record.read_text("utf-8"))
    results = {name: each["result"] for name, each in found["checks"].items()}
    assert done.returncode == 0, done.stdout + done.stderr
    assert results.pop("test_the_sampler_draws_what_it_draws_on_the_cpu") == "skipped"
    assert set(results) == {*(f"import {name}" for name in gpu_check.IMPORTS), "gpu_engine", "gpu_offline"}
    assert set(results.values()) == {"ok"}
    assert found["speeds"]["gpu_offline"]["compiles"] == 0
    assert "decode, 4 sequences" in done.stdout and "offline run" in done.stdout


def test_what_is_missing_takes_only_what_needs_it() -> None:
    """The path of a GPU, its tests and its measurements are imported where only torch and Triton are."""
    missing = ("xformers", "llguidance", "ray", "gguf", "fastapi", "pydantic", "quantile_forest", "aiosqlite")
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in missing)
    wanted = ("devices.model_device", "attention.triton_attention", "attention.choice", "models.fused")
    modules = [*(f"farsight.engine.{name}" for name in wanted), "benchmarks.gpu_check", "tests.gpu.test_gpu"]
    code = f"import sys; {blocked}; import benchmarks.gpu_engine, {', '.join(modules)}"
    done = subprocess.run(command(code), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_claimed() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "" and "nothing was checked" in done.stderr
