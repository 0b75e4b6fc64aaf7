"""Sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from core.errors import InvalidValueError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_memory(text: str) -> int:
    """Returns the bytes in ``"512MiB"``, ``"1.5GB"`` or a plain number; rounded down.

    Raises:
        InvalidValueError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, flags=re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or Fraction(match[1]) == 0:
        raise InvalidValueError("memory", text, "a size above 0 such as 512MiB, 2GiB, 1.5GB or a number of bytes")
    return int(Fraction(match[1]) * unit)
