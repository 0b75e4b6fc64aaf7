"""The wire: whatever goes in comes out; whatever is malformed is refused with the field named."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import messages
from core.codec import decode, encode
from core.errors import MessageError
from core.messages import SCHEMA_VERSION, PieceStatus, Plan, Slot, StepReport, Submit
from core.request import Request, SamplingParams

TEXT = st.text(max_size=8)
SMALL = st.integers(0, 2**31)
SAMPLING = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 100),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 100),
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple),
    stop_token_ids=st.lists(SMALL, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
REQUEST = st.builds(Request, TEXT, SMALL, TEXT, st.lists(SMALL, min_size=1, max_size=20).map(tuple), SAMPLING)

st.register_type_strategy(SamplingParams, SAMPLING)
st.register_type_strategy(Request, REQUEST)
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(messages).values() if dataclasses.is_dataclass(kind)],
    ids=lambda kind: kind.__name__,
)
def test_every_message_survives_the_wire(kind: type) -> None:
    @given(st.from_type(kind))
    def check(message: object) -> None:
        assert decode(encode(message), kind) == message

    check()


def wire(kind: str, *fields: object, version: object = SCHEMA_VERSION) -> bytes:
    return msgpack.packb([version, kind, *fields])


SLOT = ["a", 0, 5, 9, False, 0, None]
SAMPLED = [4, 0.0, 1.0, 0, 0, [], [], False]

MALFORMED = [
    (b"\xc1", Plan, "Plan"),
    (b"", Plan, "Plan"),
    (msgpack.packb({"plan": 1}), Plan, "Plan"),
    (wire("Plan", "w", 1, 0, 0, [], version=99), Plan, "Plan.version"),
    (wire("Unknown", "w", 1, 0, 0, []), Plan, "Plan.type"),
    (wire("Plan", "w", 1, 0, 0), Plan, "Plan"),
    (wire("Plan", "w", "1", 0, 0, []), Plan, "Plan.plan_seq"),
    (wire("Plan", "w", True, 0, 0, []), Plan, "Plan.plan_seq"),
    (wire("Plan", "w", 1, 0, 0, [SLOT, SLOT[:-1]]), Plan, "Plan.slots[1]"),
    (wire("Plan", "w", 1, 0, 0, [["a", 0, 5.5, 9, False, 0, None]]), Plan, "Plan.slots[0].prefill_to"),
    (wire("PieceStatus", "a", "b", 1, "n", "s", 0, float("nan")), PieceStatus, "PieceStatus.last_step_age_s"),
    (
        wire("StepReport", "w", 1, 1, 1, 0, [["a", 0, 77, 0, 0, 0, 0]], []),
        StepReport,
        "StepReport.progress[0].status",
    ),
    (wire("Submit", [["a", 0, "i", [1, "x"], SAMPLED]]), Submit, "Submit.requests[0].prompt_ids[1]"),
    (wire("Submit", [["a", 0, "i", [], SAMPLED]]), Submit, "Submit.requests[0].prompt"),
    (wire("Submit", [["a", 0, "i", [1], [0, *SAMPLED[1:]]]]), Submit, "Submit.requests[0].sampling.max_tokens"),
]


@pytest.mark.parametrize(("data", "kind", "field"), MALFORMED, ids=[case[2] for case in MALFORMED])
def test_a_malformed_message_is_refused_with_its_field(data: bytes, kind: type, field: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode(data, kind)
    assert caught.value.field == field


@given(st.binary(max_size=60))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data, Slot)
