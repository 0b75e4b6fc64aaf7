"""``GET /v1/requests/{id}``: the decisions about a request, and the numbers behind them."""

from __future__ import annotations

import hmac
import itertools
import math
import re
import time
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from farsight.core.decisions import Decision, unpack_decisions
from farsight.core.messages.log import RequestTrace
from farsight.services.api.access.keys import CURRENT, Role, owns, sent_key
from farsight.services.api.backend import Operator
from farsight.services.api.errors import ApiError, ErrorReply, or_unavailable
from farsight.services.api.pages.sentences import sentence

RESPONSE_ID = re.compile(r"(chatcmpl|cmpl)-[0-9a-f]{32}")

ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorReply, "description": "No request that was sent with this key has that id."},
    503: {"model": ErrorReply, "description": "The decision log is not available now."},
}


class ExplainedDecision(BaseModel):
    """One decision.

    Attributes:
        at_s: Seconds since the request arrived.
        by: The component that decided.
        attempt: Number of the request's attempt; attempts above 0 are resumptions.
        text: The decision as a sentence.
        facts: The numbers that the decision was made from.
    """

    at_s: float
    kind: str
    by: str
    attempt: int
    text: str
    facts: dict[str, float | str]


class RequestSummary(BaseModel):
    """The course of a request; a field is null while it is unknown.

    Attributes:
        waited_s: Sum of all waits: for a replica, a batch slot, KV memory or its turn.
    """

    replica: str | None
    waited_s: float
    ttft_s: float | None
    jct_s: float | None
    output_tokens: int | None
    predicted_tokens: float | None
    finish_reason: str | None
    num_preemptions: int
    num_resumptions: int


class ExplainedChoice(BaseModel):
    """One of the requests behind an answer, with its ``decisions`` in order of time.

    Attributes:
        state: While it is in flight, whether it waits (``queued``: for a replica) or runs; null once it has ended.
        age_s: Seconds since it was received, while it is in flight.
        prefilled_tokens: Prompt tokens computed or found cached so far, while it is on a replica; null else.
        output_tokens: Tokens so far, as the replica has reported them.
        eta_p50, eta_p90: Seconds from now by which it has ended with probability 0.5 and 0.9; null while unknown.
        eta_coarse: The queue was too long to be rolled forward request by request.
        num_left_out: Number of decisions that the decision trace dropped because there were too many.
    """

    index: int
    request_id: str
    status: Literal["running", "ended"]
    state: Literal["queued", "waiting", "running"] | None
    age_s: float | None
    prefilled_tokens: int | None
    output_tokens: int
    eta_p50: float | None
    eta_p90: float | None
    eta_coarse: bool
    summary: RequestSummary
    num_left_out: int
    decisions: list[ExplainedDecision]


class Explanation(BaseModel):
    """``received_at`` is in seconds since the epoch."""

    id: str
    object: Literal["request.explanation"] = "request.explanation"
    received_at: float
    choices: list[ExplainedChoice]


def explain_routes(operator: Operator, admin_token: str) -> APIRouter:
    """The route. A client may ask about requests sent with its own key; the admin token opens all requests."""
    router = APIRouter(prefix="/v1", tags=["generation"], responses=ERRORS)

    @router.get("/requests/{response_id}")
    async def explain(response_id: str, request: Request) -> Explanation:
        traces = await own_traces(operator, response_id, sent_key(request.headers), admin_token)
        return explanation(response_id, traces)

    return router


async def own_traces(operator: Operator, response_id: str, key: str, admin_token: str) -> Sequence[RequestTrace]:
    """Returns the traces behind an answer, at least one.

    Where keys are in use, a caller sees what its tenant owns, and an admin everything.

    Raises:
        ApiError: 404 for an answer that is not known, or that is not the key's to see; 503 without the log.
    """
    traces: Sequence[RequestTrace] = ()
    if RESPONSE_ID.fullmatch(response_id):
        with or_unavailable():
            traces = await operator.explain(response_id)
    if not traces or not _may_see(traces, key, admin_token):
        raise unknown_request(response_id)
    return traces


def _may_see(traces: Sequence[RequestTrace], key: str, admin_token: str) -> bool:
    caller = CURRENT.get()
    if caller is not None:
        return Role.ADMIN in caller.roles or all(trace.owner and owns(caller.identity, trace.owner) for trace in traces)
    is_operator = bool(admin_token) and hmac.compare_digest(key.encode(), admin_token.encode())
    return is_operator or all(owns(key, trace.owner) for trace in traces)


def unknown_request(response_id: str) -> ApiError:
    """404: the caller may not know of the request, or there is none."""
    message = (
        f"id: got {response_id!r}, expected the 'id' of an answer to a request that was sent with the same key "
        "and that the log still holds"
    )
    return ApiError(message, status=404, param="id", code="request_not_found")


def explanation(response_id: str, traces: Sequence[RequestTrace]) -> Explanation:
    """Merges the decision traces of an answer (at least one) into one explanation."""
    by_choice = sorted(traces, key=lambda trace: (trace.choice, trace.request_id))
    grouped = [list(group) for _, group in itertools.groupby(by_choice, key=lambda trace: trace.request_id)]
    known = [(group, _decisions(group)) for group in grouped]
    received_at = min((decision.at for _, pairs in known for decision, _ in pairs), default=0.0)
    return Explanation(
        id=response_id,
        received_at=received_at,
        choices=[_choice(group, pairs, received_at) for group, pairs in known],
    )


def _decisions(traces: Sequence[RequestTrace]) -> list[tuple[Decision, RequestTrace]]:
    """All decisions in order of time, each with the trace that holds it."""
    pairs = [(decision, trace) for trace in traces for decision in unpack_decisions(trace.decisions)]
    return sorted(pairs, key=lambda pair: pair[0].at)


def _choice(
    traces: Sequence[RequestTrace], pairs: Sequence[tuple[Decision, RequestTrace]], received_at: float
) -> ExplainedChoice:
    asked = [trace for trace in traces if trace.source == "ingress"] or traces
    ended = all(trace.ended for trace in asked)
    summary = _summary([decision for decision, _ in pairs])
    outlook = {} if ended else _outlook(pairs)
    return ExplainedChoice(
        index=traces[0].choice,
        request_id=traces[0].request_id,
        status="ended" if ended else "running",
        state=None if ended else outlook.get("state", "queued"),
        age_s=None if ended else round(_age_s(received_at), 6),
        prefilled_tokens=outlook.get("prefilled_tokens"),
        output_tokens=int(outlook.get("output_tokens", summary.output_tokens or 0)),
        eta_p50=outlook.get("p50_s"),
        eta_p90=outlook.get("p90_s"),
        eta_coarse=bool(outlook.get("coarse", 0)),
        summary=summary,
        num_left_out=sum(trace.num_left_out for trace in traces),
        decisions=[_decision(decision, trace, received_at) for decision, trace in pairs],
    )


def _outlook(pairs: Sequence[tuple[Decision, RequestTrace]]) -> dict[str, Any]:
    """The latest word of a replica on a request in flight; empty if it is on none."""
    return next((dict(decision.facts) for decision, _ in reversed(pairs) if decision.kind == "outlook"), {})


def _age_s(stamp: float) -> float:
    """Seconds since a stamp, which this process or another made of its steady clock a moment ago."""
    return time.monotonic() - (stamp - (time.time() - time.monotonic()))


def _decision(decision: Decision, trace: RequestTrace, received_at: float) -> ExplainedDecision:
    return ExplainedDecision(
        at_s=round(decision.at - received_at, 6),
        kind=decision.kind,
        by="router" if decision.kind == "placed" else trace.source,
        attempt=int(decision.facts["attempt"]) if "attempt" in decision.facts else trace.attempt,
        text=sentence(decision),
        facts={name: value for name, value in decision.facts.items() if isinstance(value, str) or math.isfinite(value)},
    )


def _summary(decisions: Sequence[Decision]) -> RequestSummary:
    facts: dict[str, Any] = {}
    for decision in decisions:
        facts.update(decision.facts if decision.kind in ("placed", "finished", "answered", "first_token") else {})
        if decision.kind == "forecast":
            facts["predicted_tokens"] = decision.facts.get("mean_tokens")
    kinds = [decision.kind for decision in decisions]
    waits_s = sum(float(decision.facts.get("waited_s", 0.0)) for decision in decisions)
    return RequestSummary(
        replica=facts.get("replica"),
        waited_s=max(waits_s, float(facts.get("all_waits_s", 0.0))),  # the trace may have dropped some waits
        ttft_s=facts.get("ttft_s"),
        jct_s=facts.get("jct_s"),
        output_tokens=facts.get("output_tokens"),
        predicted_tokens=facts.get("predicted_tokens"),
        finish_reason=facts.get("reason") if "answered" in kinds or "finished" in kinds else None,
        num_preemptions=sum(kind in ("preempted", "offloaded") for kind in kinds),
        num_resumptions=kinds.count("resumed"),
    )
