"""What ``farsight status`` prints of processes that were replaced."""

from __future__ import annotations

from typing import Any

import pytest

from services.cli import _print_status


def row(name: str, last_end: str) -> dict[str, Any]:
    """A row of ``/status``."""
    who = {"name": name, "kind": "ModelWorker", "pid": 7, "node": "here", "state": "ready", "queue": 0}
    rest = {"last_step_age_s": None, "restarts": 2, "url": "", "breaker": "", "degraded": ""}
    return {**who, **rest, "last_end": last_end}


def test_why_a_process_was_replaced_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    why = "no answer for 10.0 s, stopped or blocked"
    _print_status([row("worker-0", why), row("worker-1", "")], [])
    lines = [line for line in capsys.readouterr().out.splitlines() if why in line]
    assert len(lines) == 1 and "worker-0" in lines[0] and " 2 " in lines[0]


def test_where_none_was_there_is_no_such_table(capsys: pytest.CaptureFixture[str]) -> None:
    _print_status([row("worker-0", "")], [])
    assert "replaced" not in capsys.readouterr().out


def test_why_a_component_is_degraded_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    _print_status([row("worker-0", "") | {"degraded": "cannot write the log"}, row("worker-1", "")], [])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "cannot write the log" in line and "worker-0" in line]
    assert sum("degraded" in line for line in lines) == 2
