"""Objects of requests: types are strict, fields that would change the answer and are not supported are refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from services.api.fields import NeutralOnly, is_empty, refused, shown


def strip_neutral(data: Any, known: Iterable[str], neutral: Mapping[str, NeutralOnly]) -> Any:
    """Drops unsupported fields that hold a neutral value, and unknown ones that say nothing.

    Raises:
        PydanticCustomError: An unsupported field holds another value, or a field is unknown.
    """
    if not isinstance(data, dict):
        return data
    fields = set(known)
    kept = {}
    for name, value in data.items():
        if name in fields:
            kept[name] = value
        elif name not in neutral:
            if is_empty(value):
                continue
            raise _unknown_field(name, fields)
        elif not neutral[name].accepts(value):
            raise refused(f".{name}", value, neutral[name].expected)
    return kept


def _unknown_field(name: str, fields: set[str]) -> PydanticCustomError:
    name = shown(name)
    close = difflib.get_close_matches(name, sorted(fields))
    # Prefer the match with the same beginning: max_completion_tokens means max_tokens rather than min_tokens.
    nearest = max(close, key=lambda each: _common_start(each, name), default=None)
    hint = f"did you mean {nearest!r}?" if nearest else f"the fields are {', '.join(sorted(fields))}"
    return PydanticCustomError("unknown_field", "unknown field; {hint}", {"suffix": f".{name}", "hint": hint})


def _common_start(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class StrictModel(BaseModel):
    """Base class of all objects in a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {}

    @model_validator(mode="before")
    @classmethod
    def _strip_neutral(cls, data: Any) -> Any:
        names = [field.alias or name for name, field in cls.model_fields.items()]
        return strip_neutral(data, names, cls.neutral)
