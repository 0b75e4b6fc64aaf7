"""The pieces of one batch job: a service of its own, without HTTP, that ends with the job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path

import ray

from actors.site import Site
from core.config import FarsightConfig
from services.api.backend import GenerationBackend
from services.api.prompts import PromptEncoder
from services.connect import open_client
from services.launch import find_model, find_site, start_pieces


@contextlib.asynccontextmanager
async def open_backend(config: FarsightConfig) -> AsyncGenerator[tuple[GenerationBackend, PromptEncoder], None]:
    """The backend of one job and the encoder of its model; everything it started is gone when it is closed.

    Runs in the job's driver, on the event loop that will send the requests. Ray is not initialised yet: a plain
    ``ray.init()`` finds the cluster by RAY_ADDRESS, which Ray sets for a job.

    Raises:
        FarsightError: The model cannot be served, or a part did not start.
    """
    site = _own_site(config)
    ray.init(namespace=site.namespace, log_to_driver=False, logging_level=logging.ERROR)
    try:
        wait_started = start_pieces(site)
        await asyncio.to_thread(wait_started)
        client = await open_client(site)
        try:
            yield client, PromptEncoder(Path(site.model_dir))
        finally:
            await client.close()
    finally:
        ray.shutdown()


def _own_site(config: FarsightConfig) -> Site:
    """Names of its own, since other services may run in the cluster; nothing outlives the job, however it ends."""
    site = find_site(config, find_model(config))
    return Site(site.config, site.model_dir, site.placement, f"farsight-batch-{uuid.uuid4().hex[:8]}", detached=False)
