"""What would have become of requests under other conditions.

``GET /v1/requests/{id}/what-if`` is about one request of one's own, ``GET /live/what-if`` about the latest ones of all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from farsight.core.errors import FarsightError, InvalidValueError
from farsight.core.messages.log import RecentAnswer, RecentTimes, RequestTrace, WhatIfAnswer, WhatIfQuestion
from farsight.policies.presets import PRESETS
from farsight.services.api.access.keys import CURRENT, owner_of, sent_key
from farsight.services.api.backend import Operator
from farsight.services.api.errors import ApiError, or_unavailable
from farsight.services.api.fields import MAX_PRIORITY
from farsight.services.api.pages.explain import ERRORS, own_traces, unknown_request
from farsight.services.api.pages.what_if_process import WhatIfProcess
from farsight.services.words import counted

MAX_REPLICAS = 64
PER_MINUTE = 12
"""Questions of one key."""

MAX_KEYS = 1024
"""Keys whose questions are counted; the ones that asked longest ago are forgotten."""

SAME = 0.1
"""Times that differ by less are called about the same."""


class LifeTimes(BaseModel):
    """Seconds from the receipt to the first token and to the end."""

    ttft_s: float
    jct_s: float


class WhatIf(BaseModel):
    """A request with and without a change; seconds.

    Attributes:
        jct_s: What it would have taken: what it took, times the ratio of both simulated runs.
        as_simulated, changed: The runs as it was and with the change.
        is_whole: Whether all requests that can have had an effect were simulated; else the nearest of them.
        text: The answer as a sentence.
    """

    id: str
    object: Literal["request.what_if"] = "request.what_if"
    choice: int
    if_: Annotated[str, Query(serialization_alias="if")]
    jct_s: float
    logged_jct_s: float
    as_simulated: LifeTimes
    changed: LifeTimes
    is_whole: bool
    text: str


class Times(BaseModel):
    """Seconds to the first token and to the end of several requests: means, and the 99th percentile of the latter."""

    ttft_s: float
    jct_s: float
    jct_p99_s: float


class WhatIfRecent(BaseModel):
    """The latest requests, all alike, as logged and with a change.

    Attributes:
        changed: What was logged, times the ratio of two simulated runs: as served and with the change.
        text: The answer as a sentence.
    """

    object: Literal["requests.what_if"] = "requests.what_if"
    if_: Annotated[str, Query(serialization_alias="if")]
    num_requests: int
    logged: Times
    changed: Times
    text: str


class Turns:
    """One question at a time, and ``PER_MINUTE`` of each key."""

    def __init__(self) -> None:
        self._is_taken = False
        self._asked: OrderedDict[bytes, deque[float]] = OrderedDict()

    def take(self, owner: bytes, now: float) -> float:
        """Takes the turn; else seconds after which it may be free. 0 if it is taken."""
        times = self._asked.setdefault(owner, deque())
        self._asked.move_to_end(owner)
        if len(self._asked) > MAX_KEYS:
            self._asked.popitem(last=False)
        while times and now - times[0] >= 60.0:
            times.popleft()
        if len(times) >= PER_MINUTE:
            return 60.0 - (now - times[0])
        if self._is_taken:
            return 1.0
        times.append(now)
        self._is_taken = True
        return 0.0

    def give_back(self) -> None:
        self._is_taken = False


def what_if_routes(operator: Operator, admin_token: str) -> APIRouter:
    """Returns the routes: one for the requests that ``explain_routes`` shows to the same caller, one for operators."""
    router = APIRouter(responses=ERRORS)
    turns, process = Turns(), WhatIfProcess()

    async def ask(request: Request, request_id: str, unknown: ApiError, *change: Any) -> WhatIfAnswer:
        wait_s = turns.take(_asker(request), time.monotonic())
        if wait_s:
            message = f"the simulation is busy, or you asked {PER_MINUTE} times a minute; retry in {wait_s:.0f} s"
            headers = {"Retry-After": str(max(1, round(wait_s)))}
            raise ApiError(message, status=429, kind="rate_limit_error", code="what_if_busy", headers=headers)
        try:
            with or_unavailable():
                window = await operator.logged_around(request_id)
                if window is None:
                    raise unknown
                question = WhatIfQuestion(window, *change)
                answer = await asyncio.shield(asyncio.to_thread(process.ask, question))
                if answer.problem:
                    raise FarsightError(answer.problem)
                return answer
        finally:
            turns.give_back()

    @router.get("/live/what-if", tags=["operation"])
    async def what_if_recent(request: Request, preset: str = "", replicas: int | None = None) -> WhatIfRecent:
        change = _change(preset, replicas, None)
        nothing = ApiError("no request has ended yet", status=404, code="request_not_found")
        recent = (await ask(request, "", nothing, preset, replicas)).recent
        assert recent is not None
        return _recent_reply(change, recent)

    @router.get("/v1/requests/{response_id}/what-if", tags=["generation"])
    async def what_if(
        response_id: str,
        request: Request,
        preset: str = "",
        replicas: int | None = None,
        priority: int | None = None,
        choice: Annotated[int, Query(ge=0)] = 0,
    ) -> WhatIf:
        change = _change(preset, replicas, priority)
        traces = await own_traces(operator, response_id, sent_key(request.headers), admin_token)
        request_id = _ended(response_id, traces, choice)
        answer = await ask(request, request_id, unknown_request(response_id), preset, replicas, _allowed(priority))
        return _reply(response_id, choice, change, answer)

    return router


def _asker(request: Request) -> bytes:
    """Who is counted: the tenant, or the holder of a key that the service does not know."""
    caller = CURRENT.get()
    return owner_of(sent_key(request.headers) if caller is None else caller.identity)


def _change(preset: str, replicas: int | None, priority: int | None) -> str:
    """The change as a text.

    Raises:
        InvalidValueError: It is none, or out of range.
    """
    if preset and preset not in PRESETS:
        raise InvalidValueError("preset", preset, f"one of {', '.join(PRESETS)}")
    if replicas is not None and not 1 <= replicas <= MAX_REPLICAS:
        raise InvalidValueError("replicas", replicas, f"an integer from 1 to {MAX_REPLICAS}")
    if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidValueError("priority", priority, f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    given = {"preset": preset or None, "replicas": replicas, "priority": priority}
    change = ",".join(f"{name}={value}" for name, value in given.items() if value is not None)
    if not change:
        raise InvalidValueError("preset", None, "a preset, or replicas or priority: something that is different")
    return change


def _allowed(priority: int | None) -> int | None:
    """Within the range of the caller's tenant: no simulation tells of a class that it may not use."""
    caller = CURRENT.get()
    return priority if priority is None or caller is None else caller.tenant.priority(priority)


def _ended(response_id: str, traces: Sequence[RequestTrace], choice: int) -> str:
    """The id of the request behind a choice, which has ended."""
    own = [trace for trace in traces if trace.choice == choice]
    if not own:
        raise ApiError(f"choice: got {choice}, expected one of the answer's", param="choice", code="invalid_value")
    if not all(trace.ended for trace in own if trace.source == "ingress"):
        raise ApiError(f"id: {response_id!r} has not ended yet", status=409, param="id", code="request_running")
    return own[0].request_id


def _reply(response_id: str, choice: int, change: str, answer: WhatIfAnswer) -> WhatIf:
    ratio = answer.jct_s / answer.logged_jct_s if answer.logged_jct_s else 1.0
    left_out = "" if answer.is_whole else " The simulation left out the more distant requests to bound its work."
    compared = "about the same" if abs(ratio - 1) < SAME else f"{ratio:.2f} times that"
    return WhatIf(
        id=response_id,
        choice=choice,
        if_=change,
        jct_s=round(answer.jct_s, 3),
        logged_jct_s=round(answer.logged_jct_s, 3),
        as_simulated=LifeTimes(ttft_s=round(answer.before_ttft_s, 3), jct_s=round(answer.before_jct_s, 3)),
        changed=LifeTimes(ttft_s=round(answer.after_ttft_s, 3), jct_s=round(answer.after_jct_s, 3)),
        is_whole=answer.is_whole,
        text=f"With {change} it would have taken {_time(answer.jct_s)} instead of {_time(answer.logged_jct_s)}, "
        f"{compared}.{left_out}",
    )


def _recent_reply(change: str, recent: RecentAnswer) -> WhatIfRecent:
    def shown(times: RecentTimes) -> Times:
        return Times(**{name: round(value, 3) for name, value in dataclasses.asdict(times).items()})

    logged, changed = recent.logged, recent.changed
    is_same = abs(changed.jct_s / logged.jct_s - 1) < SAME if logged.jct_s else True
    text = (
        f"With {change} the last {counted(recent.num_requests, 'request')} would have ended after "
        f"{_time(changed.jct_s)} in the mean instead of {_time(logged.jct_s)}, and their first tokens would have come "
        f"after {_time(changed.ttft_s)} instead of {_time(logged.ttft_s)}{': about the same' if is_same else ''}."
    )
    return WhatIfRecent(
        if_=change, num_requests=recent.num_requests, logged=shown(logged), changed=shown(changed), text=text
    )


def _time(value_s: float) -> str:
    return f"{value_s:.2f} s" if value_s >= 1 else f"{1000 * value_s:.1f} ms"
