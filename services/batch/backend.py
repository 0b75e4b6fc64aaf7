"""What a batch job runs on: the actor system, started inside the Ray cluster that the job was submitted to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from core.config import FarsightConfig
from core.errors import FarsightError
from services.api.backend import GenerationBackend
from services.api.prompts import PromptEncoder


@asynccontextmanager
async def open_backend(config: FarsightConfig) -> AsyncGenerator[tuple[GenerationBackend, PromptEncoder], None]:
    """The backend of one job and the encoder of its model; everything it started is gone when it is closed.

    Runs in the job's driver, on the event loop that will send the requests. Ray is not initialised yet: a plain
    ``ray.init()`` finds the cluster by RAY_ADDRESS, which Ray sets for a job.

    Raises:
        FarsightError: The model cannot be served, or a part did not start.
    """
    raise FarsightError("not wired yet")
    yield  # makes this a generator
