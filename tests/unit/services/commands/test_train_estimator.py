"""``farsight train --estimator``: from a log's batches to a file that an estimator begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from actors.learning.batch_time_learner import BatchTimeLearner
from actors.runtime.component import ComponentContext
from actors.runtime.peer import Site
from core.config.load import FarsightConfig
from core.config.scheduling import BatchConfig, SchedulerConfig
from core.errors import ConfigError
from core.messages.log import FinishedBatch, FinishedBatches
from core.messages.step_times import BatchShape
from estimator.knn import MIN_BATCHES
from services.cli import app
from tests.command_line import CliRunner
from tests.unit.actors.components import opened


def learner(directory: Path) -> BatchTimeLearner:
    config = FarsightConfig(scheduler=SchedulerConfig(preset="magnus"), batch=BatchConfig(artefact=str(directory)))
    site = Site(config, "", "fused")
    return BatchTimeLearner(ComponentContext("serving-time-estimator-0", site, 0, site.peers(), CollectorRegistry()))


async def a_log(path: Path, num: int) -> None:
    async with opened(path=str(path)) as log:
        batches = [FinishedBatch(f"b{i}", "0", 4, 100, 10 + i, 10, 1.0, 10.0 + i, float(i)) for i in range(num)]
        await log.append_batches(FinishedBatches(tuple(batches)))


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
