"""Decisions as they are sent and kept: joined, on clocks of their own."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.decisions import Decision, on_clock, pack_decisions, unpack_decisions
from core.errors import MessageError

FACTS = st.dictionaries(
    st.text(max_size=6), st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5)
)
DECISIONS = st.lists(st.builds(Decision, st.text(max_size=9), st.floats(0, 1e6), FACTS), max_size=5)


@given(DECISIONS, DECISIONS)
def test_what_is_joined_comes_out_in_order(first: list[Decision], second: list[Decision]) -> None:
    assert unpack_decisions(pack_decisions(first) + pack_decisions(second)) == (*first, *second)


def test_each_part_is_on_its_own_clock() -> None:
    decision = Decision("a", 2.0, {})
    data = (
        pack_decisions([decision])
        + on_clock(100.0, pack_decisions([decision]))
        + on_clock(7.0, pack_decisions([decision]))
    )
    assert [each.at for each in unpack_decisions(data)] == [2.0, 102.0, 9.0]


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb("text"),
        msgpack.packb([]),
        msgpack.packb(["kind", 1.0]),
        msgpack.packb([1, 1.0, {}]),
        msgpack.packb(["kind", "soon", {}]),
        msgpack.packb(["kind", 1.0, {"a": None}]),
        msgpack.packb(["kind", 1.0, {1: 1}]),
        msgpack.packb(["kind", 1.0, []]),
    ],
)
def test_what_is_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="packed decisions"):
        unpack_decisions(data)
