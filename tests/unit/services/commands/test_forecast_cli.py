"""``farsight train`` and ``farsight evaluate`` as a user at a terminal meets them, on small files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from farsight.actors.learning.serving_time_estimator import BatchTimeLearner
from farsight.actors.runtime.component import ComponentContext
from farsight.actors.runtime.peer import Site
from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.errors import ConfigError
from farsight.core.messages.log import FinishedBatch, LogRecords
from farsight.core.messages.step_times import BatchShape
from farsight.estimator.knn import MIN_BATCHES
from farsight.predictor.artefact import FILE_NAME
from farsight.services.cli import app
from farsight.services.commands.forecast_data import EMBEDDED_TOKENIZER, TokenCounter, read_examples
from tests.command_line import CliRunner, Result
from tests.unit.actors.components import opened


def rows(num: int = 80, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    found = []
    for number in range(num):
        text = " ".join(rng.choice(["rain", "sun", "wind", "snow"], rng.integers(2, 30)))
        task, instruction, output = (
            ("twice", "Say it twice.", f"{text} {text}") if number % 2 else ("once", "Say it.", text)
        )
        found.append({"task": task, "instruction": instruction, "user_input": text, "output": output})
    return found


def write(path: Path, lines: list[dict[str, Any] | str]) -> Path:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, "utf-8")
    return path


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in words], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    result = invoke("train", write(path / "seen.jsonl", [*rows()]), "--out", path, "--trees", 20)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{path / FILE_NAME}: version 1, trained on 80 requests\n"
    assert result.stderr == ""
    return path


def test_evaluate_prints_json(trained: Path, tmp_path: Path) -> None:
    result = invoke("evaluate", trained, write(tmp_path / "new.jsonl.gz", [*rows(60, seed=1)]), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {"n", "rmse", "mae", "tau", "pinball", "coverage", "tasks"}
    assert set(found["coverage"]) == {"0.1", "0.5", "0.9"}
    assert found["n"] == 60 and found["tau"] > 0.8
    assert {name: each["n"] for name, each in found["tasks"].items()} == {"once": 30, "twice": 30}
    assert set(found["tasks"]["once"]) == set(found) - {"tasks"}


def test_evaluate_prints_a_table_and_draws(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = write(tmp_path / "new.jsonl", [*rows(40, seed=1)])
    result = invoke("evaluate", trained, data, "--plot", tmp_path / "f.png")
    assert result.exit_code == 0, result.output
    assert all(word in result.stdout for word in ("RMSE", "pinball", "0.9 covers", "once", "twice", "all"))
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "f.svg", tmp_path / "nowhere" / "f.png"):
        result = invoke("evaluate", trained, data, "--plot", path)
        assert result.exit_code == 1 and "--plot" in result.stderr


def test_the_real_encoder(tmp_path: Path) -> None:
    data = write(tmp_path / "seen.jsonl", [*rows(40)])
    flags = ["--kind", "magnus", "--encoder", "minilm", "--trees", 5]
    result = invoke("train", data, "--out", tmp_path, *flags)
    assert result.exit_code == 0, result.output
    result = invoke("evaluate", tmp_path, data, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tau"] > 0.8
    result = invoke("train", data, "--out", tmp_path, *flags, "--d-user", 7)
    assert result.exit_code == 1
    error = "farsight: --d-user: got 7, expected 0 or a divisor of the embedding's 384 dimensions"
    assert result.stderr.splitlines() == ["encoder: minilm, 384 dimensions", error]


def test_training_again_counts_on(tmp_path: Path) -> None:
    data = write(tmp_path / "seen.jsonl", [*rows(30)])
    for version in (1, 2):
        result = invoke("train", data, "--out", tmp_path, "--trees", 2)
        assert f"version {version}," in result.stdout
    (tmp_path / FILE_NAME).write_bytes(b"something else")
    result = invoke("train", data, "--out", tmp_path, "--trees", 2)
    assert result.exit_code == 1 and "no forecast artefact" in result.stderr
    assert (tmp_path / FILE_NAME).read_bytes() == b"something else"


BAD_ROWS: list[tuple[dict[str, Any] | str, str]] = [
    ("{not json", "not JSON"),
    ("[1]", "not a JSON object"),
    ({"instruction": None}, "instruction: missing"),
    ({"user_input": 3}, "user_input: not a string"),
    ({"output_len": None}, "output and output_len: both missing"),
    ({"output_len": -1}, "output_len: not a number of tokens"),
    ({"output_len": True}, "output_len: not a number of tokens"),
    ({"task": 3}, "task: not a string"),
    ({"censored": "no"}, "censored: neither true nor false"),
    ({"user_input": "\ud800"}, "user_input: half a surrogate pair"),
    ({"image_tokens": 0}, "image_tokens: not a number"),
    ({"image_tokens": [1, "2"]}, "image_tokens: not a number"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS)
def test_a_bad_row_is_named_and_skipped(tmp_path: Path, bad: dict[str, Any] | str, reason: str) -> None:
    if isinstance(bad, dict):  # None: it lacks the field
        fields = {"instruction": "x", "user_input": "x", "output_len": 1, **bad}
        bad = {name: value for name, value in fields.items() if value is not None}
    data = write(tmp_path / "d.jsonl", [*rows(2), bad, "", *rows(2, seed=1)])
    found = read_examples(data, TokenCounter(EMBEDDED_TOKENIZER))
    assert [each.question.request_id for each in found.examples] == ["1", "2", "5", "6"]
    assert len(found.rejected) == 1
    assert found.rejected[0].startswith(f"{data}, line 3: {reason}")


def test_rows_may_have_pictures(tmp_path: Path) -> None:
    text = {"instruction": "x", "user_input": "x", "output_len": 1}
    data = write(tmp_path / "d.jsonl", [{**text, "image_tokens": [576, 20]}, {**text, "image_tokens": 7}, text])
    questions = [each.question for each in read_examples(data, TokenCounter(EMBEDDED_TOKENIZER)).examples]
    assert [each.image_tokens for each in questions] == [(576, 20), (7,), ()]
    assert [each.prompt_len - questions[2].prompt_len for each in questions] == [596, 7, 0]
    assert {each.rest_len for each in questions} == {questions[2].rest_len}


def test_bad_rows_at_the_terminal(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [*rows(30), *["{"] * 12])
    result = invoke("train", data, "--out", tmp_path / "o", "--trees", 2)
    assert result.exit_code == 0, result.output
    assert "skipped: " in result.stderr and "line 31: not JSON" in result.stderr
    assert "skipped: 2 more rows" in result.stderr
    result = invoke("train", data, "--out", tmp_path / "p", "--trees", 2, "--strict")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"farsight: {data}, line 31: not JSON")
    assert not (tmp_path / "p" / FILE_NAME).exists()


def test_lengths_are_tokens_of_the_tokenizer_or_as_given(tmp_path: Path) -> None:
    given = {"instruction": "Say it.", "user_input": "", "output_len": 77, "app": "A", "censored": True}
    found = read_examples(write(tmp_path / "d.jsonl", [*rows(1), given]), TokenCounter(EMBEDDED_TOKENIZER))
    text, number = found.examples
    assert 0 < text.output_len == text.question.user_input_len
    assert text.question.prompt_len > text.question.user_input_len
    assert (number.output_len, number.censored, number.question.user_input_len) == (77, True, 0)
    assert found.tasks == ["once", "A"]


def test_outputs_that_were_cut_off_do_not_count(trained: Path, tmp_path: Path) -> None:
    cut_off = {**rows(1)[0], "output": "x", "censored": True}
    data = write(tmp_path / "d.jsonl", [*rows(30), cut_off])
    result = invoke("train", data, "--out", tmp_path, "--trees", 2)
    assert "trained on 30 requests, 1 left out that were cut off" in result.stdout
    assert json.loads(invoke("evaluate", trained, data, "--json").stdout)["n"] == 30
    result = invoke("evaluate", trained, write(tmp_path / "none.jsonl", [cut_off]))
    assert result.exit_code == 1 and "not cut off" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kind", "oracle"], "--kind: got 'oracle', expected one of words, forest, magnus, linear"),
        (["--encoder", "minilm"], "--encoder: got 'minilm', expected none with --kind words"),
        (["--trees", "0"], "--trees"),
        (["--kind", "forest", "--encoder", "/no/where"], "`minilm`, which needs no network"),
        (["--tokenizer", "/no/where"], "--tokenizer: got '/no/where'"),
    ],
)
def test_wrong_options(tmp_path: Path, words: list[str], message: str) -> None:
    result = invoke("train", write(tmp_path / "d.jsonl", [*rows(30)]), "--out", tmp_path / "o", *words)
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_files_that_are_not_there_or_not_it(trained: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(b"x" * 1000)[:-10])
    for data in (tmp_path / "none.jsonl", tmp_path, broken, write(tmp_path / "empty.jsonl", [])):
        for command in (("train", data, "--out", tmp_path / "o"), ("evaluate", trained, data)):
            result = invoke(*command)
            assert result.exit_code == 1
            assert result.stderr.startswith("farsight: DATA: got ") and result.stderr.count("\n") == 1
    result = invoke("evaluate", tmp_path, write(tmp_path / "d.jsonl", [*rows(2)]))
    assert result.exit_code == 1 and "farsight train" in result.stderr
    few = write(tmp_path / "few.jsonl", [*rows(5)])
    assert "at least 20" in invoke("train", few, "--out", tmp_path / "o").stderr


def test_lengths_are_counted_whole(tmp_path: Path) -> None:
    """A truncation in the tokenizer's file does not shorten what it counts."""
    own = EMBEDDED_TOKENIZER / "tokenizer.json" if EMBEDDED_TOKENIZER.is_dir() else EMBEDDED_TOKENIZER
    settings = json.loads(own.read_text("utf-8"))
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), "utf-8")
    text = "say it twice"
    assert TokenCounter(tmp_path).count([text]) == TokenCounter(EMBEDDED_TOKENIZER).count([text]) != [2]


def learner(directory: Path) -> BatchTimeLearner:
    config = FarsightConfig(scheduler=SchedulerConfig(preset="magnus"), batch=BatchConfig(artefact=str(directory)))
    site = Site(config, "", "fused")
    return BatchTimeLearner(ComponentContext("serving-time-estimator-0", site, 0, site.peers(), CollectorRegistry()))


async def a_log(path: Path, num: int) -> None:
    async with opened(path=str(path)) as log:
        batches = [FinishedBatch(f"b{i}", "0", 4, 100, 10 + i, 10, 1.0, 10.0 + i, float(i)) for i in range(num)]
        await log.append(LogRecords(batches=tuple(batches)))


async def test_the_batches_of_a_log_are_known_from_the_start(tmp_path: Path) -> None:
    await a_log(tmp_path / "log.db", MIN_BATCHES)
    out = tmp_path / "times"
    result = CliRunner().invoke(app, ["train", str(tmp_path / "log.db"), "--estimator", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"learned from {MIN_BATCHES} batches" in result.output
    assert learner(out).estimates_s([BatchShape(4, 100, 60)]) == [pytest.approx(60.0)]


async def test_what_is_no_log_with_batches_is_named(tmp_path: Path) -> None:
    await a_log(tmp_path / "log.db", 0)
    (tmp_path / "text").write_text("no log")
    for name, part in (("log.db", "has no batches"), ("text", "a log of Farsight"), ("none", "no such file")):
        result = CliRunner().invoke(app, ["train", str(tmp_path / name), "--estimator", "--out", str(tmp_path)])
        assert result.exit_code == 1 and "DATA" in result.output and part in result.output, result.output


def test_a_directory_without_the_file_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch\.artefact.*train --estimator"):
        learner(tmp_path)
    (tmp_path / "batch-times.npz").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"batch\.artefact.*an artefact of batch times"):
        learner(tmp_path)
