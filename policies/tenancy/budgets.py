"""Limits of tenants, counted over all ingress replicas without a wait for one of them.

Each ingress replica decides by a copy of the tenant's budget (``LocalBudget``) and reports its counts four times a
second; ``SharedBudgets``, in the Supervisor, adds up the counts and answers with the units left. Units that both of two
replicas admit between two reports are admitted twice at most and then owed: the budget goes below zero, and the tenant
waits until it has filled again. So in any W minutes the replicas together admit at most

    limit * (W + 1) + what arrived at the other replicas within one exchange

requests; with one replica the last term is 0. Tokens are counted when they are known, prompts at their start and
output as it comes, so the requests in flight may exceed the limit by their own tokens, which are owed as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from farsight.core.messages.tenants import (
    TenantBudget,
    TenantBudgets,
    TenantCounts,
    TenantLimits,
    TenantReport,
    TenantUsage,
)

MINUTE_S = 60.0
FORGET_IN_FLIGHT_S = 5.0
"""Seconds without a report after which an ingress replica counts as dead, and its requests in flight do not count."""


class Bucket:
    """A token bucket: holds one minute's limit and fills with the limit a minute; it may go below zero.

    Args:
        limit: Units a minute; 0 is no limit.
    """

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._at = now

    def refill(self, now: float) -> None:
        if now > self._at:
            self.level = min(float(self.limit), self.level + self.limit * (now - self._at) / MINUTE_S)
            self._at = now

    def take(self, units: float, now: float) -> None:
        self.refill(now)
        if self.limit:
            self.level -= units

    def set_limit(self, limit: int, now: float) -> None:
        """Sets a new limit; units already used stay used."""
        self.refill(now)
        if limit != self.limit:
            self.level = self.level + limit - self.limit if self.limit else float(limit)
            self.limit = limit

    def wait_s(self, units: float, now: float) -> float:
        """Returns the seconds until this many units are there; 0 if they are."""
        self.refill(now)
        missing = units - self.level
        return missing * MINUTE_S / self.limit if self.limit and missing > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Excess:
    """Why a request was refused.

    Attributes:
        what: ``requests``, ``tokens`` or ``in_flight``.
        retry_after_s: Seconds until a request would be admitted if no other came; 1 for ``in_flight``, since the ends
            of requests in flight are unknown.
    """

    what: str
    limit: int
    retry_after_s: float


class LocalBudget:
    """One tenant at one ingress replica: counts, and the units left as far as this replica knows."""

    def __init__(self, tenant: str, limits: TenantLimits, now: float) -> None:
        self.tenant = tenant
        self.limits = limits
        self.requests = Bucket(limits.requests_per_minute, now)
        self.tokens = Bucket(limits.tokens_per_minute, now)
        self.in_flight = 0
        self.is_due = False
        self.used_at = now
        self._elsewhere = 0
        self._requests = self._prompt_tokens = self._output_tokens = self._cached_tokens = self._rejected = 0
        self._gpu_s = 0.0

    def set_limits(self, limits: TenantLimits, now: float) -> None:
        if limits != self.limits:
            self.limits = limits
            self.requests.set_limit(limits.requests_per_minute, now)
            self.tokens.set_limit(limits.tokens_per_minute, now)

    def admit(self, now: float, *, resumes: bool = False) -> Excess | None:
        """Counts a request that begins; returns None if it may, else the limit exceeded. ``done`` ends an admitted one.

        Args:
            resumes: The request reads on a stream whose own request is in flight already (``hold``), so the limit of
                requests in flight does not apply.
        """
        self.is_due, self.used_at = True, now
        excess = self._excess(now, resumes=resumes)
        if excess is not None:
            self._rejected += 1
            return excess
        self.requests.take(1, now)
        self._requests += 1
        self.in_flight += 1
        return None

    def _excess(self, now: float, *, resumes: bool) -> Excess | None:
        limits = self.limits
        if limits.max_in_flight and not resumes and self.in_flight + self._elsewhere >= limits.max_in_flight:
            return Excess("in_flight", limits.max_in_flight, 1.0)
        wait_s = self.requests.wait_s(1.0, now)
        if wait_s > 0:
            return Excess("requests", limits.requests_per_minute, wait_s)
        wait_s = self.tokens.wait_s(1.0, now)  # a request may begin while a token is left
        if wait_s > 0:
            return Excess("tokens", limits.tokens_per_minute, wait_s)
        return None

    def hold(self, now: float) -> None:
        """Counts a request that goes on without its client as in flight once more, until ``done``."""
        self.in_flight += 1
        self.is_due, self.used_at = True, now

    def done(self, now: float) -> None:
        """Books the end of a request of the tenant."""
        self.in_flight -= 1
        self.is_due, self.used_at = True, now

    def spend(self, now: float, *, prompt: int = 0, output: int = 0, cached: int = 0, gpu_s: float = 0.0) -> None:
        """Books tokens and GPU-seconds of a request; ``cached`` tokens are part of its prompt and count in full."""
        self._prompt_tokens += prompt
        self._output_tokens += output
        self._cached_tokens += cached
        self._gpu_s += gpu_s
        self.tokens.take(prompt + output, now)
        self.is_due = True

    def counts(self, now: float) -> TenantCounts:
        self.requests.refill(now)
        self.tokens.refill(now)
        return TenantCounts(
            self.tenant,
            self.limits,
            self._requests,
            self._prompt_tokens,
            self._output_tokens,
            self._cached_tokens,
            self._rejected,
            self.in_flight,
            self.requests.level,
            self.tokens.level,
            self._gpu_s,
        )

    def correct(self, budget: TenantBudget, reported: TenantCounts, now: float) -> None:
        """Takes over the Supervisor's budget, less the units used here since the report."""
        used = self._prompt_tokens + self._output_tokens - reported.prompt_tokens - reported.output_tokens
        self.requests.refill(now)
        self.tokens.refill(now)
        self.requests.level = budget.requests_left - (self._requests - reported.requests)
        self.tokens.level = budget.tokens_left - used
        self._elsewhere = budget.in_flight_elsewhere


@dataclass(slots=True)
class _SharedTenant:
    """One tenant over all ingress replicas; the last report of each with its instant.

    A replica that has ended keeps its entry, for the usage: one entry for each ingress replica ever started.
    """

    requests: Bucket
    tokens: Bucket
    last: dict[str, tuple[TenantCounts, float]] = field(default_factory=dict)


class SharedBudgets:
    """All tenants, over all ingress replicas.

    Reports hold counts since the replica's start, so a report that comes twice changes nothing.

    Args:
        epoch: Names this life of the Supervisor.
    """

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._tenants: dict[str, _SharedTenant] = {}

    def report(self, report: TenantReport, now: float) -> TenantBudgets:
        """Counts the units new in the report; returns the budgets that are left."""
        budgets = tuple(self._count(report, counts, now) for counts in report.counts)
        return TenantBudgets(self._epoch, budgets)

    def _count(self, report: TenantReport, counts: TenantCounts, now: float) -> TenantBudget:
        limits = counts.limits
        tenant = self._tenants.get(counts.tenant)
        if tenant is None:
            tenant = _SharedTenant(Bucket(limits.requests_per_minute, now), Bucket(limits.tokens_per_minute, now))
            self._tenants[counts.tenant] = tenant
        tenant.requests.set_limit(limits.requests_per_minute, now)
        tenant.tokens.set_limit(limits.tokens_per_minute, now)
        if report.ingress_id in tenant.last or report.epoch in ("", self._epoch):
            before, _ = tenant.last.get(report.ingress_id, (None, 0.0))
            tenant.requests.take(counts.requests - (before.requests if before else 0), now)
            tenant.tokens.take(_num_tokens(counts) - (_num_tokens(before) if before else 0), now)
        else:  # An earlier Supervisor has counted these; only the replica knows what it left.
            tenant.requests.take(0, now)
            tenant.tokens.take(0, now)
            tenant.requests.level = min(tenant.requests.level, counts.requests_left)
            tenant.tokens.level = min(tenant.tokens.level, counts.tokens_left)
        tenant.last[report.ingress_id] = counts, now
        elsewhere = sum(
            other.in_flight
            for ingress_id, (other, at) in tenant.last.items()
            if ingress_id != report.ingress_id and now - at < FORGET_IN_FLIGHT_S
        )
        return TenantBudget(counts.tenant, tenant.requests.level, tenant.tokens.level, elsewhere)

    def usage(self, now: float) -> tuple[TenantUsage, ...]:
        """Returns the usage of every tenant, in order of name."""
        return tuple(self._usage(name, tenant, now) for name, tenant in sorted(self._tenants.items()))

    @staticmethod
    def _usage(name: str, tenant: _SharedTenant, now: float) -> TenantUsage:
        every = [counts for counts, _ in tenant.last.values()]
        recent = [counts for counts, at in tenant.last.values() if now - at < FORGET_IN_FLIGHT_S]
        return TenantUsage(
            name,
            sum(each.requests for each in every),
            sum(each.prompt_tokens for each in every),
            sum(each.output_tokens for each in every),
            sum(each.cached_tokens for each in every),
            sum(each.rejected for each in every),
            sum(each.in_flight for each in recent),
            sum(each.gpu_s for each in every),
        )


def _num_tokens(counts: TenantCounts) -> int:
    return counts.prompt_tokens + counts.output_tokens
