"""The process that speaks HTTP. Imports no torch: this process only parses, tokenises and streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farsight.actors.runtime.garbage import collect_when_quiet, leave_full_collections_to_us
from farsight.actors.runtime.hosts import keep_supervisor
from farsight.actors.runtime.log_lines import send_log_lines
from farsight.actors.runtime.peer import LOOK_AGAIN_S, PeerLost, Site, again_and_again
from farsight.core.config.server import ServerConfig, is_loopback
from farsight.core.errors import CapacityError, ConfigError
from farsight.core.messages.fleet import ServedModel
from farsight.engine.kv_files import clear, kept_in
from farsight.services.api.access.access_control import AccessControl, MeteredGenerator, access_settings
from farsight.services.api.admin import Administration
from farsight.services.api.app import build_app
from farsight.services.api.batches.files import Files
from farsight.services.api.batches.records import Batches
from farsight.services.api.batches.running import BatchRunner, RunningPlace
from farsight.services.api.body_workers import BodyWorkers
from farsight.services.api.middleware import LoopPace
from farsight.services.api.readiness import Readiness
from farsight.services.api.streams.manager import StreamManager
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.ingress.engine_client import EngineClient
from farsight.services.ingress.liveness import Liveness, publish
from farsight.services.ingress.paced_http import pace_http
from farsight.services.ingress.predictor_client import line_forecasts
from farsight.services.ingress.served_model import model_info
from farsight.services.ingress.supervisor_link import SUPERVISED_S, SupervisorLink, TenantExchange, TrafficReports
from farsight.services.proxy.haproxy import PROXY_DIRECTORY_VARIABLE
from farsight.services.proxy.ports import keep_on_loopback
from farsight.services.proxy.timed_http import ConnectionLimits
from farsight.services.run_file import ADMIN_TOKEN_VARIABLE

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

    from farsight.services.api.tracing.exporter import SpanExporter

logger = logging.getLogger(__name__)

QUIET_REQUESTS = 32
"""Most open requests at which a full garbage collection runs: it takes a few milliseconds then."""


def connection_limits(server: ServerConfig, *, behind_haproxy: bool) -> ConnectionLimits:
    """Limits of the connections of an ingress replica.

    Behind our HAProxy all connections come from HAProxy's address, and HAProxy itself counts each client's connections.
    """
    limits = ConnectionLimits.of(server)
    return dataclasses.replace(limits, per_address=0) if behind_haproxy else limits


class Ingress:
    """One ingress replica: an ASGI app over an ``EngineClient``.

    Args:
        site: What is served.
        scales_ingress: Whether a process makes the number of ingress replicas the wanted one.
    """

    def __init__(self, site: Site, scales_ingress: bool) -> None:
        server = site.config.server
        send_log_lines(f"ingress-{os.getpid()}", server.log_format, server.log_level)
        self._site = site
        self._encoder = PromptEncoder(Path(site.model_dir), site.config.model)
        self._administration = Administration(os.environ.get(ADMIN_TOKEN_VARIABLE, ""), scales_ingress)

    async def build(self) -> Any:
        """Returns the application, once a replica is up."""
        from ray import serve
        from ray.serve._private import replica

        keep_on_loopback(replica)
        pace = LoopPace()
        server = self._site.config.server
        client = await open_client(self._site, serve.get_replica_context().replica_id.unique_id)
        readiness = Readiness(SUPERVISED_S)
        link = SupervisorLink(self._site.peers(), readiness, client.open_requests)
        await link.join()
        self._watched = asyncio.create_task(again_and_again(link.run, LOOK_AGAIN_S))
        await self._tell_liveness(client, readiness)
        leave_full_collections_to_us()
        collect = functools.partial(collect_when_quiet, lambda: client.num_open + len(pace) <= QUIET_REQUESTS)
        self._collecting = asyncio.create_task(again_and_again(collect, LOOK_AGAIN_S))
        reports = TrafficReports(self._site.peers(), client.tally, client.ingress_id)
        self._reporting = asyncio.create_task(again_and_again(reports.run, LOOK_AGAIN_S))
        access = self._make_access_control(client)
        limits = connection_limits(server, behind_haproxy=PROXY_DIRECTORY_VARIABLE in os.environ)

        def refusal() -> CapacityError | None:
            """Refuses a request before it is parsed, except where keys come first or a drain is the reason."""
            return client.first_check.shed(len(pace)) if access.is_open and not readiness.is_draining else None

        # Ray Serve starts its server in this process once the application is built.
        pace_http(pace, limits, refusal, server.max_body_bytes)
        manager = StreamManager(self._site.peers().stream_store())
        self._keeping = asyncio.create_task(again_and_again(manager.run, LOOK_AGAIN_S))
        shares = server.prefix_sharing == "all" or (server.prefix_sharing == "auto" and access.is_open)
        workers = BodyWorkers(self._site.model_dir, self._site.config.model)
        batches = self._make_batches()
        if batches is not None:
            self._running = asyncio.create_task(self._run_batches(batches, client, access, workers, shares=shares))
        return build_app(
            client,
            self._encoder,
            server.max_body_bytes,
            self._administration,
            operator=client.overview,
            shares_across_keys=shares,
            access=access,
            workers=workers,
            readiness=readiness,
            manager=manager,
            shed=client.first_check.shed,
            spans=self._spans(client),
            batches=batches,
            access_log=server.access_log,
        )

    def _spans(self, client: EngineClient) -> SpanExporter | None:
        """Starts to send spans, if there is an endpoint for them.

        Raises:
            ConfigError: The extra ``otel`` is not installed.
        """
        traces = self._site.config.traces
        if not traces.endpoint:
            return None
        try:
            from farsight.services.api.tracing.exporter import SpanExporter
        except ImportError as error:
            expected = "nothing, or an installation with the extra otel: pip install 'farsight[otel]'"
            raise ConfigError("traces.endpoint", traces.endpoint, expected) from error
        exporter = SpanExporter(traces, client.overview, client.registry)
        self._tracing = asyncio.create_task(again_and_again(exporter.run, LOOK_AGAIN_S))
        return exporter

    def _make_batches(self) -> Batches | None:
        settings = self._site.config.files
        return Batches(Files(self._site.peers().log_store(), settings)) if settings.max_file_bytes else None

    async def _run_batches(
        self, batches: Batches, client: EngineClient, access: AccessControl, workers: BodyWorkers, *, shares: bool
    ) -> None:
        """Runs the lines of batches on an application that asks for no key: each line belongs to its batch's tenant."""
        server = self._site.config.server
        metered = MeteredGenerator(client, access, shares_prefixes=shares)
        built: list[FastAPI] = []
        building = asyncio.Lock()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            """Builds the application for the first line, beside the streams: most services run no batch."""
            async with building:
                if not built:
                    build = functools.partial(build_app, workers=workers)
                    built.append(await asyncio.to_thread(build, metered, self._encoder, server.max_body_bytes))
            await built[0](scope, receive, send)

        forecast_lines = line_forecasts(client, self._encoder)
        place = RunningPlace(
            app, access.caller_of, client.first_check.free_places, server.max_body_bytes, forecast_lines
        )
        runner = BatchRunner(batches, place, uuid.uuid4().hex[:12], uses_keys=not access.is_open)
        await again_and_again(runner.run, LOOK_AGAIN_S)

    def _make_access_control(self, client: EngineClient) -> AccessControl:
        """Makes the access control, which counts tenants together with the other ingress replicas."""
        config = self._site.config
        # Under `serve deploy` the address is the cluster's, and unknown here.
        on_loopback = self._administration.scales_ingress and is_loopback(config.server.host)
        settings = access_settings(
            config.access,
            os.environ,
            self._administration.token,
            loopback_host=config.server.host if on_loopback else "",
            behind_haproxy=PROXY_DIRECTORY_VARIABLE in os.environ,
        )
        exchange = TenantExchange(self._site.peers())
        access = AccessControl(settings, client.registry, usage=exchange.usage)
        if not access.is_open:
            if config.engine.disk_kv:
                self._follow_keys(access, Path(config.engine.disk_kv))
            self._exchanging = asyncio.create_task(again_and_again(lambda: exchange.run(access), LOOK_AGAIN_S))
        return access

    @staticmethod
    def _follow_keys(access: AccessControl, folder: Path) -> None:
        """Deletes the KV of tenants on this machine whose keys are gone, now and later."""
        known, loop = access.tenants, asyncio.get_running_loop()
        loop.run_in_executor(None, _forget_tenants, folder, lambda tenant: tenant not in known)
        access.on_gone = lambda gone: loop.run_in_executor(None, _forget_tenants, folder, gone.__contains__)

    @staticmethod
    async def _tell_liveness(client: EngineClient, readiness: Readiness) -> None:
        """Publishes ``Liveness`` to our HAProxy, if any; Ray Serve's controller asks the actor on this event loop."""
        from ray import serve

        directory = os.environ.get(PROXY_DIRECTORY_VARIABLE)
        if directory:
            port = await Liveness(lambda: client.hears, readiness=readiness).start()
            publish(port, serve.get_replica_context().replica_id.unique_id, Path(directory))


def _forget_tenants(folder: Path, is_gone: Callable[[str], bool]) -> None:
    """Deletes what a folder has of some tenants; what was kept without a key stays."""
    for tenant in {each.tenant for each in kept_in(folder)}:
        if tenant and is_gone(tenant):
            logger.warning("%d blocks of KV of tenant %s, who has no key, are deleted", clear(folder, tenant), tenant)


async def open_client(site: Site, ingress_id: str = "") -> EngineClient:
    """Returns a started client, once a replica is up; ``ingress_id`` as for ``EngineClient``."""
    supervising = asyncio.create_task(keep_supervisor(site))  # the Router may be waiting for one
    try:
        served = await _wait_for_model(site)
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
    client = EngineClient(
        site,
        model_info(site, served.ready),
        lambda: keep_supervisor(site),
        prefix_block_size=served.prefix_block_size,
        ingress_id=ingress_id,
    )
    await client.start()
    return client


async def _wait_for_model(site: Site) -> ServedModel:
    with contextlib.closing(site.peers()) as peers:
        router = peers.router()
        while True:
            try:
                served = await router.model()
            except PeerLost:
                served = None
            if served is not None:
                return served
            await asyncio.sleep(LOOK_AGAIN_S)
