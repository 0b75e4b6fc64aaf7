"""The table of families of models, as ``README.md`` and ``docs/architectures.md`` show it."""

from __future__ import annotations

from engine.checkpoint.architectures import ARCHITECTURES
from engine.checkpoint.families.encoder import ENCODERS
from engine.checkpoint.families.record import Evidence


def families_table() -> str:
    """One row a family: what it is called, and what its outputs have been compared with, by which test."""
    rows = [
        "| architecture | models | compiled | compared with | by | on |",
        "|---|---|---|---|---|---|",
        *(_row(name, each.evidence, compiled=each.compiled) for name, each in ARCHITECTURES.items()),
        *(_row(name, each.evidence, compiled=False) for name, each in ENCODERS.items()),
    ]
    return "\n".join(rows)


def _row(name: str, evidence: Evidence, *, compiled: bool) -> str:
    cells = (
        f"`{name}`",
        evidence.models,
        "yes" if compiled else "no",
        evidence.reference if evidence.verified else f"{evidence.reference}: unverified",
        f"`{evidence.test}`",
        evidence.date,
    )
    return f"| {' | '.join(cells)} |"
