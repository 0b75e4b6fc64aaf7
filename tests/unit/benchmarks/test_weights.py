"""The measurements of weights in 8 and 4 bits run, and tell formats apart."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernel_rates, weights_quality
from tests.unit.engine.small_models import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), num_key_value_heads=2, max_position_embeddings=256)


def printed(options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of the tables that the command prints."""
    monkeypatch.setattr(sys, "argv", ["rates", *options])
    kernel_rates.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_speed_of_steps(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(model), "--rows", "1", "3", "--prefill", "256", "--rounds", "2"]
    head, *rows = printed(options, monkeypatch, capsys)
    assert head[1:] == ["decode 1", "decode 3", "prefill 256"]
    assert [row[0] for row in rows] == ["full", "float", "int8", "int4"]
    assert " ".join(rows[0]).count("(1.00)") == 3


def test_rates_of_products(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Formats that rows of 64 inputs cannot have are left out."""
    options = ["--shape", "tiny", "--rows", "1", "--prefill", "300", "--rounds", "1", "--layers", "1"]
    flops, *rows = printed([*options, "--threads", "1", "--read-bytes", "100000000"], monkeypatch, capsys)
    assert flops[1:] == ["decode 1", "prefill 300"]
    names = ["Q4_0", "Q4_1", "Q8_0", "int8", "float32", "bf16"]
    assert [row[0] for row in rows] == [*names, "tiny, gbytes/s (of the machine's read)", *names]
    assert all(float(cell.split()[0]) > 0 for row in rows if row[0] in names for cell in row[1:])


def test_how_far_distributions_are(model: Path) -> None:
    rows = [list(range(3, 40)), list(range(5, 20))]
    found = {kind: weights_quality.logits_of(model, "float32", kind, rows) for kind in ("full", "int8", "int4")}
    assert [len(each) for each in found["full"]] == [36, 14]
    results = {kind: weights_quality.compared(rows, logits, found["full"]) for kind, logits in found.items()}
    divergences = [float(results[kind]["divergence (nats)"]) for kind in ("full", "int8", "int4")]
    assert divergences == sorted(divergences)
    assert divergences[0] == 0 < divergences[2]
    expected = math.exp(
        sum(
            torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum").item()
            for row, logits in zip(rows, found["full"], strict=True)
        )
        / 50
    )
    assert float(results["full"]["perplexity of text"]) == pytest.approx(expected, rel=1e-4)


def test_the_embedded_model_answers_right() -> None:
    """Four inputs of two tasks; of 2,200 all are right with 8 bits and 2,198 with 4."""
    for weights in ("int8", "int4"):
        examples = [
            each for task in weights_quality.TASKS[:2] for each in weights_quality.held_out_examples(task, 2, 3)
        ]
        prompts, answers = weights_quality.prompts_and_answers(examples)
        assert weights_quality.exact_matches("bfloat16", weights, prompts, answers) == 4
