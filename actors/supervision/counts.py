"""Changes of the desired numbers; pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from actors.runtime.names import SCALABLE, own_replicas
from core.errors import MessageError
from core.messages.status import ComponentCounts


def scaled(before: ComponentCounts, kind: str, count: int) -> ComponentCounts:
    """Returns the counts with another number of one kind; a removed replica is not drained any more either.

    Raises:
        MessageError: Only drained replicas would be left.
    """
    change: dict[str, Any] = {SCALABLE[kind]: count}
    counts = dataclasses.replace(before, **change)
    known = set(map(str, range(counts.replicas)))
    drains = (tuple(each for each in names if each in known) for names in (before.draining, before.drained))
    draining, drained = drains
    counts = dataclasses.replace(counts, draining=draining, drained=drained)
    if takes_requests(before) and not takes_requests(counts):
        raise MessageError("count", count, "more: only drained replicas would be left; `farsight drain --cancel`")
    return counts


def without_drains(before: ComponentCounts, replica: str) -> ComponentCounts:
    """Returns the counts with a replica that is neither drained nor draining."""
    draining = tuple(each for each in before.draining if each != replica)
    return dataclasses.replace(
        before, draining=draining, drained=tuple(each for each in before.drained if each != replica)
    )


def takes_requests(counts: ComponentCounts) -> bool:
    """Returns whether a replica is left that takes requests: one of our own engine or an external server."""
    return counts.backends > 0 or any(replica not in counts.draining for replica in own_replicas(counts))
