"""Reads the fields of a ``config.json``: applies defaults, and refuses unusable values by the field's name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from farsight.core.errors import InvalidValueError
from farsight.tokenization.model_dir import model_file, read_json_file

Shape = tuple[int, ...]

MAX_SIZE = 1 << 31
"""Largest size of anything in a configuration."""


class UnsupportedModelError(InvalidValueError):
    """A checkpoint that the engine cannot run; names the field of its configuration that is the reason."""


class CheckpointError(InvalidValueError):
    """A checkpoint whose files or tensors are not those of its configuration."""


class Fields:
    """The fields of one object.

    Args:
        raw: The object as read.
        defaults: Values of missing fields.
        prefix: Prefix of the names in errors.
        spelled: Our names of fields that the object names differently.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        defaults: Mapping[str, Any],
        prefix: str = "",
        spelled: Mapping[str, str] | None = None,
    ) -> None:
        self._values = {**defaults, **raw}
        self._defaults = defaults
        self._prefix = prefix
        self._spelled = spelled or {}

    def __getitem__(self, name: str) -> Any:
        """The value; None for a field that is not there and has no default."""
        return self._values.get(self._spelled.get(name, name))

    def having(self, values: Mapping[str, Any]) -> Fields:
        """The same object with some values, by our names, replaced."""
        replaced = {self._spelled.get(name, name): value for name, value in values.items()}
        return Fields({**self._values, **replaced}, self._defaults, self._prefix, self._spelled)

    def given(self) -> list[str]:
        """Names of the fields that are neither missing nor null."""
        return [name for name, value in self._values.items() if value is not None]

    def size(self, name: str, most: int = MAX_SIZE) -> int:
        """An integer >= 1; null stands for the default."""
        value = self._or_default(name)
        if type(value) is not int or value < 1:
            raise self.error(name, "an integer >= 1")
        if value > most:
            raise self.error(name, f"an integer <= {most}")
        return value

    def size_or_none(self, name: str) -> int | None:
        """The same, but null has a meaning of its own."""
        return None if self[name] is None else self.size(name)

    def positive(self, name: str) -> float:
        """A number > 0; null stands for the default."""
        value = self._or_default(name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(name, "a number > 0")
        return float(value)

    def positives(self, name: str, length: int) -> tuple[float, ...]:
        """A list of numbers > 0."""
        values = self[name]
        if (
            not isinstance(values, list)
            or len(values) != length
            or not all(type(value) in (int, float) and 0 < value < math.inf for value in values)
        ):
            raise self.error(name, f"a list of {length} numbers > 0")
        return tuple(map(float, values))

    def flag(self, name: str) -> bool:
        value = self._or_default(name)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def require(self, name: str, supported: Iterable[Any]) -> Any:
        """A value that is one of a few."""
        choices = list(supported)
        if self[name] not in choices:
            raise self.error(name, " or ".join(map(json.dumps, choices)))
        return self[name]

    def error(self, name: str, expected: str) -> UnsupportedModelError:
        """The error to raise for a field's value."""
        return UnsupportedModelError(self.path(name), self[name], expected)

    def path(self, name: str) -> str:
        """The field's name in errors."""
        return self._prefix + self._spelled.get(name, name)

    def _or_default(self, name: str) -> Any:
        value = self[name]
        return self._defaults.get(self._spelled.get(name, name)) if value is None else value


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The object in a JSON file of a model directory; None if there is no such file.

    Raises:
        InvalidValueError: A file that cannot be read, or holds anything else.
    """
    path = model_file(folder, name)
    if path is None:
        return None
    raw = read_json_file(path)
    if not isinstance(raw, dict):
        raise InvalidValueError(str(path), raw, "a JSON object")
    return raw
