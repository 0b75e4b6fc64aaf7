"""What would have been: a question to the process of an ingress replica that simulates, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from core.costs import StepCost
from core.messages.log import FinishedRequest


@dataclass(frozen=True, slots=True)
class ServedAs:
    """How the service runs requests.

    Attributes:
        kv_tokens, max_num_seqs, cost: Of a replica, as in ``LoadSnapshot``.
    """

    preset: str
    num_replicas: int
    kv_tokens: int
    max_num_seqs: int
    cost: StepCost


@dataclass(frozen=True, slots=True)
class LoggedWindow:
    """One request, those that ended around it, and how they were served."""

    request_id: str
    served: ServedAs
    records: tuple[FinishedRequest, ...]


@dataclass(frozen=True, slots=True)
class WhatIfQuestion:
    """``preset``, ``replicas`` and ``priority`` are the change; empty or None is as it was."""

    window: LoggedWindow
    preset: str = ""
    replicas: int | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """Of that request alone; seconds.

    Attributes:
        problem: Why there is no answer; else empty.
    """

    logged_jct_s: float = 0.0
    jct_s: float = 0.0
    before_ttft_s: float = 0.0
    before_jct_s: float = 0.0
    after_ttft_s: float = 0.0
    after_jct_s: float = 0.0
    problem: str = ""
