"""``farsight advise`` from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from services.cli import app
from tests.command_line import CliRunner, Result


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["advise", *words], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty requests, two a second."""
    path = tmp_path / "trace.jsonl"
    lines = [{"arrived_at": index / 2, "prompt_len": 50, "output_len": 20 + index % 7} for index in range(60)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_table_advice_and_picture(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "advice.png"
    result = invoke(
        str(trace), "--presets", "fcfs,farsight", "--max-replicas", "2", "--requests", "20", "--plot", str(picture)
    )
    assert result.exit_code == 0, result.output
    assert "2 replicas: good %" in result.stdout
    assert "Advised: farsight serve --preset fcfs --replicas 1" in result.stdout
    assert "Uncertain: 3 windows of 20 requests" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_keys_are_a_contract(trace: Path) -> None:
    result = invoke(str(trace), "--presets", "fcfs", "--max-replicas", "1", "--requests", "30", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert sorted(record) == sorted(
        ["good", "holds", "not_told_apart", "options", "reason", "recommended", "source", "uncertain", "windows"]
    )
    assert record["recommended"] == {"preset": "fcfs", "replicas": 1}
    assert record["windows"] == 2
    (option,) = record["options"]
    assert math.isclose(option["goodput_share"]["mean"], 1.0)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("no-such-trace",), "--trace"),
        (("zipf", "--presets", "fcfs,fcfs"), "--presets: got 'fcfs,fcfs', expected names as fcfs,fastserve, each once"),
        (("zipf", "--presets", "nothing"), "--presets: got 'nothing'"),
        (("zipf", "--good", "0"), "--good: got 0.0, expected a share above 0, at most 1"),
        (("zipf", "--plot", "advice.pdf"), "--plot: got 'advice.pdf', expected a file that ends in .png or .svg"),
    ],
)
def test_wrong_arguments_are_named(words: tuple[str, ...], error: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 1
    assert error in result.output
