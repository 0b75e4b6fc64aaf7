"""The table of families of models, as ``README.md`` and ``docs/architectures.md`` show it."""

from __future__ import annotations

from engine.checkpoint.architectures import ARCHITECTURES
from engine.checkpoint.families.record import Architecture

TEST = "tests/unit/engine/families"


def families_table() -> str:
    """One row a family: what it is called, and what its outputs have been compared with."""
    rows = [
        "| architecture | models | compiled | reference | verified | compared |",
        "|---|---|---|---|---|---|",
        *(_row(name, architecture) for name, architecture in ARCHITECTURES.items()),
    ]
    return "\n".join(rows)


def _row(name: str, architecture: Architecture) -> str:
    evidence = architecture.evidence
    cells = (
        f"`{name}`",
        evidence.models,
        "yes" if architecture.compiled else "no",
        evidence.reference,
        "yes" if evidence.verified else "**unverified**",
        evidence.date,
    )
    return f"| {' | '.join(cells)} |"
