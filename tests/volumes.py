"""Tests at two volumes: a part of the examples by day, all of them by night."""

from __future__ import annotations

import pytest


def at_volume(by_day: int, by_night: int) -> pytest.MarkDecorator:
    """Gives a test its ``volume``: how many examples, seeds or rounds it takes."""
    return pytest.mark.parametrize("volume", [by_day, pytest.param(by_night, marks=pytest.mark.nightly)])
