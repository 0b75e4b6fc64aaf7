"""The configuration reference: one section a table of the TOML file, from the configuration classes themselves."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing

from farsight.core.config.actors import ReplicaConfig
from farsight.core.config.load import FarsightConfig


def configuration_reference() -> str:
    """Every setting with its type, default and meaning."""
    sections = [_section(f"[{field.name}]", _table_class(field)) for field in dataclasses.fields(FarsightConfig)]
    return "\n\n".join(sections)


def _table_class(field: dataclasses.Field[typing.Any]) -> type:
    return ReplicaConfig if field.name == "replica" else typing.cast(type, field.default_factory)


def _section(title: str, kind: type) -> str:
    title = title if kind is not ReplicaConfig else "[[replica]]"
    doc = inspect.getdoc(kind) or ""
    meanings = _attributes(doc)
    hints = typing.get_type_hints(kind)
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        cells = (f"`{field.name}`", _type_name(hints[field.name]), _default(field), _cell(meanings.get(field.name, "")))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"## `{title}`", "", _cell(doc.partition("\n\n")[0]), "", *rows])


def _attributes(doc: str) -> dict[str, str]:
    """Field -> its entry under ``Attributes:``; several names may share one entry."""
    found: dict[str, str] = {}
    block = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    entries = re.split(r"\n(?=    \w)", "\n" + block[1]) if block else []
    for entry in entries:
        names, colon, text = entry.strip().partition(": ")
        if colon:
            found.update({name.strip(): text for name in names.split(",")})
    return found


def _type_name(kind: typing.Any) -> str:
    return f"`{kind.__name__}`" if isinstance(kind, type) else f"`{kind}`"


def _default(field: dataclasses.Field[typing.Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"
    return f"`{field.default!r}`" if field.default != "" else "empty"


def _cell(text: str) -> str:
    """One line, as a table's cell can hold it."""
    return re.sub(r"``([^`]*)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")
