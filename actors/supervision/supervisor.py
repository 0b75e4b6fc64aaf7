"""Supervisor: knows which components should be alive, detects deaths and restarts dead components.

No state of this process needs to survive. A new Supervisor adopts living actors by their names. Desired numbers and
restart counts are in the cluster's key-value store, because an actor that died together with the previous Supervisor
can no longer be found by name. The Supervisor does not use Ray's ``max_restarts``: for a restarting actor Ray fails
callers only when the actor is back, a second later; for a dead actor within 15 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, RayActorError, RayTaskError

from farsight.actors.calls.supervisor import SupervisorCalls
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.hosts import Homes, find_host, list_hosts, recreate_host, remove_rank_group, until_gone
from farsight.actors.runtime.metrics import ComponentRestarts
from farsight.actors.runtime.names import (
    IMAGE_ENCODER,
    SCALABLE,
    SUPERVISOR,
    by_host,
    host_of,
    initial_counts,
    own_replicas,
    wanted_components,
)
from farsight.actors.runtime.peer import LOOK_AGAIN_S, PeerLost, again_and_again, answer_of, reaches
from farsight.actors.runtime.shared_rows import drop_rows_of
from farsight.actors.runtime.watching import ClusterStore, watched
from farsight.actors.supervision.autoscaling import Autoscaler, scaled, takes_requests, without_drains
from farsight.actors.supervision.history import History
from farsight.actors.supervision.ingress_reports import IngressReports
from farsight.actors.supervision.upgrade import RollingUpgrade, check_room
from farsight.core.codec import decode, encode
from farsight.core.errors import FarsightError, MessageError
from farsight.core.messages import series as messages
from farsight.core.messages.fleet import ReplicaName
from farsight.core.messages.status import ComponentCounts, Scale, SeenService, StartState
from farsight.core.messages.supervision import (
    DrainProgress,
    DrainReplica,
    DrainService,
    IngressOrders,
    IngressReport,
    ServedWeights,
    Upgrade,
)
from farsight.core.messages.tenants import TenantBudgets, TenantReport, TenantUsages
from farsight.policies.tenancy.budgets import SharedBudgets

HEALTHY_AFTER_S = 10.0
"""A host that lived for so many seconds is restarted at once. After a second shorter life in a row the restart is
delayed, each time for twice as long ..."""

MAX_BACKOFF_S = 5.0
"""... up to so many seconds."""

HISTORY_PAUSE_S = 2.0
"""Seconds of pause after a fault in the history, which no decision needs."""

DRAIN_S = 20.0
"""Seconds that a replica which is being removed may take to finish its requests; the rest is resumed elsewhere."""

_ONE_STAYS = "one of several that take requests: no other replica is left; TERM drains the whole service"

_COUNTS = "counts"
"""Key of the stored ``ComponentCounts``."""

logger = logging.getLogger(__name__)


class Supervisor(Component, SupervisorCalls):
    """Runs one task for each host; the task starts, watches and restarts the host."""

    kind = "Supervisor"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        self._site = context.site
        self._own = host_of(SUPERVISOR, self._site.placement)
        self._counts = initial_counts(context.config, sees=self._site.sees)
        self._store = ClusterStore(self._site.namespace)
        self._homes = Homes(self._store, on_gpu=context.config.engine.device == "cuda")
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._started: dict[str, asyncio.Future[None]] = {}
        self._restarts = ComponentRestarts(context.registry)
        self._scaling = asyncio.Lock()
        self._acted_at = time.monotonic()
        self._has_taken_over = False
        self._num_created = 0
        self._tenants = SharedBudgets(uuid.uuid4().hex)
        self._ingresses = IngressReports()
        self._history = History(context.peers, context.config, lambda: self._counts, self._tenants)
        self._upgrade = RollingUpgrade(
            self._store, self._site.model_dir, self._ingresses, lambda: self._counts, self._change, self._renew
        )

    async def answer(self, method: str, data: bytes) -> bytes:
        """Answers a message, once the Supervisor has taken over from an earlier one: before, it would report the counts
        and the weights that the service started with.

        Raises:
            PeerLost: The Supervisor has not taken over yet.
        """
        if not self._has_taken_over:
            raise PeerLost(self.name)
        return await super().answer(method, data)

    async def start(self) -> None:
        await self._take_over(await asyncio.to_thread(list_hosts, self._site.namespace))
        self._has_taken_over = True
        self._keep_wanted()
        self._started[self._own] = asyncio.get_running_loop().create_future()
        # Not awaited here: this process takes no other components before the Supervisor has started.
        self._watches[self._own] = self._watched(self._start_own())
        for replica in self._counts.draining:
            self.spawn(self._finish_drain(replica))
        if self._upgrade.is_under_way:
            self.spawn(self._finish_upgrade())
        self.spawn(self._ingresses.watch(self.context.gone))
        scaler = Autoscaler(self.context.config, self.context.peers, lambda: self._counts, self._scale)
        for task in scaler.tasks():
            self.spawn(task)
        self.spawn(again_and_again(self._history.run, HISTORY_PAUSE_S))  # its fault ends no Supervisor

    async def stop(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await super().stop()

    async def started(self) -> None:
        await asyncio.gather(*(asyncio.shield(future) for future in self._started.values()))

    async def start_state(self) -> StartState:
        started = self._started.items()
        ready = tuple(host for host, future in started if future.done() and future.exception() is None)
        waiting = tuple(host for host in self._started if host not in ready)
        return StartState(ready, waiting, self._history.loaded(), self._history.preparing())

    async def counts(self) -> ComponentCounts:
        return self._counts

    async def scale(self, scale: Scale) -> ComponentCounts:
        if scale.kind not in SCALABLE:
            raise MessageError("kind", scale.kind, f"one of {', '.join(SCALABLE)}")
        if scale.kind == IMAGE_ENCODER and not self._site.sees:
            raise MessageError("kind", scale.kind, "another kind: the served model reads no pictures")
        model = self.context.config.model
        follows = scale.kind == "replica" and model.max_replicas > 0
        low, high = (model.min_replicas, model.max_replicas) if follows else (1, 1000)
        if not low <= scale.count <= high:
            why = ", between which their number follows the load" if follows else ""
            raise MessageError("count", scale.count, f"an integer from {low} to {high}{why}")
        await self._scale(scale.kind, scale.count)
        return self._counts

    async def drain_replica(self, order: DrainReplica) -> ComponentCounts:
        known = list(map(str, range(self._counts.replicas)))
        if order.replica not in known:
            raise MessageError("replica", order.replica, f"one of {', '.join(known) or 'none: other servers answer'}")
        if order.cancel:
            await self._take_back(order.replica)
        elif order.replica not in self._counts.drained:
            await self._begin_drain(order.replica)
            await self._finish_drain(order.replica)
        return self._counts

    async def upgrade(self, order: Upgrade) -> ServedWeights:
        if self._upgrade.is_under_way:
            raise FarsightError("an upgrade is under way")
        if order.model_dir and self._site.sees:
            raise MessageError("model", order.model_dir, "no other weights: what a model sees is encoded by its own")
        if self._site.placement == "packed":
            raise MessageError("model", order.model_dir, "no upgrade: emulated devices share processes (packed)")
        # The upgrade goes on without the caller, which may end meanwhile.
        return await asyncio.shield(asyncio.create_task(self._begin_upgrade(order)))

    async def report_ingress(self, report: IngressReport) -> IngressOrders:
        drain_s = self._ingresses.report(report, time.monotonic())
        upgrade, state = self._upgrade, self._upgrade.state
        return IngressOrders(drain_s, state.current, state.oldest, upgrade.switch_in_s(), upgrade.limits())

    async def drain_service(self, order: DrainService) -> DrainProgress:
        return self._ingresses.order(order, time.monotonic())

    async def count_tenants(self, report: TenantReport) -> TenantBudgets:
        return self._tenants.report(report, time.monotonic())

    async def tenant_usage(self) -> TenantUsages:
        return TenantUsages(self._tenants.usage(time.monotonic()))

    async def count_traffic(self, counts: messages.TrafficCounts) -> None:
        self._history.report(counts)

    async def seen(self) -> SeenService | None:
        return self._history.seen()

    async def series(self, query: messages.SeriesQuery) -> messages.SeriesReply:
        return self._history.since(query)

    async def replica_series(self, query: messages.SeriesQuery) -> messages.TableReply:
        return self._history.of_replicas(query)

    async def component_series(self, query: messages.ComponentsQuery) -> messages.ComponentsReply:
        return self._history.of_components(query)

    async def _scale(self, kind: str, count: int, known: int | None = None) -> None:
        """Scales a kind, unless its number is no longer ``known``; None scales from any number."""
        async with self._scaling:
            before = self._counts
            if known not in (None, getattr(before, SCALABLE[kind])):
                return
            counts = scaled(before, kind, count)
            self.note("scaled", what=kind, count=count)
            try:
                await self._change(counts)
            except FarsightError:  # the added components cannot start
                await self._change(before)
                raise

    async def _change(self, counts: ComponentCounts) -> None:
        before, self._counts = self._counts, counts
        kept = own_replicas(counts)
        given_up = [replica for replica in own_replicas(before) if replica not in kept]
        for replica in given_up:
            if replica not in before.draining:  # else it has had its time to drain
                await self._drain(replica, DRAIN_S, lambda: True)
        for component in set(self._components(before)) - set(self._components(counts)):
            await self._end_component(component)
            await asyncio.to_thread(drop_rows_of, component)
        for replica in given_up:
            await reaches(self.context.peers.router().forget(ReplicaName(replica)))  # a new Router does not know it
            await asyncio.to_thread(remove_rank_group, replica, self._site)
            await self._homes.forget(replica)
        await self._store.put(_COUNTS, encode(counts))
        self._keep_wanted()
        await self._add_to_living()
        await self.started()

    @property
    def work_done(self) -> Mapping[str, float]:
        return {"processes started": self._num_created}

    @property
    def queue(self) -> int:
        """Number of hosts that have not come up yet."""
        return sum(not future.done() for future in self._started.values())

    @property
    def last_step_age_s(self) -> float | None:
        return time.monotonic() - self._acted_at

    async def _take_over(self, hosts: list[str]) -> None:
        """Takes over an earlier Supervisor's counts and hosts.

        The first Supervisor of a service finds no living process; stored values are then those of another service.
        """
        if all(host == self._own for host in hosts):
            await self._store.clear()
        data = await self._store.get(_COUNTS)
        if data is not None:
            self._counts = decode(data, ComponentCounts)
        await self._store.put(_COUNTS, encode(self._counts))
        await self._homes.load()
        await self._upgrade.load()

    def _components(self, counts: ComponentCounts) -> list[str]:
        return wanted_components(counts, self.context.config.model.num_ranks)

    def _wanted(self) -> dict[str, list[str]]:
        return by_host(self._components(self._counts), self._site.placement)

    def _keep_wanted(self) -> None:
        """Starts a task for every other wanted host that has none."""
        for host in self._wanted():
            if host not in self._watches and host != self._own:
                self._started[host] = asyncio.get_running_loop().create_future()
                self._watches[host] = self._watched(self._keep(host))

    def _watched(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs ``work`` as a task; if it raises, the Supervisor fails and is restarted."""
        task = asyncio.create_task(work)
        task.add_done_callback(
            lambda done: None if done.cancelled() or not done.exception() else self._task_ended(done)
        )
        return task

    async def _add_to_living(self) -> None:
        """Adds new components to living processes that host other components."""
        await self._add_own()
        for host in self._wanted():
            handle = find_host(host, self._site.namespace) if host != self._own else None
            if handle is not None:
                await self._add(host, handle)

    async def _add_own(self) -> None:
        """Adds the components that share this process; the watch of this process keeps them as well."""
        if self._own not in self._wanted():
            return
        handle = find_host(self._own, self._site.namespace)
        if handle is not None:
            await self._add(self._own, handle)

    async def _start_own(self) -> None:
        try:
            await self._add_own()
        except RayTaskError as error:
            self._not_started(self._own, error.cause)
        else:
            self._mark_started(self._own)

    async def _keep(self, host: str) -> None:
        stored = await self._store.get(_restarts_key(host))  # an earlier Supervisor may have started this life
        restarts, failures, why = (-1 if stored is None else int(stored)), 0, ""
        while True:
            self._acted_at = began = time.monotonic()
            handle = find_host(host, self._site.namespace)
            if handle is None:
                restarts += 1
                handle = await self._create(host, restarts, why)
            async with watched(host, handle, self._site) as watch:
                restarts, why = await self._live(host, handle, restarts)
            why = watch.verdict or why
            lived_s = time.monotonic() - began
            failures = 0 if lived_s >= HEALTHY_AFTER_S else failures + 1
            logger.warning("%s ended after %.1f s (%s); start %d follows", host, lived_s, why, restarts + 2)
            if failures > 1:
                await asyncio.sleep(min(MAX_BACKOFF_S, LOOK_AGAIN_S * 2**failures))

    async def _create(self, host: str, restarts: int, why: str) -> Any:
        self._num_created += 1
        self.note("process_started", host=host, start=restarts + 1, last_end=why or "none before")
        await self._store.put(_restarts_key(host), b"%d" % restarts)
        site = self._upgrade.site_of(host, self._site)
        return await recreate_host(host, site, restarts, await self._homes.of(host), why)

    async def _live(self, host: str, handle: Any, restarts: int) -> tuple[int, str]:
        """Adds the host's components and waits until the host ends; returns the restart count and the reason."""
        while True:
            try:
                restarts = await handle.restarts.remote()
                await self._add(host, handle)
                await handle.ended.remote()
            except ActorUnavailableError:  # its node may be lost; until Ray knows, the name is still taken
                await asyncio.sleep(LOOK_AGAIN_S)
            except ActorUnschedulableError:  # its node was lost before the start; the next start is on another one
                return restarts - 1, "its node was lost"
            except RayActorError as error:
                self._not_started(host, error)
                return restarts, "its process died"
            except RayTaskError as error:
                logger.error("a component of %s failed: %s", host, error.cause)
                self._not_started(host, error.cause)
                ray.kill(handle)
                return restarts, str(error.cause)

    async def _add(self, host: str, handle: Any) -> None:
        components = self._wanted().get(host, [])
        await handle.add.remote(components, {each: self._upgrade.site_of(each, self._site) for each in components})
        for component in components:
            self._restarts.set(component, await handle.restarts.remote())
        self._mark_started(host)

    def _mark_started(self, host: str) -> None:
        if not self._started[host].done():
            self._started[host].set_result(None)

    def _not_started(self, host: str, error: BaseException) -> None:
        """Fails the very first start of a host, which shows that it cannot work at all; later starts are repeated."""
        future = self._started[host]
        if future.done():
            return
        cause = error if isinstance(error, FarsightError) else FarsightError(f"{host} died while it started: {error}")
        future.set_exception(cause)

    async def _renew(self, component: str) -> None:
        """Ends a component and starts it again, together with its process if no other component shares that."""
        host = host_of(component, self._site.placement)
        handle = find_host(host, self._site.namespace)
        if handle is None:
            return  # its watch starts it
        if host == component:
            ray.kill(handle)  # its watch starts it again
            return
        with contextlib.suppress(RayActorError):  # its process has died; its watch starts all of it again
            await handle.remove.remote(component)
            await self._add(host, handle)

    async def _begin_drain(self, replica: str) -> None:
        """Stores that a replica drains, so that a later Supervisor finishes the drain as well."""
        async with self._scaling:
            before = self._counts
            if replica in before.draining:
                return
            counts = dataclasses.replace(before, draining=(*before.draining, replica))
            if not takes_requests(counts):
                raise MessageError("replica", replica, _ONE_STAYS)
            self._counts = counts
            await self._store.put(_COUNTS, encode(counts))

    async def _finish_drain(self, replica: str) -> None:
        """Ends a replica's processes when its requests or its time have ended, unless the drain is cancelled."""

        def goes_on() -> bool:
            return replica in self._counts.draining

        await self._drain(replica, self.context.config.server.drain_s, goes_on)
        async with self._scaling:
            if goes_on():
                counts = without_drains(self._counts, replica)
                await self._change(dataclasses.replace(counts, drained=(*counts.drained, replica)))

    async def _begin_upgrade(self, order: Upgrade) -> ServedWeights:
        async with self._scaling:
            if order.surge:
                await asyncio.to_thread(check_room, self.context.config)
            if await self._upgrade.begin(order, self.context.config):
                await self._run_upgrade()
            return self._upgrade.served()

    async def _finish_upgrade(self) -> None:
        """Finishes the upgrade that an earlier Supervisor began."""
        async with self._scaling:
            try:
                await self._run_upgrade()
            except FarsightError:
                logger.exception("the upgrade that an earlier Supervisor began has failed")

    async def _run_upgrade(self) -> None:
        """Runs the upgrade, repeating failed steps; raises FarsightError when every replica is on the old version."""
        while True:
            try:
                return await self._upgrade.run()
            except FarsightError:
                if not self._upgrade.is_under_way:
                    raise
                logger.exception("a step of an upgrade has failed and is tried again")
                await asyncio.sleep(MAX_BACKOFF_S)

    async def _take_back(self, replica: str) -> None:
        async with self._scaling:
            before = self._counts
            try:
                await self._change(without_drains(before, replica))
            except FarsightError:  # the replica cannot start
                await self._change(before)
                raise
        await reaches(self.context.peers.router().end_drain(ReplicaName(replica)))  # a new Router knows of no drain

    async def _drain(self, replica: str, drain_s: float, goes_on: Callable[[], bool]) -> None:
        """Stops new placements on the replica and waits for its requests; the rest is resumed elsewhere."""
        router = self.context.peers.router()
        deadline = time.monotonic() + drain_s
        while goes_on():
            left = await answer_of(router.drain(ReplicaName(replica)))
            if time.monotonic() > deadline or (left is not None and left.count == 0):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _end_component(self, component: str) -> None:
        host = host_of(component, self._site.placement)
        handle = find_host(host, self._site.namespace)
        if host == self._own or host in self._wanted():  # other components live on in that process
            if handle is not None:
                await handle.remove.remote(component)
            return
        watch = self._watches.pop(host, None)
        self._started.pop(host, None)
        if watch is not None:
            watch.cancel()
        if handle is not None:
            ray.kill(handle)
            await until_gone(host, self._site.namespace)
        await self._store.remove(_restarts_key(host))


def _restarts_key(host: str) -> str:
    return f"restarts/{host}"
