"""Decision traces: what was decided about a request, when, and from which numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from farsight.core.errors import MessageError

Facts = Mapping[str, float | str]
"""Named numbers and words; a name ends with its unit (``_s``, ``_tokens``) where it has one."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about a request, with its inputs.

    Attributes:
        kind: Kind of the decision, such as ``admitted``; a reader may meet kinds that it does not know.
        at: Seconds on the clock of the component that decided.
    """

    kind: str
    at: float
    facts: Facts


class DecisionPacker:
    """Packs decisions for sending and keeping. Packed decisions may be joined, one after the other."""

    def __init__(self) -> None:
        self._pack: Callable[[object], bytes] = msgpack.Packer().pack

    def pack(self, kind: str, at: float, facts: Facts) -> bytes:
        """Packs one decision, its parts as in ``Decision``."""
        return self._pack((kind, at, facts))


def pack_decisions(decisions: Iterable[Decision]) -> bytes:
    """Packs several decisions, joined."""
    packer = DecisionPacker()
    return b"".join(packer.pack(each.kind, each.at, each.facts) for each in decisions)


def on_clock(epoch_s: float, packed: bytes) -> bytes:
    """Puts their clock, which stood at 0 at ``epoch_s`` (seconds since the epoch), before decisions to be joined.

    Instants before the first named clock stay as they are.
    """
    header: bytes = msgpack.packb(float(epoch_s))
    return header + packed


def unpack_decisions(data: bytes) -> tuple[Decision, ...]:
    """Returns the packed decisions; instants are seconds since the epoch where a clock was named.

    Raises:
        MessageError: The data is not packed decisions.
    """
    epoch_s, found = 0.0, []
    unpacker = msgpack.Unpacker(strict_map_key=True)
    unpacker.feed(data)
    try:
        for each in unpacker:
            if type(each) is float:
                epoch_s = each
            else:
                found.append(_decision(epoch_s, *each))
    except (ValueError, TypeError, AttributeError, msgpack.exceptions.UnpackException) as error:
        raise MessageError("decisions", data[:40], f"packed decisions ({error})") from error
    return tuple(found)


def _decision(epoch_s: float, kind: Any, at: Any, facts: Any) -> Decision:
    known = all(type(name) is str and type(value) in (int, float, str) for name, value in facts.items())
    if type(kind) is not str or type(at) not in (int, float) or not known:
        raise ValueError("a kind, an instant, and named numbers or words")
    return Decision(kind, epoch_s + at, facts)
