"""Output of a batch that is held back until the batch is returned together (static execution)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from core.deltas import joined
from core.messages.plans import FinishedSequence
from engine.emission import Emission, Output


class HeldBack:
    """Output of the sequences of a batch so far, in the order of the steps."""

    def __init__(self) -> None:
        self._emissions: dict[str, list[Emission]] = {}

    def add(self, emissions: Iterable[Emission]) -> None:
        for emission in emissions:
            self._emissions.setdefault(emission.sequence.request.request_id, []).append(emission)

    def take(self, request_id: str) -> list[Emission]:
        """Removes and returns the output of one sequence, which goes out or is no longer wanted."""
        return self._emissions.pop(request_id, [])

    def finish(self, end: FinishedSequence) -> list[Emission]:
        """The output of a sequence that has ended; its own output ended it, maybe many steps ago."""
        emissions = self.take(end.request_id)
        emissions[-1].end = end
        return emissions


def joined_outputs(outputs: Iterable[Output]) -> list[Output]:
    """Joins consecutive deltas of one sequence; an error stays separate, behind the output that came before it."""
    groups = itertools.groupby(outputs, key=_kind)
    return [Output(ingress_id, joined([each.delta for each in group])) for (ingress_id, _, _), group in groups]


def _kind(output: Output) -> tuple[str, str, bool]:
    return output.ingress_id, output.delta.request_id, output.delta.error is None
