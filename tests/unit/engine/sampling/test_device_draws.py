"""The kernel that draws tokens: all of its tests in Triton's interpreter; the small one runs by day elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.engine.models.test_fused import interpret


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_draws_in_the_interpreter() -> None:
    interpret(Path(__file__).parent / "interpreted_draws.py")
