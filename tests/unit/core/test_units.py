"""Sizes as people write them."""

from __future__ import annotations

import pytest

from core.errors import InvalidValueError
from core.units import parse_memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1024", 1024), ("512MiB", 2**29), ("2 GiB", 2**31), ("1.5GB", 1_500_000_000), ("0.5kib", 512), ("7B", 7)],
)
def test_parse_memory(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0.0GB", "1.5.2GB", "1e9", "1GiBB", "nan"])
def test_parse_memory_refuses(text: str) -> None:
    with pytest.raises(InvalidValueError, match="memory"):
        parse_memory(text)
