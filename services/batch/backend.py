"""The components of one batch job: a service of its own, without HTTP, that ends with the job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError

from actors.runtime.hosts import create_host
from actors.runtime.names import SUPERVISOR, host_of
from actors.runtime.site import Site
from core.config.load import FarsightConfig
from services.api.backend import GenerationBackend
from services.api.text.prompts import PromptEncoder
from services.ingress.connect import open_client
from services.launch.cluster import ServiceFailed
from services.launch.launch import find_model, find_site, start_components
from services.launch.stages import Stages

_GCS_FLAG = "--gcs-address="


@contextlib.asynccontextmanager
async def open_backend(
    config: FarsightConfig, stages: Stages
) -> AsyncGenerator[tuple[GenerationBackend, PromptEncoder], None]:
    """The backend of one job and the encoder of its model; everything it started is gone when it is closed.

    Runs in the job's driver, on the event loop that will send the requests.

    Raises:
        FarsightError: The model cannot be served, or a part did not start.
    """
    site = _own_site(config)
    try:
        ray.init(address=_cluster_address(), namespace=site.namespace, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ServiceFailed(f"the job does not reach its own cluster: {error}") from error
    try:
        holder = asyncio.create_task(_hold(create_host(host_of(SUPERVISOR, site.placement), site, 0)))
        await _start(site, stages)
        client = await open_client(site)
        try:
            yield client, PromptEncoder(Path(site.model_dir))
        finally:
            await client.close()
            holder.cancel()
    finally:
        ray.shutdown()


async def _hold(host: Any) -> None:
    """Keeps the handle as long as the actor lives, and no longer.

    An actor that is not detached ends with the handle of whoever created it; and as long as there is that handle, the
    name of a dead actor does not come free for the next one.
    """
    with contextlib.suppress(RayError):
        await host.ended.remote()


async def _start(site: Site, stages: Stages) -> None:
    try:
        with stages.stage("Supervisor", lambda: "its process"):
            starting = start_components(site)
    except RayActorError as error:
        raise ServiceFailed(f"the supervisor died while it started: {error}") from error
    await asyncio.to_thread(starting.wait, stages)


def _cluster_address() -> str | None:
    """Of the cluster that this job runs in, as the raylet above this process knows it; None if there is no raylet.

    RAY_ADDRESS, as Ray sets it for a job, is that of any cluster on the machine unless ``ray start`` began this one.
    """
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            words: list[str] = process.cmdline()
            for word in words:
                if word.startswith(_GCS_FLAG):
                    return word.removeprefix(_GCS_FLAG)
    return None


def _own_site(config: FarsightConfig) -> Site:
    """Names of its own, since other services may run in the cluster; nothing outlives the job, however it ends."""
    site = find_site(config, find_model(config))
    return Site(site.config, site.model_dir, site.placement, f"farsight-batch-{uuid.uuid4().hex[:8]}", detached=False)
