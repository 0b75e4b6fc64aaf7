"""The wire: whatever goes in comes out; whatever is malformed is refused with the field named."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core import forecast, messages
from farsight.core.codec import PackedInts, decode, encode
from farsight.core.decisions import Decision, on_clock, pack_decisions, unpack_decisions
from farsight.core.errors import MessageError
from farsight.core.messages import SCHEMA_VERSION
from farsight.core.messages import log as log_messages
from farsight.core.messages.plans import CachedRun, CacheReply, KVCacheEvent, Plan, Slot, StartedRequest, StepReport
from farsight.core.messages.requests import Keys, Submit
from farsight.core.messages.status import ComponentStatus, ProcessLife, Pulse, ThreadClock, Work
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request, SamplingParams
from tests.volumes import at_volume

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
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 3),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(SMALL, st.floats(-100, 100)), max_size=3).map(tuple),
    min_tokens=st.just(0),
    logprobs=st.integers(0, 20),
    prompt_logprobs=st.booleans(),
    benchmark_len=st.none() | st.integers(1, 9),
)
PROMPT = st.lists(SMALL, min_size=1, max_size=20).map(tuple)
REQUEST = SAMPLING.flatmap(
    lambda sampling: st.builds(
        Request,
        TEXT,
        SMALL,
        TEXT,
        PROMPT,
        st.just(sampling),
        st.lists(SMALL, max_size=min(8, sampling.max_new_tokens - 1)).map(tuple),
    )
)

st.register_type_strategy(SamplingParams, SAMPLING)
st.register_type_strategy(Request, REQUEST)
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))

ROW = st.integers(0, 2**63 - 1)
VERSION = st.integers(1, 2**53)
SECONDS = st.floats(0, 1e9)
TIME = st.floats(allow_nan=False, allow_infinity=False)
SCORE = st.none() | TIME
QUANTILES = st.lists(TIME, min_size=6, max_size=6).map(lambda numbers: tuple(sorted(numbers)))

st.register_type_strategy(
    log_messages.ForecastRecord,
    st.builds(log_messages.ForecastRecord, TEXT, TIME, TEXT, ROW, TIME, QUANTILES, SCORE, TEXT, st.binary(max_size=9)),
)
st.register_type_strategy(
    log_messages.FinishedBatch,
    st.builds(log_messages.FinishedBatch, TEXT, TEXT, VERSION, ROW, ROW, ROW, SECONDS, SECONDS, TIME),
)
NAME = st.text(min_size=1, max_size=8)
st.register_type_strategy(
    log_messages.Artefact,
    st.builds(log_messages.Artefact, NAME, VERSION, TIME, SCORE, ROW, TEXT, st.binary(max_size=9)),
)
st.register_type_strategy(log_messages.ArtefactName, st.builds(log_messages.ArtefactName, TEXT, st.none() | VERSION))


MESSAGES = list(
    dict.fromkeys(
        [
            *(CachedRun, KVCacheEvent, CacheReply, StartedRequest, ProcessLife, ThreadClock, Work, Pulse),
            *(
                kind
                for module in (messages, log_messages, forecast)
                for kind in vars(module).values()
                if isinstance(kind, type) and dataclasses.is_dataclass(kind)
            ),
        ]
    )
)


@at_volume(10, 100)
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire_in_its_version_and_with_its_fields(kind: type, volume: int) -> None:
    wire = [field for field in dataclasses.fields(kind) if field.init]
    num_required = sum(field.default is dataclasses.MISSING for field in wire)

    @settings(max_examples=volume)
    @given(st.from_type(kind))
    def check(message: object) -> None:
        data = encode(message)
        assert decode(data, kind) == message
        version, name, *fields = msgpack.unpackb(data)
        with pytest.raises(MessageError, match=f"schema version {SCHEMA_VERSION}") as caught:
            decode(msgpack.packb([1, name, *fields]), kind)
        assert (caught.value.field, caught.value.value) == (f"{kind.__name__}.version", 1)
        too_few = [fields[: num_required - 1]] if num_required else []
        for wrong in (*too_few, [*fields, *[None] * (len(wire) - len(fields) + 1)]):
            with pytest.raises(MessageError) as caught:
                decode(msgpack.packb([version, name, *wrong]), kind)
            assert caught.value.field == name

    check()


def wire(kind: str, *fields: object, version: object = SCHEMA_VERSION) -> bytes:
    return msgpack.packb([version, kind, *fields])


SLOT = ["a", 0, 5, 9, False, 0, None, 0, 0]
SAMPLED = [4, 0.0, 1.0, 0, 0, [], [], False]

LOGPROB = "TokenDelta.logprobs.output[0][1][1]"

MALFORMED = [
    (b"\xc1", Plan, "Plan"),
    (b"", Plan, "Plan"),
    (msgpack.packb({"plan": 1}), Plan, "Plan"),
    (wire("Plan", "w", 1, 1, 0, 0, [], version=99), Plan, "Plan.version"),
    (wire("Unknown", "w", 1, 1, 0, 0, []), Plan, "Plan.type"),
    (wire("Plan", "w", 1, 0, 0, []), Plan, "Plan"),
    (wire("Plan", "w", None, 1, 0, 0, []), Plan, "Plan.lease"),
    (wire("Plan", "w", 1, "1", 0, 0, []), Plan, "Plan.plan_seq"),
    (wire("Plan", "w", 1, True, 0, 0, []), Plan, "Plan.plan_seq"),
    (wire("Plan", "w", 1, 1, 0, 0, [SLOT, SLOT[:-3]]), Plan, "Plan.slots[1]"),
    (wire("Plan", "w", 1, 1, 0, 0, [["a", 0, 5.5, 9, False, 0, None, 0, 0]]), Plan, "Plan.slots[0].prefill_to"),
    (
        wire("ComponentStatus", "a", "b", 1, "n", "s", 0, float("nan"), 0, 0),
        ComponentStatus,
        "ComponentStatus.last_step_age_s",
    ),
    (
        wire("StepReport", "w", 1, 1, 1, 1, 0, [["a", 0, 77, 0, 0, 0, 0, False, 0, 0, 0, 0]], [], [], 0),
        StepReport,
        "StepReport.progress[0].status",
    ),
    (
        wire("StepReport", "w", 1, 1, 1, 1, 0, [["a", 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]], [], [], 0),
        StepReport,
        "StepReport.progress[0].stalled",
    ),
    (
        wire("StepReport", "w", 1, 1, 1, 1, 0, [], [], [[1, 1, 1, float("inf")]], 0),
        StepReport,
        "StepReport.steps[0].duration_s",
    ),
    (wire("Keys", [["a", 0], ["b"]]), Keys, "Keys.keys[1]"),
    (wire("Keys", [["a", "0"]]), Keys, "Keys.keys[0][1]"),
    (wire("Submit", [["a", 0, "i", [1, "x"], SAMPLED, []]]), Submit, "Submit.requests[0].prompt_ids[1]"),
    (wire("Submit", [["a", 0, "i", [], SAMPLED, []]]), Submit, "Submit.requests[0].prompt"),
    (wire("Submit", [["a", 0, "i", [1], [0, *SAMPLED[1:]], []]]), Submit, "Submit.requests[0].sampling.max_tokens"),
    (wire("Submit", [["a", 0, "i", [1], SAMPLED, [1, 2, 3, 4]]]), Submit, "Submit.requests[0].output_ids"),
    (wire("Submit", [["a", 0, "i", [1]]]), Submit, "Submit.requests[0]"),
    (wire("Submit", [["a", 0, "i", [1], []]]), Submit, "Submit.requests[0].sampling"),
    (wire("TokenDelta", "a", 0, 0, [1], "x", None, None, 0, [[[[1], [0.5, "y"]]]]), TokenDelta, LOGPROB),
    (wire("TokenDelta", "a", 0, 0, [1], "x", None, None, 0, [[[[1], [0.5, float("inf")]]]]), TokenDelta, LOGPROB),
]


@pytest.mark.parametrize(("data", "kind", "field"), MALFORMED, ids=[case[2] for case in MALFORMED])
def test_a_malformed_message_is_refused_with_its_field(data: bytes, kind: type, field: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode(data, kind)
    assert caught.value.field == field


def test_trailing_defaults_take_no_room() -> None:
    _, _, *fields = msgpack.unpackb(encode(TokenDelta("a", 0, 3, (7,), "x")))
    assert fields == ["a", 0, 3, [7], "x"]
    ended = TokenDelta("a", 0, 3, (7,), "x", "stop")
    assert msgpack.unpackb(encode(ended))[2:] == ["a", 0, 3, [7], "x", "stop"]
    request = Request("a", 0, "i", (5,), SamplingParams(4))
    assert msgpack.unpackb(encode(Submit((request,))))[2:] == [[["a", 0, "i", [5], [4]]]]


@given(st.binary(max_size=60))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data, Slot)


def test_many_tokens_are_one_string_and_may_be_passed_on_unread() -> None:
    message = Submit((Request("a", 0, "i", tuple(range(300)), SamplingParams(4), prefix_hashes=(2**63,) * 20),))
    data = encode(message)
    (request,) = decode(data, Submit, keep_packed=True).requests
    assert isinstance(request.prompt_ids, PackedInts)
    assert (request.prompt_len, request.max_total_len, request.prefix_hashes) == (300, 304, (2**63,) * 20)
    assert encode(Submit((request,))) == data
    assert (request.prompt_ids[7], tuple(request.prompt_ids)) == (7, tuple(range(300)))
    assert decode(data, Submit) == message


WIDEST, HASHES = (2**32 - 1,) * 40, (2**64 - 1,) * 16


@pytest.mark.parametrize(
    "values", [(), (7,) * 15, tuple(range(16)), WIDEST, (2**32, *range(30)), HASHES, (-1, *range(20))], ids=len
)
def test_integers_come_as_they_went_and_a_malformed_string_of_them_is_refused(values: tuple[int, ...]) -> None:
    notice = KVCacheEvent(1, False, (), values)
    assert decode(encode(notice), KVCacheEvent) == notice
    for packed in (b"", b"I123", b"Q1234", b"z1234", b"\xff"):
        with pytest.raises(MessageError, match="integers as a binary string") as caught:
            decode(wire("KVCacheEvent", 1, False, [], packed), KVCacheEvent)
        assert caught.value.field == "KVCacheEvent.evicted"


FACTS = st.dictionaries(
    st.text(max_size=6), st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5)
)
DECISIONS = st.lists(st.builds(Decision, st.text(max_size=9), st.floats(0, 1e6), FACTS), max_size=5)


@given(DECISIONS, DECISIONS)
def test_what_is_joined_comes_out_in_order(first: list[Decision], second: list[Decision]) -> None:
    assert unpack_decisions(pack_decisions(first) + pack_decisions(second)) == (*first, *second)
    packed = pack_decisions([Decision("a", 2.0, {})])
    data = packed + on_clock(100.0, packed) + on_clock(7.0, packed)
    assert [each.at for each in unpack_decisions(data)] == [2.0, 102.0, 9.0], "each part on its own clock"


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
