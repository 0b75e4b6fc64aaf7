"""``farsight profile`` on the embedded model with a tiny grid, as a user at a terminal meets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farsight.core.messages.step_times import StepSample
from farsight.estimator.profile_file import ProfiledMachine, parse_profile
from farsight.estimator.step_profile import StepShape
from farsight.services.cli import app
from farsight.services.commands.step_bench import MeasuredStep, fit, is_held_back
from tests.command_line import CliRunner, Result

TINY = ("--max-num-seqs", "4", "--max-model-len", "64", "--rounds", "3", "--threads", "1")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("profile") / "here.json"
    return out, invoke("profile", "--out", str(out), *TINY)


def test_it_measures_prints_and_stores(profiled: tuple[Path, Result]) -> None:
    out, result = profiled
    assert result.exit_code == 0, result.output
    assert all(word in result.stdout for word in ("prefill_token", "decode", "mixed", "error p50"))
    assert f"written: {out}" in result.stderr
    found = parse_profile(out.read_text(), "x")
    assert 0 < found.base_s < 0.1 and found.prefill_token_s > 0
    assert found.machine is not None and found.machine.model == "embedded_model" and found.machine.num_threads == 1
    assert found.range is not None and found.range.decode_seqs == 4 and found.range.prefill_tokens == 4 * 64
    assert found.error is not None and found.error.num_steps > 10 and found.error.p90 >= found.error.median > 0
    assert found.kv_bytes == 2 * 4 * 2 * 32 * (2 if found.machine.dtype == "bfloat16" else 4)


def test_the_simulator_takes_it(profiled: tuple[Path, Result]) -> None:
    out, _ = profiled
    result = invoke("simulate", "--profile", str(out), "--requests", "20", "--json")
    assert result.exit_code == 0, result.output
    found = parse_profile(out.read_text(), "x")
    latency = json.loads(result.stdout)["config"]["latency"]
    assert latency["cost"]["prefill_pair_s"] == pytest.approx(found.prefill_pair_s)
    assert latency["kv_bytes"] == found.kv_bytes


def test_json_is_what_the_file_holds(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    words = ("--max-num-seqs", "1", "--max-model-len", "16", "--rounds", "9", "--threads", "1")
    result = invoke("profile", "--out", str(out), *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout == out.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "2"], "--rounds: got 2, expected an integer >= 3"),
        (["--max-num-seqs", "1", "--max-model-len", "16"], "--rounds: got 6, expected an integer >= 8 with so few"),
        (["--max-num-seqs", "0"], "--max-num-seqs: got 0, expected an integer >= 1"),
        (["--max-model-len", "4"], "--max-model-len: got 4, expected an integer >= 8"),
        (["--dtype", "int3"], "--dtype: got 'int3'"),
        (["--model", "/nowhere/at/all"], "--model"),
        (["--out", "/nowhere/p.json"], "--out: got '/nowhere/p.json', expected a file in an existing directory"),
        (["--out", "/tmp"], "--out: got '/tmp', expected a file in an existing directory"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    result = invoke("profile", "--out", str(tmp_path / "p.json"), *words)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith(f"farsight: {message}") and result.stderr.count("\n") == 1
    assert not (tmp_path / "p.json").exists()


def test_errors_are_of_rounds_that_nothing_was_fitted_to() -> None:
    """Steps take 1 ms but in the rounds held back, where they take 2 ms: the fit is blind to that, the error is not."""
    steps = [
        MeasuredStep("decode", number, StepSample(0, seqs, 10 * seqs, 1e-3), 1e-3)
        for number in range(6)
        for seqs in range(1, 20)
    ]
    changed = [
        replace(step, sample=replace(step.sample, duration_s=2e-3)) if is_held_back(step) else step for step in steps
    ]
    machine = ProfiledMachine("m", "float32", "", 1, 1, 1.0)
    one, two = fit(steps, machine, 1), fit(changed, machine, 1)
    assert one.cost == two.cost
    assert one.error is not None and one.error.median == pytest.approx(0, abs=1e-6)
    assert two.error is not None and two.error.median == pytest.approx(0.5) and two.error.num_steps == 2 * 19


def test_a_step_holds_what_its_shape_says() -> None:
    shape = StepShape(chunks=((10, 4),), contexts=(7, 20))
    assert shape.ends == [14, 8, 21]


def test_a_fit_without_a_base_can_be_read() -> None:
    steps = [MeasuredStep("decode", i % 3, StepSample(0, i, 10 * i, 1e-3 * i), 0.0) for i in range(1, 100)]
    found = fit(steps, ProfiledMachine("m", "float32", "", 1, 1, 1.0), 1)
    assert 0 < found.base_s < 1e-6
    assert parse_profile(found.to_json(), "x") == found
