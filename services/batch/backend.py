"""The components of one batch job: a private service without HTTP that ends with the job."""

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
from ray.exceptions import RayError

from farsight.actors.runtime.hosts import create_host
from farsight.actors.runtime.names import SUPERVISOR, host_of
from farsight.actors.runtime.peer import Site
from farsight.core.config.load import FarsightConfig
from farsight.services.api.backend import Generator
from farsight.services.api.batches.order import ForecastLines
from farsight.services.api.text.prompts import PromptEncoder, text_settings
from farsight.services.ingress.ingress import open_client
from farsight.services.ingress.predictor_client import line_forecasts
from farsight.services.launch.cluster import ServiceFailed
from farsight.services.launch.launch import find_model, find_site, start_components
from farsight.services.launch.stages import Stages

_GCS_FLAG = "--gcs-address="


@contextlib.asynccontextmanager
async def open_backend(
    config: FarsightConfig, stages: Stages
) -> AsyncGenerator[tuple[Generator, PromptEncoder, ForecastLines | None], None]:
    """The backend of one job, the encoder of its model and what forecasts its lines, if its preset reads forecasts.

    Closing it ends every component it started.

    Runs in the job's driver, on the event loop that will send the requests.

    Raises:
        FarsightError: The model cannot be served, or a component did not start.
    """
    site = _own_site(config)
    try:
        ray.init(address=_cluster_address(), namespace=site.namespace, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ServiceFailed(f"the job cannot connect to its own cluster: {error}") from error
    try:
        holder = asyncio.create_task(_hold(create_host(host_of(SUPERVISOR, site.placement), site, 0)))
        await asyncio.to_thread(start_components(site).wait, stages)
        client = await open_client(site)
        try:
            encoder = PromptEncoder(Path(site.model_dir), text_settings(site.config.model))
            yield client, encoder, line_forecasts(client, encoder)
        finally:
            await client.close()
            holder.cancel()
    finally:
        ray.shutdown()


async def _hold(host: Any) -> None:
    """Keeps the handle exactly as long as the actor lives.

    An actor that is not detached ends with its creator's handle. While that handle exists, the name of a dead actor
    stays taken for the next one.
    """
    with contextlib.suppress(RayError):
        await host.ended.remote()


def _cluster_address() -> str | None:
    """The address of the cluster that runs this job, read from this process's raylet; None if there is no raylet.

    The RAY_ADDRESS that Ray sets for a job may name any cluster on the machine unless ``ray start`` began this one.
    """
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            words: list[str] = process.cmdline()
            for word in words:
                if word.startswith(_GCS_FLAG):
                    return word.removeprefix(_GCS_FLAG)
    return None


def _own_site(config: FarsightConfig) -> Site:
    """Unique names, since other services may run in the cluster, and no detached actor: all end with the job."""
    site = find_site(config, find_model(config))
    return Site(site.config, site.model_dir, site.placement, f"farsight-batch-{uuid.uuid4().hex[:8]}", detached=False)
