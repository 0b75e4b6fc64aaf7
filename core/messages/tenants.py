"""What ingress replicas and the Supervisor tell each other about tenants: counts, what is left of limits, usage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant; 0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class TenantCounts:
    """From an ingress replica: its counts of one tenant since the replica started.

    Attributes:
        rejected: Requests that a limit of the tenant refused.
        in_flight: Requests in flight there now.
        requests_left, tokens_left: The replica's belief of the limits' rest; a new Supervisor begins with it.
        gpu_s: GPU-seconds of complete answers.
    """

    tenant: str
    limits: TenantLimits
    requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    rejected: int
    in_flight: int
    requests_left: float
    tokens_left: float
    gpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantReport:
    """From an ingress replica to the Supervisor.

    Attributes:
        epoch: The life of the Supervisor that answered the last report; empty before the first answer.
        counts: Tenants whose counts changed since the last answered report, or that have requests in flight.
    """

    ingress_id: str
    epoch: str
    counts: tuple[TenantCounts, ...]


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """To an ingress replica: what is left for one tenant, over all ingress replicas.

    Attributes:
        in_flight_elsewhere: Requests in flight at the other ingress replicas, as last reported.
    """

    tenant: str
    requests_left: float
    tokens_left: float
    in_flight_elsewhere: int


@dataclass(frozen=True, slots=True)
class TenantBudgets:
    """The answer to a report, with a budget for each tenant in it; ``epoch`` names the life of the Supervisor."""

    epoch: str
    budgets: tuple[TenantBudget, ...]


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """Sums of one tenant over all ingress replicas since the service started."""

    tenant: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    rejected: int
    in_flight: int
    gpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantUsages:
    """Every tenant that has sent a request."""

    tenants: tuple[TenantUsage, ...]
