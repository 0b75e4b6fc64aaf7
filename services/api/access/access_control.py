"""What all requests of one process share in access control: keys, budgets of tenants, failures, metrics.

And the generator that counts the tokens of a tenant's requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from farsight.core.config.server import AccessConfig, listed
from farsight.core.errors import CapacityError, FarsightError, InvalidValueError
from farsight.core.images import EncodedImage, ImageFile
from farsight.core.messages.tenants import TenantBudgets, TenantCounts, TenantLimits, TenantUsage
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request
from farsight.policies.tenancy.budgets import Excess, LocalBudget
from farsight.services.api.access.key_file import read_key_file
from farsight.services.api.access.keys import (
    CURRENT,
    Caller,
    KeyRecord,
    KeyRing,
    Role,
    Tenant,
    owner_of,
    record_of,
    salt_of,
)
from farsight.services.api.backend import Generator, ModelInfo
from farsight.services.api.generation import PromptText, first_cached_len

API_KEY_VARIABLE = "FARSIGHT_API_KEY"
"""Environment variable with the one key of a server that has no key file, and with the key that a client sends."""

OPERATOR = "operator"
"""Tenant of the admin token."""

RELOAD_S = 1.0
"""How often the key file is looked at; so long a revoked key may still open a request."""

MAX_TENANT_LABELS = 200
"""Tenants with series of their own on ``/metrics``, by first request; all others are ``other``."""

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
Usage = Callable[[], Awaitable[tuple[TenantUsage, ...]]]


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """How access control is made.

    Attributes:
        key_file: None without one.
        api_key: The one key of the environment; empty for none. It may ``serve`` and ``observe``.
        admin_token: Counts as a key of every role where keys are in use.
        hosts: Allowed names in ``Host`` headers; empty allows all.
        behind_haproxy: Whether our own HAProxy is in front.
    """

    key_file: Path | None = None
    api_key: str = field(default="", repr=False)
    admin_token: str = field(default="", repr=False)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    failures_per_minute: int = 30
    behind_haproxy: bool = False

    @property
    def uses_keys(self) -> bool:
        return self.key_file is not None or bool(self.api_key)


def access_settings(
    access: AccessConfig,
    environment: Mapping[str, str],
    admin_token: str = "",
    *,
    loopback_host: str = "",
    behind_haproxy: bool = False,
) -> AccessSettings:
    """Returns the settings from the configuration and the environment.

    Args:
        loopback_host: Address of a server that is known to listen on the loopback interface alone; else empty.
    """
    key_file = Path(access.key_file) if access.key_file else None
    api_key = environment.get(API_KEY_VARIABLE, "")
    hosts = listed(access.allowed_hosts.lower())
    if not hosts and loopback_host and key_file is None and not api_key:
        hosts = (*LOOPBACK_HOSTS, loopback_host)
    return AccessSettings(
        key_file,
        api_key,
        admin_token,
        () if "*" in hosts else hosts,
        listed(access.cors_origins),
        access.failures_per_minute,
        behind_haproxy,
    )


MAX_ADDRESSES = 4096
"""Addresses that are counted at once; the one that failed longest ago is forgotten for a new one."""

MAX_SLOWED = 64
"""Answers that are held back at once; beyond them, wrong keys are answered without delay."""

SLOW_S = 1.0
"""Seconds that the answer to a wrong key is held back."""

MINUTE_S = 60.0


class Failures:
    """Failures of each address, forgotten at a steady rate.

    Args:
        per_minute: Failures of an address that are answered at once.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.num_slowed = 0

    def __len__(self) -> int:
        return len(self._known)

    def add(self, address: str, now: float) -> float:
        """Counts one failure. Returns the seconds until the address is below its number again; 0 if it is now."""
        network = _network(address)
        count, at = self._known.pop(network, (0.0, now))
        count = max(0.0, count - (now - at) * self._per_minute / MINUTE_S) + 1.0
        self._known[network] = min(count, 2.0 * self._per_minute), now
        if len(self._known) > MAX_ADDRESSES:
            self._known.popitem(last=False)
        return max(0.0, (count - self._per_minute) * MINUTE_S / self._per_minute)


def _network(address: str) -> str:
    """An IPv6 client usually has a whole /64, so that is what is counted."""
    if ":" not in address:
        return address[:64]
    try:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address[:64]


class AccessControl:
    """Decides who may come in; one object for each process that serves HTTP.

    Args:
        now: A monotonic clock in seconds.
        usage: Sums of all tenants over all processes; None: of this process alone.

    Attributes:
        on_gone: Called with the tenants whose last key is gone.

    Raises:
        FarsightError: The key file cannot be used.
    """

    def __init__(
        self,
        settings: AccessSettings,
        registry: CollectorRegistry | None = None,
        now: Clock = time.monotonic,
        usage: Usage | None = None,
    ) -> None:
        self.settings = settings
        self.now = now
        self.failures = Failures(settings.failures_per_minute)
        self._usage = usage
        self._static = _static_records(settings)
        self._stamp: tuple[int, ...] | None = None
        self._looked_at = -RELOAD_S
        self.on_gone: Callable[[frozenset[str]], object] = lambda _: None
        self._keys = KeyRing()
        self._budgets: dict[str, LocalBudget] = {}
        self.metrics = AccessMetrics(registry or CollectorRegistry())
        if settings.uses_keys:
            self._load()

    @property
    def is_open(self) -> bool:
        """Whether no keys are in use, so that every client may do what needs no admin token."""
        return not self.settings.uses_keys

    def find(self, key: bytes) -> Caller | None:
        """Whose key it is, by the file of the last second."""
        self.refresh()
        return self._keys.find(key)

    def refresh(self) -> None:
        """Reads the key file if it has changed, at most once a second; tells which tenants have no key any more."""
        now = self.now()
        if now - self._looked_at >= RELOAD_S:
            self._looked_at = now
            before = self._keys.tenants
            self._reload()
            gone = before - self._keys.tenants
            if gone:
                self.on_gone(gone)

    @property
    def tenants(self) -> frozenset[str]:
        """Names of the tenants that have a key."""
        return self._keys.tenants

    def caller_of(self, tenant: str) -> Caller | None:
        """Who runs what a tenant has left to be run later; None if no key belongs to it any more."""
        found = self._keys.tenant(tenant)
        return None if found is None else Caller("batch", found, frozenset((Role.SERVE,)))

    def _load(self) -> None:
        path = self.settings.key_file
        if path is None:
            self._keys = KeyRing(self._static)
            return
        self._stamp = _stamp(path)
        content = read_key_file(path)
        self._keys = KeyRing((*content.keys, *self._static), content.tenants)

    def _reload(self) -> None:
        """Keeps the last good keys while the file cannot be used."""
        path = self.settings.key_file
        if path is None or _stamp(path) == self._stamp:
            return
        try:
            self._load()
        except FarsightError as error:
            self.metrics.failed_reloads.inc()
            logger.error("the last good API keys stay in use: %s", error)

    def failed(self, reason: str) -> None:
        self.metrics.failed_keys.labels(reason).inc()

    def admit(self, tenant: Tenant, *, resumes: bool = False) -> tuple[LocalBudget, Excess | None]:
        """Counts a request of the tenant that begins; ``resumes`` as for ``LocalBudget.admit``."""
        budget = self.budget(tenant)
        excess = budget.admit(self.now(), resumes=resumes)
        self.metrics.request(tenant.name, excess)
        return budget, excess

    def budget(self, tenant: Tenant) -> LocalBudget:
        now = self.now()
        limits = TenantLimits(tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_in_flight)
        budget = self._budgets.get(tenant.name)
        if budget is None:
            self._budgets[tenant.name] = budget = LocalBudget(tenant.name, limits, now)
        else:
            budget.set_limits(limits, now)
        return budget

    def take_due(self) -> list[TenantCounts]:
        """Counts to report: those that changed since the last call, and those of tenants with requests in flight."""
        now = self.now()
        due = [budget for budget in self._budgets.values() if budget.is_due or budget.in_flight]
        for budget in due:
            budget.is_due = False
        return [budget.counts(now) for budget in due]

    def not_reported(self, reported: Iterable[TenantCounts]) -> None:
        """The report has not arrived: the next one holds the same tenants."""
        for counts in reported:
            self._budgets[counts.tenant].is_due = True

    def correct(self, budgets: TenantBudgets, reported: Iterable[TenantCounts]) -> None:
        """The answer to a report."""
        by_tenant = {counts.tenant: counts for counts in reported}
        for budget in budgets.budgets:
            self._budgets[budget.tenant].correct(budget, by_tenant[budget.tenant], self.now())

    async def usage(self) -> tuple[TenantUsage, ...]:
        """Sums of all tenants over all processes; of this one where the others cannot be asked now."""
        if self._usage is not None:
            with contextlib.suppress(FarsightError):
                return await self._usage()
        return tuple(_own_usage(budget.counts(self.now())) for _, budget in sorted(self._budgets.items()))


class AccessMetrics:
    """Series of access control; a tenant beyond ``MAX_TENANT_LABELS`` is counted as ``other``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.failed_keys = Counter(
            "farsight:failed_keys", "Requests refused for their key, by reason.", ("reason",), registry=registry
        )
        self.failed_reloads = Gauge(
            "farsight:failed_key_reloads", "Times that a changed key file could not be used.", registry=registry
        )
        self._requests = Counter(
            "farsight:tenant_requests", "Requests that were let in.", ("tenant",), registry=registry
        )
        self._rejected = Counter(
            "farsight:tenant_rejected", "Requests that a limit refused.", ("tenant", "limit"), registry=registry
        )
        self._tokens = Counter("farsight:tenant_tokens", "Tokens of requests.", ("tenant", "kind"), registry=registry)
        self._gpu_seconds = Counter(
            "farsight:tenant_gpu_seconds", "GPU-seconds of answers, as in their usage.", ("tenant",), registry=registry
        )
        self._labels: dict[str, str] = {}

    def request(self, tenant: str, excess: Excess | None) -> None:
        if excess is None:
            self._requests.labels(self._label(tenant)).inc()
        else:
            self._rejected.labels(self._label(tenant), excess.what).inc()

    def spent(self, tenant: str, prompt: int, output: int, gpu_s: float) -> None:
        label = self._label(tenant)
        if prompt:
            self._tokens.labels(label, "prompt").inc(prompt)
        if output:
            self._tokens.labels(label, "output").inc(output)
        self._gpu_seconds.labels(label).inc(gpu_s)

    def _label(self, tenant: str) -> str:
        label = self._labels.get(tenant)
        if label is None:
            if len(self._labels) >= MAX_TENANT_LABELS:
                return "other"
            self._labels[tenant] = label = tenant
        return label


def _static_records(settings: AccessSettings) -> tuple[KeyRecord, ...]:
    records = []
    if settings.api_key:
        records.append(record_of(settings.api_key, "api-key", "default", (Role.SERVE, Role.OBSERVE)))
    if settings.admin_token:
        records.append(record_of(settings.admin_token, "admin-token", OPERATOR, (Role.ADMIN,)))
    return tuple(records)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes with every replacement and every write; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def _own_usage(counts: TenantCounts) -> TenantUsage:
    return TenantUsage(
        counts.tenant,
        counts.requests,
        counts.prompt_tokens,
        counts.output_tokens,
        counts.cached_tokens,
        counts.rejected,
        counts.in_flight,
        counts.gpu_s,
    )


@contextlib.contextmanager
def in_flight(budget: LocalBudget, now: Clock) -> Iterator[None]:
    """An admitted request, until it ends in whatever way."""
    try:
        yield
    finally:
        budget.done(now())


class MeteredGenerator:
    """Runs requests on another generator for the caller's tenant; routes need not know about tenants.

    Args:
        shares_prefixes: Whether tenants share cached prefixes with each other.
    """

    def __init__(self, generator: Generator, access: AccessControl, *, shares_prefixes: bool) -> None:
        self._generator = generator
        self._access = access
        self._shares_prefixes = shares_prefixes

    @property
    def model(self) -> ModelInfo:
        return self._generator.model

    def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        """As ``Generator.stream``; tokens count for the caller's tenant as they come.

        Where keys are in use, the tenant's name is the ``key`` that requests in flight are counted by.
        """
        caller = CURRENT.get()
        if caller is None:
            return self._generator.stream(request, text, key)
        deltas = self._generator.stream(self._owned(request, caller), text, caller.tenant.name)
        # The prompt of a request that goes on has been counted.
        return self._counted(deltas, 0 if request.output_ids else request.prompt_len, caller)

    def _owned(self, request: Request, caller: Caller) -> Request:
        """The request with the tenant of the caller: its share, priority, owner and cache salt."""
        origin, salt = request.origin, request.cache_salt
        return dataclasses.replace(
            request,
            priority=caller.tenant.priority(request.priority),
            origin=None if origin is None else dataclasses.replace(origin, owner=owner_of(caller.identity)),
            cache_salt=salt if self._shares_prefixes else salt_of(caller.identity, salt),
            tenant=caller.tenant.name,
            weight=caller.tenant.weight,
        )

    async def _counted(
        self, deltas: AsyncGenerator[TokenDelta, None], prompt: int, caller: Caller
    ) -> AsyncGenerator[TokenDelta, None]:
        """Counts the prompt unless the backend refuses it, and each token when it comes."""
        budget, now = self._access.budget(caller.tenant), self._access.now
        output, gpu_s = 0, 0.0
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    output += delta.num_tokens
                    gpu_s += delta.gpu_s
                    cached = first_cached_len(delta)
                    budget.spend(now(), output=delta.num_tokens, cached=cached, gpu_s=delta.gpu_s)
                    yield delta
        except (CapacityError, InvalidValueError):
            prompt = 0
            raise
        finally:
            budget.spend(now(), prompt=prompt)
            self._access.metrics.spent(caller.tenant.name, prompt, output, gpu_s)

    async def see(self, files: Sequence[ImageFile], salt: str) -> tuple[EncodedImage, ...]:
        """As ``Generator.see``; what is kept of a picture is shared as cached prefixes are."""
        caller = CURRENT.get()
        if caller is not None and not self._shares_prefixes:
            salt = salt_of(caller.identity, salt)
        return await self._generator.see(files, salt)
