"""The table of families of models, as ``README.md`` and ``docs/architectures.md`` show it."""

from __future__ import annotations

from engine.checkpoint.architectures import ARCHITECTURES
from engine.checkpoint.families.record import Evidence
from engine.checkpoint.families.vision import VISION


def families_table() -> str:
    """One row a family: what it is called, and what its outputs have been compared with."""
    rows = [
        "| architecture | models | compiled | compared with | on |",
        "|---|---|---|---|---|",
        *(_row(name, each.evidence, compiled=each.compiled) for name, each in ARCHITECTURES.items()),
        *(_row(name, each.evidence, compiled=True) for name, each in VISION.items()),
    ]
    return "\n".join(rows)


def _row(name: str, evidence: Evidence, *, compiled: bool) -> str:
    cells = (
        f"`{name}`",
        evidence.models,
        "yes" if compiled else "no",
        evidence.reference if evidence.verified else f"{evidence.reference}: unverified",
        evidence.date,
    )
    return f"| {' | '.join(cells)} |"
