"""The measurements for a GPU run on any device, and their table says what was missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_check, gpu_engine
from benchmarks.gpu_check import Outcomes, speed_rows, table


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
    ]
    assert "TFLOP/s" in gpu_engine.tables(json.loads(told[0])) and "| sequences" in gpu_engine.tables(record)
    assert len(told) == 2 + 4


def test_what_another_process_has_written_down_counts_whatever_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = [{"sequences": n, "tokens/s": 1.0, "share of limit %": 70.0} for n in (64, 256)]
    prefill = [{"tokens": 5, "tokens/s": 1.0, "share of matmul %": share} for share in (50.0, 49.9)]

    def run(command: list[str]) -> SimpleNamespace:
        Path(command[-1]).write_text(json.dumps({"decode": decode, "prefill": prefill, "swap": []}), "utf-8")
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    rows = gpu_check.measure_speeds(compiled=False, path=tmp_path / "kept.json")
    assert [row[1] for row in rows] == ["ok", "measured", "ok", "off", "failed"]
    assert rows[-1] == ("speeds", "failed", "exit status 3")


def run_here(module: Path, outcomes: Outcomes) -> None:
    alone = ["-c", "/dev/null", f"--rootdir={module.parent}", "-o", "asyncio_default_fixture_loop_scope=function"]
    pytest.main(["-q", "-p", "no:cacheprovider", *alone, str(module)], [outcomes])


def test_a_lost_gpu_ends_the_tests(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What went wrong is shown at once, not at the end."""
    monkeypatch.setattr(gpu_check, "device_problem", lambda: None)
    lost = iter([False, True])
    monkeypatch.setattr(gpu_check, "is_lost", lambda: next(lost))
    module = tmp_path / "test_three.py"
    module.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "@pytest.mark.skip(reason='no time')\ndef test_left(): pass\n"
        "def test_one(): assert 'first' == 0\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_two(broken): pass\n"
        "def test_three(): pass\n"
    )
    outcomes = Outcomes()
    run_here(module, outcomes)
    ends = [("good", "passed"), ("left", "skipped"), ("one", "failed"), ("two", "failed")]
    assert [row[:2] for row in outcomes.rows] == ends and outcomes.rows[1][2].endswith("no time")
    shown = capsys.readouterr().out
    assert shown.index("one | failed") < shown.index("assert 'first' == 0") < shown.index("two | failed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_claimed() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "" and "nothing was checked" in done.stderr
