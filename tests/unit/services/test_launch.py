"""What a server is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import FarsightConfig, LogConfig
from services.launch import ServedModel, find_site


@pytest.mark.parametrize("path", ["", "redis://user:secret@127.0.0.1:6379/2", "rediss://host", "/var/log.sqlite"])
def test_a_log_elsewhere_is_left_as_configured(path: str) -> None:
    site = find_site(FarsightConfig(log=LogConfig(path, 7, 3)), ServedModel(Path("/model"), "tiny"))
    assert site.config.log == LogConfig(path, 7, 3)


def test_a_log_file_is_the_same_for_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    site = find_site(FarsightConfig(log=LogConfig("log.sqlite")), ServedModel(Path("/model"), "tiny"))
    assert site.config.log.path == str(tmp_path / "log.sqlite")
