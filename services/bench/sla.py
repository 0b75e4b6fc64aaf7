"""Service level: the latency bounds of a good request."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core.errors import InvalidValueError
from services.bench.answers import Answer

_SECONDS: Mapping[str, Callable[[Answer], float | None]] = {
    "ttft": lambda answer: answer.ttft_s,
    "tpot": lambda answer: answer.tpot_s,
    "mtpot": lambda answer: answer.mtpot_s,
    "jct": lambda answer: answer.jct_s,
}
_EXPECTED = f"bounds in ms as ttft=500,tpot=50 (of {', '.join(_SECONDS)}), or with a unit as ttft=0.5s"

Sla = dict[str, float]
"""Upper bounds in milliseconds by name."""


def parse_sla(text: str) -> Sla:
    """Reads ``ttft=500,tpot=50``: milliseconds, unless ``s`` or ``ms`` follows.

    Raises:
        InvalidValueError: The text has another form.
    """
    sla: Sla = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        bound_ms = _milliseconds(value)
        if name not in _SECONDS or name in sla or bound_ms is None:
            raise InvalidValueError("--sla", text, _EXPECTED)
        sla[name] = bound_ms
    return sla


def _milliseconds(value: str) -> float | None:
    factor = 1.0 if value.endswith("ms") else 1000.0 if value.endswith("s") else 1.0
    try:
        bound_ms = float(value.removesuffix("s").removesuffix("m")) * factor
    except ValueError:
        return None
    return bound_ms if 0 < bound_ms < float("inf") else None


def meets(answer: Answer, sla: Sla) -> bool:
    """Whether an answer is complete and within every bound. A missing value (TPOT of one token) counts as within."""
    if answer.failure is not None:
        return False
    return all((_SECONDS[name](answer) or 0.0) * 1000 <= bound_ms for name, bound_ms in sla.items())
