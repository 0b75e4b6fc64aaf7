"""The Ray actor: a process that hosts components, one under ``split`` and several under ``fused``."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import ray
from prometheus_client import CollectorRegistry, generate_latest

from farsight.actors.calls.message import declared
from farsight.actors.calls.supervisor import HostCalls
from farsight.actors.pulse import own_life
from farsight.actors.runtime.component import Component, ComponentContext, component_class, gone_ingresses
from farsight.actors.runtime.health import HealthServer
from farsight.actors.runtime.log_lines import send_log_lines
from farsight.actors.runtime.metrics import RefusedMessages, show_degraded
from farsight.actors.runtime.names import HOST
from farsight.actors.runtime.peer import PeerLost, Site
from farsight.actors.runtime.remote import listen
from farsight.actors.runtime.watching import Lives, own_node, period_s
from farsight.core.codec import encode
from farsight.core.decisions import pack_decisions
from farsight.core.errors import MessageError
from farsight.core.messages.series import Activities, Activity, Count, NamesQuery, RecentDecisions, RecentReply
from farsight.core.messages.status import ComponentRows, ComponentStatus, Pulse

logger = logging.getLogger(__name__)


class ComponentHost(HostCalls):
    """Hosts components and passes messages on to them.

    Args:
        host: Name of this host (``actors.runtime.names.host_of``).
        restarts: How often the Supervisor has started this host again.
        last_end: Why the Supervisor last started this host again.
    """

    def __init__(self, host: str, site: Site, restarts: int, last_end: str = "") -> None:
        send_log_lines(host, site.config.server.log_format, site.config.server.log_level)
        self._host = host
        self._site = site
        self._last_end = last_end
        self._restarts = restarts
        self._components: dict[str, Component] = {}
        self._registry = CollectorRegistry()
        self._refused = RefusedMessages(self._registry)
        self._peers = site.peers(self._components, host)
        show_degraded(
            self._registry, lambda: [(each.name, each.context.degraded) for each in self._components.values()]
        )
        self._health = HealthServer(self._registry, self._rows)
        self._port = 0
        self._lock = asyncio.Lock()
        self._address: str | None = None
        self._listener: asyncio.Server | None = None  # uvloop closes a listener without references
        self._listening = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._broken = asyncio.Event()

    async def add(self, names: list[str], sites: Mapping[str, Site] | None = None) -> None:
        """Hosts and starts these components; returns when they have started. Components already here stay as they are.

        Args:
            sites: By component name, the site that it starts with in place of the host's own site.

        Raises:
            FarsightError: A component cannot start.
        """
        async with self._lock:
            if not self._port:
                self._port = await self._health.start()
                await self._begin_beating()
            new = [name for name in names if name not in self._components]
            for name in new:
                self._components[name] = self._make(name, (sites or {}).get(name, self._site))
            for name in new:
                try:
                    await self._components[name].start()
                except Exception:
                    del self._components[name]
                    raise

    async def remove(self, name: str) -> None:
        """Ends a component; does nothing if it is not here."""
        async with self._lock:
            component = self._components.pop(name, None)
            if component is not None:
                await component.stop()

    async def close(self) -> None:
        """Ends every component and stops answering, for a process that goes on without components."""
        for name in list(self._components):
            await self.remove(name)
        await self._health.stop()
        if self._beating is not None:
            self._beating.cancel()
        if self._listener is not None:
            self._listener.close()

    async def call(self, name: str, method: str, data: bytes) -> Any:
        """Gives a message to a component.

        Raises:
            PeerLost: The component is not here, or not yet.
            MessageError: The message is refused, which is counted; nothing else happens.
        """
        if name == HOST:
            return await self._answer(method, data)
        component = self._components.get(name)
        if component is None:
            raise PeerLost(name)
        return await component.answer(method, data)

    async def _answer(self, method: str, data: bytes) -> bytes:
        message = declared(HostCalls).get(method)
        if message is None:
            raise MessageError("HostCalls.method", method, "a message that a process answers")
        return message.write_reply(await getattr(self, method)(*message.read_request(data)))

    async def local_address(self) -> tuple[str, str]:
        """Returns the node's id and the socket address where callers on this node may send what ``call`` takes."""
        async with self._listening:
            if self._address is None:
                self._address, self._listener = await listen(self.call)
        return ray.get_runtime_context().get_node_id(), self._address

    async def pulse(self) -> bytes:
        """Returns an encoded ``Pulse``: a sign of life, and the work under way in the components."""
        components = self._components.values()
        at = (each.work for each in components)
        starting = any(each.state == "starting" for each in components)
        return encode(Pulse(own_life(own_node()), tuple(work for work in at if work is not None), starting))

    async def site(self) -> Site:
        """Returns the site that the host was started with."""
        return self._site

    async def rows(self) -> ComponentRows:
        """Returns the status of every component here."""
        return ComponentRows(tuple(self._rows()))

    async def activity(self, query: NamesQuery) -> Activities:
        """Returns the status and counts of the named components that are here."""
        return Activities(tuple(Activity(self._row(each), _counts(each)) for each in self._named(query)))

    async def recent(self, query: NamesQuery) -> RecentReply:
        """Returns the last decisions of the named components that are here."""
        return RecentReply(
            tuple(RecentDecisions(each.name, pack_decisions(each.recent())) for each in self._named(query))
        )

    def _named(self, query: NamesQuery) -> list[Component]:
        return [self._components[name] for name in query.names if name in self._components]

    async def metrics(self) -> str:
        """Returns what /metrics shows, for readers that cannot reach the port of this process."""
        return generate_latest(self._registry).decode()

    async def restarts(self) -> int:
        """Returns how often this host had been started before."""
        return self._restarts

    async def ended(self) -> None:
        """Raises the exception that broke a component; never returns. Its caller also sees the process die."""
        await self._broken.wait()
        assert self._failure is not None
        raise self._failure

    async def _begin_beating(self) -> None:
        """Lets watchers tell an event loop that hangs from one without messages: this task makes the loop turn."""
        self._beating = asyncio.create_task(self._beat())
        if ray.is_initialized():  # from now on watchers read the clock of this event loop's thread
            await Lives(self._site.namespace).put(self._host)

    async def _beat(self) -> None:
        while True:  # noqa: ASYNC110, the turns are what it is for
            await asyncio.sleep(period_s(self._site.config.actors.silence_s))

    def _make(self, name: str, site: Site) -> Component:
        context = ComponentContext(
            name, site, self._restarts, self._peers, self._registry, self._refused.count, gone=gone_ingresses
        )
        component = component_class(name, site.config)(context)
        component.failed.add_done_callback(self._component_failed)
        return component

    def _component_failed(self, failed: asyncio.Future[None]) -> None:
        self._failure = failed.exception()
        logger.error("a component has failed", exc_info=self._failure)  # its watcher may be in this process
        self._broken.set()

    def _rows(self) -> list[ComponentStatus]:
        return [self._row(component) for component in self._components.values()]

    def _row(self, component: Component) -> ComponentStatus:
        return ComponentStatus(
            name=component.name,
            kind=component.kind,
            pid=os.getpid(),
            node=socket.gethostname(),
            state="failed" if component.failed.done() else component.state,
            queue=component.queue,
            last_step_age_s=component.last_step_age_s,
            restarts=self._restarts,
            http_port=self._port,
            url=component.url,
            breaker=component.breaker,
            last_end=self._last_end,
            degraded=component.context.degraded.reason(time.monotonic()),
            loaded=component.loaded,
            preparing=component.preparing,
        )


def _counts(component: Component) -> tuple[Count, ...]:
    own = [Count(name, value) for name, value in component.work_done.items()]
    return *own, Count("messages", component.num_answered)
