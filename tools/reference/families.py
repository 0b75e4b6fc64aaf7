"""The tables of families of models, as ``docs/architectures.md`` shows them."""

from __future__ import annotations

from farsight.engine.checkpoint.families import ARCHITECTURES
from farsight.engine.checkpoint.families.encoder import ENCODERS
from farsight.engine.checkpoint.families.gguf import GGUF_FAMILIES
from farsight.engine.checkpoint.families.record import Evidence
from farsight.engine.checkpoint.families.vision import TEXTS, VISION
from farsight.engine.checkpoint.gguf_encoder import GGUF_ENCODERS


def families_table() -> str:
    """One table a test, one row a family: what it is called, and what its outputs have been compared with."""
    found: dict[str, list[str]] = {}
    for name, decoder in ARCHITECTURES.items():
        found.setdefault(decoder.evidence.test, []).append(_row(name, decoder.evidence, compiled=True))
    for name, encoder in ENCODERS.items():
        found.setdefault(encoder.evidence.test, []).append(_row(name, encoder.evidence, compiled=False))
    for name, holder in [*VISION.items(), *TEXTS.items()]:
        found.setdefault(holder.evidence.test, []).append(_row(name, holder.evidence, compiled=True))
    return "\n\n".join(_table(test, rows) for test, rows in found.items())


def _gguf_names(architecture: str) -> list[str]:
    """Returns what GGUF files call an architecture; nothing where they are not read."""
    decoders = {
        name: {family.architecture, *(other.architecture for other in family.others.values())}
        for name, family in GGUF_FAMILIES.items()
    }
    named = decoders | {name: {encoder} for name, encoder in GGUF_ENCODERS.items()}
    return [name for name, architectures in named.items() if architecture in architectures]


def _table(test: str, rows: list[str]) -> str:
    head = ["| architecture | models | GGUF | compiled | compared with | on |", "|---|---|---|---|---|---|"]
    return "\n".join([f"Compared by `tests/unit/engine/{test}`:", "", *head, *rows])


def _row(name: str, evidence: Evidence, *, compiled: bool) -> str:
    cells = (
        f"`{name}`",
        evidence.models,
        ", ".join(f"`{each}`" for each in _gguf_names(name)),
        "yes" if compiled else "no",
        evidence.reference if evidence.verified else f"{evidence.reference}: unverified",
        evidence.date,
    )
    return f"| {' | '.join(cells)} |"
