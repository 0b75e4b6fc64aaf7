"""``GET /v1/requests/{id}``: what is told, to whom, and when an answer will end."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from starlette.types import Message

from farsight.core.decisions import Decision, Facts, on_clock, pack_decisions
from farsight.core.messages.log import RequestTrace
from farsight.core.messages.requests import Promise
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Origin, Request
from farsight.services.api.access.keys import bearer_key, owner_of, owns
from farsight.services.api.admin import Administration
from farsight.services.api.answers import sse
from farsight.services.api.answers.served import ANSWER, AnswerPromise
from farsight.services.api.answers.sse import EventStream
from farsight.services.api.generation import PromptText
from farsight.services.api.pages.sentences import _SENTENCES, sentence
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.policies.replica.test_decision_trace import crowd
from tests.unit.services.api.api_support import Client, ScriptedBackend, application, client_on

TOKEN = "admin"
RECEIVED = Decision("received", 0.0, {})


@pytest.fixture
def http(backend: ScriptedBackend, encoder: PromptEncoder) -> Client:
    return client_on(application(backend, encoder, administration=Administration(TOKEN)))


def key(name: str | None) -> dict[str, str]:
    return {} if name is None else {"Authorization": f"Bearer {name}"}


def trace_of(origin: Origin, part: str, *decisions: Decision, ended: bool = True, epoch_s: float = 0.0) -> RequestTrace:
    request_id = f"i-{origin.choice}"
    trace_id = f"{origin.response_id}/{request_id}/{part}"
    source, attempt = ("ingress", 0) if part == "ingress" else ("scheduler-0", int(part))
    packed = on_clock(epoch_s, pack_decisions(decisions))
    return RequestTrace(trace_id, request_id, origin.choice, origin.owner, source, attempt, ended, 1, packed)


async def ask(http: Client, sender: str | None = None, **change: Any) -> str:
    """Sends a request; returns the id of its answer."""
    reply = await http.post("/v1/completions", json={"prompt": "hello"} | change, headers=key(sender))
    return str(reply.json()["id"])


@pytest.mark.parametrize(
    ("sender", "reader", "status"),
    [
        (None, None, 200),
        (None, "anybody", 200),
        ("mine", "mine", 200),
        ("mine", TOKEN, 200),
        ("mine", None, 404),
        ("mine", "other", 404),
        ("mine", "", 404),
    ],
)
async def test_a_request_is_explained_to_whom_it_belongs(
    http: Client, backend: ScriptedBackend, sender: str | None, reader: str | None, status: int
) -> None:
    response_id = await ask(http, sender)
    (origin,) = backend.origins
    assert origin is not None and origin.response_id == response_id
    assert sender is None or sender.encode() not in origin.owner
    backend.traces = [trace_of(origin, "ingress", Decision("received", 1.0, {}))]
    reply = await http.get(f"/v1/requests/{response_id}", headers=key(reader))
    assert reply.status_code == status
    if status == 404:
        unknown = await http.get(f"/v1/requests/cmpl-{'0' * 32}", headers=key(reader))
        assert unknown.status_code == 404
        replaced = unknown.text.replace("0" * 32, response_id.removeprefix("cmpl-"))
        assert reply.text == replaced, "no client can tell whether it exists"


@pytest.mark.parametrize("response_id", ["x", "cmpl-", "cmpl-%25", "cmpl-" + "A" * 32, "chatcmpl-" + "0" * 32 + "-1"])
async def test_what_is_no_id_of_an_answer_is_unknown(http: Client, response_id: str) -> None:
    reply = await http.get(f"/v1/requests/{response_id}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "request_not_found")


async def test_every_choice_has_its_own_account_and_parts_are_merged_in_order_of_time(
    http: Client, backend: ScriptedBackend
) -> None:
    response_id = await ask(http, n=2)
    first, second = (origin for origin in backend.origins if origin is not None)
    assert (first.choice, second.choice) == (0, 1)
    facts = {"waited_s": 0.5, "level": 1, "quantum_s": float("inf")}
    backend.traces = [
        trace_of(first, "0", Decision("admitted", 2.5, facts), epoch_s=98.0),
        trace_of(first, "ingress", RECEIVED, Decision("resumed", 2.0, {"attempt": 1}), epoch_s=100.0),
        trace_of(second, "ingress", RECEIVED, ended=False, epoch_s=100.5),
    ]
    body = (await http.get(f"/v1/requests/{response_id}")).json()
    assert (body["id"], body["received_at"]) == (response_id, 100.0)
    one, other = body["choices"]
    told = [(each["at_s"], each["kind"], each["by"], each["attempt"]) for each in one["decisions"]]
    assert told == [(0, "received", "ingress", 0), (0.5, "admitted", "scheduler-0", 0), (2, "resumed", "ingress", 1)]
    assert one["decisions"][1]["facts"] == {"waited_s": 0.5, "level": 1}, "infinity is no number in JSON"
    assert (one["status"], one["num_left_out"], one["summary"]["num_resumptions"]) == ("ended", 2, 1)
    assert one["summary"]["waited_s"] == 0.5
    assert (other["index"], other["status"], other["summary"]["jct_s"]) == (1, "running", None)


async def test_the_summary_sets_the_forecast_beside_the_truth(http: Client, backend: ScriptedBackend) -> None:
    response_id = await ask(http)
    (origin,) = backend.origins
    assert origin is not None
    forecast: Facts = {"mean_tokens": 30.0, "q50_tokens": 25.0, "q90_tokens": 60.0, "source": "history"}
    ended: Facts = {"reason": "stop", "output_tokens": 42}
    decisions = [
        Decision("placed", 0.1, {"replica": "1", "reason": "in turn", "hit_len": 0}),
        Decision("forecast", 0.2, forecast),
        Decision("offloaded", 0.3, {"computed_tokens": 5}),
        Decision("finished", 0.9, {**ended, "predicted_tokens": 30.0}),
    ]
    answered = Decision("answered", 1.0, {**ended, "jct_s": 1.0, "ttft_s": 0.4, "attempts": 1})
    backend.traces = [trace_of(origin, "0", *decisions), trace_of(origin, "ingress", RECEIVED, answered)]
    (choice,) = (await http.get(f"/v1/requests/{response_id}")).json()["choices"]
    summary = {"replica": "1", "waited_s": 0.0, "ttft_s": 0.4, "jct_s": 1.0, "output_tokens": 42}
    summary |= {"predicted_tokens": 30.0, "finish_reason": "stop", "num_preemptions": 1, "num_resumptions": 0}
    assert choice["summary"] == summary
    assert choice["decisions"][1]["by"] == "router"


@pytest.mark.parametrize("preset", ["fcfs", "fastserve", "fastserve-reactive", "past-future", "preble", "farsight"])
def test_whatever_a_scheduler_notes_has_a_sentence_of_its_own(preset: str) -> None:
    replica = crowd(preset)
    decisions = [decision for name in replica.closed for decision in replica.decisions(name)]
    assert {decision.kind for decision in decisions} <= _SENTENCES.keys()
    assert all(text.endswith(".") and "?" not in text for text in map(sentence, decisions))


@pytest.mark.parametrize("kind", [*_SENTENCES, "something_new"])
def test_a_sentence_needs_no_number(kind: str) -> None:
    """Parts need not explain themselves; what they do not say is left out."""
    text = sentence(Decision(kind, 0.0, {}))
    assert text.endswith(".") and text[0].isupper()


LEAST_WORK: dict[str, float | str] = {"replica": "0", "reason": "least work", "num_replicas": 2}
IDLE: dict[str, float | str] = {"replica": "0", "reason": "idle"}


@pytest.mark.parametrize(
    ("kind", "facts", "text"),
    [
        (
            "placed",
            {"replica": "1", "reason": "exploit", "hit_len": 128, "load_s": 1.5, "evict_s": 0.25, "prefill_s": 0.25},
            "The router placed it on replica 1 (exploit: most of the prompt is cached there). 128 tokens of the prompt "
            "are believed cached there; predicted cost 2.00 s: 1.50 s of load on the replica, 250.0 ms for evictions, "
            "250.0 ms to prefill the rest of the prompt.",
        ),
        (
            "placed",
            {"replica": "1", "reason": "hit", "hit_len": 64, "predicted_len": 40.0, "queue_s": 1.5, "prefill_s": 0.25}
            | {"decode_s": 0.2, "evict_s": 0.0, "memory_s": 0.05},
            "The router placed it on replica 1 (hit). 64 tokens of the prompt are believed cached there, 40 tokens of "
            "output predicted; predicted cost to it and the requests there 2.00 s: 1.50 s for prompts queued "
            "before it, 250.0 ms for its own prompt, 200.0 ms for shared decoding steps, 0.0 ms for evictions, "
            "50.0 ms until its KV fits.",
        ),
        (
            "placed",
            {"replica": "1", "reason": "in turn"}
            | {"moved_from": "0", "because": "starved head", "waited_there_s": 2.0},
            "The router placed it on replica 1 after 2.00 s in the queue of replica 0 (where it could not run yet) "
            "(in turn).",
        ),
        (
            "placed",
            LEAST_WORK | {"work_tokens": 10.0, "most_work_tokens": 2500.0},
            "The router placed it on replica 0, the one with the least work: 10 tokens of work in flight; the busiest "
            "of 2 had 2,500.",
        ),
        (
            "placed",
            IDLE
            | {"batch_size": 2, "batch_len": 50, "generation_len": 100}
            | {"waste_tokens": 2345, "waste_limit_tokens": 50_000.0}
            | {"next_waste_tokens": 60_000, "next_memory_tokens": 9150, "memory_limit_tokens": 4000}
            | {"queued_s": 5.0, "service_s": 2.0, "response_ratio": 3.5, "num_rivals": 2, "rival_ratios": "1.20, 1.00"},
            "The router placed it on replica 0. An idle worker pulled a batch of 2: longest prompt 50 tokens, longest "
            "predicted output 100 tokens. Wasted memory accesses: 2,345 tokens, below the limit of "
            "50,000; with the nearest request that still waits, 60,000 and 9,150 tokens of KV of 4,000. Response ratio "
            "(5.00 s queued + 2.00 s predicted) / 2.00 s = 3.50; of the longest in the queue of 2: 1.20, 1.00.",
        ),
        (
            "placed",
            IDLE
            | {"batch_size": 8, "batch_len": 50, "generation_len": 300}
            | {"bin": 2, "num_bins": 4, "bin_from_tokens": 200.0, "full_size": 8}
            | {"counted_tokens": 210, "counted_by": "history"},
            "The router placed it on replica 0. An idle worker pulled a batch of 8: longest prompt 50 tokens, longest "
            "predicted output 300 tokens. This request counted with 210 tokens of output (the mean of earlier "
            "outputs). It is of bin 2 of 4, 200 or more predicted tokens; 8 fill "
            "a batch.",
        ),
        (
            "waits",
            {"reason": "memory", "needed_tokens": 50, "predicted_peak_tokens": 500, "limit_tokens": 475.0}
            | {"capacity_tokens": 480, "num_admitted": 1, "num_waiting": 2},
            "Waits for KV memory: it needs 50 tokens; KV memory is predicted to peak at 500 tokens, at most 475 of 480 "
            "(1 request is admitted, 2 wait).",
        ),
        ("waits", {"reason": "replica"}, "Waits for a replica: none accepts requests now."),
        (
            "demoted",
            {"level": 3, "quantum_s": 0.04, "attained_s": 0.0},
            "Demoted to level 3: it used up its quantum. The new quantum is 40.0 ms.",
        ),
        (
            "admitted",
            {"rank_s": 4.0, "aged_rank_s": 0.5, "expected_s": 3.0},
            "Admitted at once (0 requests are admitted, 0 wait; rank 4.00 s, 500.0 ms after ageing (lower goes first), "
            "predicted remaining time 3.00 s).",
        ),
        ("batched", {"size": 3, "bin": "short"}, "Batched: size 3, bin short."),
        (
            "placed",
            LEAST_WORK | {"work_tokens": -1e-13, "most_work_tokens": 1.0},
            "The router placed it on replica 0, the one with the least work: 0 tokens of work in flight; the busiest "
            "of 2 had 1.",
        ),
        (
            "preempted",
            {"short_blocks": 1, "computed_tokens": 1, "num_admitted": 1, "num_waiting": 1},
            "Preempted: KV memory is short by 1 block; its 1 token of KV is dropped and will be computed again (1 "
            "request is admitted, 1 waits).",
        ),
        ("kv_ordered", {"num_out": 1}, "Ordered KV of 1 request to the host, of 0 back, and of 0 dropped."),
        (
            "forecasts_made",
            {"num_requests": 1, "last_mean_tokens": 1.0},
            "Forecast the outputs of 1 request; mean of the last: 1 token.",
        ),
        ("waits", {"reason": "places", "max_num_seqs": 1}, "Waits for a batch slot: the only one is taken."),
    ],
)
def test_sentences(kind: str, facts: Facts, text: str) -> None:
    assert sentence(Decision(kind, 0.0, facts)) == text


def test_of_a_key_only_a_salted_hash_is_kept() -> None:
    first, second = owner_of("k"), owner_of("k")
    assert first != second and len(first) == 48
    assert owns("k", first) and owns("k", second)
    assert not owns("K", first) and not owns("", first)
    assert owner_of("") == b"" and owns("", b"") and owns("k", b"")


@pytest.mark.parametrize(
    ("header", "found"),
    [(None, ""), ("", ""), ("Basic abc", ""), ("Bearer", ""), ("bearer  k ", "k"), ("Bearer k", "k")],
)
def test_keys_are_bearer_tokens(header: str | None, found: str) -> None:
    assert bearer_key(header) == found


class PromisingBackend(ScriptedBackend):
    """Promises 1 s to the first request, 2 s to the second, and so on, as it takes them; ``silent`` gets none."""

    silent = 0

    async def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        answer, number = ANSWER.get(), self.num_opened + 1
        if answer is not None and number != self.silent:
            answer.add(Promise(f"r{number}", 0, float(number), 10.0 * number, coarse=number == 2))
        async with aclosing(super().stream(request, text, key)) as deltas:
            async for each in deltas:
                yield each


@pytest.fixture
def promising() -> PromisingBackend:
    return PromisingBackend()


@pytest.fixture
def promised(promising: PromisingBackend, encoder: PromptEncoder) -> Client:
    return client_on(application(promising, encoder))


TALK = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("path", "fields", "silent", "expected"),
    [
        ("completions", {"prompt": "hello"}, 0, ["1.000", "10.000"]),
        ("completions", {"prompt": "hello", "stream": True}, 0, ["1.000", "10.000"]),
        ("completions", {"prompt": "hello", "user": "x" * 200_000}, 0, ["1.000", "10.000"]),
        ("chat/completions", {**TALK, "n": 2}, 0, ["2.000", "20.000", "true"]),
        ("completions", {"prompt": "hello", "n": 2}, 2, []),
    ],
    ids=["whole", "stream", "large", "the last of several", "before each has a promise"],
)
async def test_an_answer_says_when_the_last_of_its_requests_will_end(
    promised: Client, promising: PromisingBackend, path: str, fields: Any, silent: int, expected: list[str]
) -> None:
    promising.silent = silent
    reply = await promised.post(f"/v1/{path}", json=fields)
    assert reply.status_code == 200
    told = {name: value for name, value in reply.headers.items() if name.startswith("farsight-eta-")}
    assert told == dict(zip([f"farsight-eta-{name}" for name in ("p50", "p90", "coarse")], expected, strict=False))


async def sent_with(events: AsyncGenerator[bytes, None], answer: AnswerPromise) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    ANSWER.set(answer)
    await EventStream(events)({"type": "http"}, receive, send)
    return messages


@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_that_waits_long_is_told_before_the_first_token(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(sse, "EARLY_S", 0.0)
    answer, begun = AnswerPromise(1), asyncio.Event()
    answer.add(Promise("r", 0, 60.0, 90.0))
    begin = EventStream._begin

    async def noted(self: EventStream, send: object) -> None:
        await begin(self, send)  # type: ignore[arg-type]
        begun.set()

    monkeypatch.setattr(EventStream, "_begin", noted)

    async def events() -> AsyncGenerator[bytes, None]:
        await begun.wait()
        if fails:
            raise RuntimeError("the worker died")
        yield b"data: x\n\n"

    head, *bodies = await sent_with(events(), answer)
    assert (head["status"], dict(head["headers"])[b"farsight-eta-p50"]) == (200, b"60.000")
    text = b"".join(each["body"] for each in bodies)
    assert (b'"error"' in text) is fails and not bodies[-1]["more_body"]


async def test_without_a_promise_the_status_line_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EARLY_S", 0.0)

    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(5):
            await asyncio.sleep(0)
        raise ValueError("refused")
        yield b""

    with pytest.raises(ValueError, match="refused"):
        await sent_with(events(), AnswerPromise(1))


async def test_a_request_in_flight_tells_its_state_and_its_end(promised: Client, promising: PromisingBackend) -> None:
    response_id = await ask(promised, "mine")
    (origin,) = promising.origins
    assert origin is not None
    facts: Facts = {"state": "running", "output_tokens": 7, "p50_s": 3.0, "p90_s": 9.0, "coarse": 1}
    promising.traces = [
        trace_of(origin, "ingress", Decision("received", 1.0, {}), ended=False),
        trace_of(origin, "0", Decision("outlook", 2.0, facts), ended=False),
    ]
    (choice,) = (await promised.get(f"/v1/requests/{response_id}", headers=key("mine"))).json()["choices"]
    assert (choice["status"], choice["state"], choice["output_tokens"]) == ("running", "running", 7)
    assert (choice["eta_p50"], choice["eta_p90"], choice["eta_coarse"]) == (3.0, 9.0, True)
    assert choice["age_s"] > 0
    other = await promised.get(f"/v1/requests/{response_id}", headers=key("other"))
    assert other.status_code == 404 and "eta" not in other.text

    promising.traces = [dataclasses.replace(each, ended=True) for each in promising.traces]
    (choice,) = (await promised.get(f"/v1/requests/{response_id}", headers=key("mine"))).json()["choices"]
    assert (choice["status"], choice["state"], choice["eta_p50"], choice["age_s"]) == ("ended", None, None, None)


def test_promises_add_up_to_the_last_end() -> None:
    answer = AnswerPromise(2)
    answer.add(Promise("a", 0, 5.0, 6.0))
    assert answer.headers() == {}
    answer.add(Promise("b", 0, 1.0, 8.0))
    answer.add(Promise("b", 1, math.inf, math.inf))
    assert answer.headers() == {"farsight-eta-p50": "5.000", "farsight-eta-p90": "8.000"}
