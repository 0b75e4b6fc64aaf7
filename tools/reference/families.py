"""The table of families of models, as ``README.md`` and ``docs/architectures.md`` show it."""

from __future__ import annotations

from engine.checkpoint.architectures import ARCHITECTURES
from engine.checkpoint.families.record import Architecture


def families_table() -> str:
    """One row a family: what it is called, and what its outputs have been compared with."""
    rows = [
        "| architecture | models | compiled | compared with | on |",
        "|---|---|---|---|---|",
        *(_row(name, architecture) for name, architecture in ARCHITECTURES.items()),
    ]
    return "\n".join(rows)


def _row(name: str, architecture: Architecture) -> str:
    evidence = architecture.evidence
    cells = (
        f"`{name}`",
        evidence.models,
        "yes" if architecture.compiled else "no",
        evidence.reference if evidence.verified else f"{evidence.reference}: unverified",
        evidence.date,
    )
    return f"| {' | '.join(cells)} |"
