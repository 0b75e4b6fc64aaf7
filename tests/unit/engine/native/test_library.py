"""The compiled step is built once on a machine, and what builds it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.native import library


def test_a_process_that_builds_the_step_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def build(compiler: str, path: Path) -> None:
        told.append(library.is_compiling())
        raise library.NativeUnavailable("no room")

    monkeypatch.setenv("FARSIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "_build", build)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/true")
    with pytest.raises(library.NativeUnavailable, match="no room"):
        library.load_library.__wrapped__()
    assert told == [True] and not library.is_compiling()
