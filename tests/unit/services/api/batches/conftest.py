"""Files and batches of an application, over a log in a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from farsight.core.config.server import FilesConfig
from farsight.services.api.access.access_control import AccessControl, AccessSettings, MeteredGenerator
from farsight.services.api.app import build_app
from farsight.services.api.batches.files import Files
from farsight.services.api.batches.records import Batches
from farsight.services.api.batches.running import BatchRunner, RunningPlace
from farsight.services.api.batches.sender import RetryPolicy
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.access.access_support import add_key
from tests.unit.services.api.api_support import ScriptedBackend
from tests.unit.services.api.batches.kept_support import SqliteObjects


class WallClock:
    """Unix seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


MANY_PLACES = 100


@dataclass
class BatchService:
    """An application with files and batches, and what runs the batches."""

    backend: ScriptedBackend
    batches: Batches
    clock: WallClock
    access: AccessControl
    keys: dict[str, str]
    client: httpx.AsyncClient
    encoder: PromptEncoder
    free_places: list[int]

    def runner(self, name: str = "one", backend: ScriptedBackend | None = None, give_up_s: float = 30.0) -> BatchRunner:
        metered = MeteredGenerator(backend or self.backend, self.access, shares_prefixes=True)
        app = build_app(metered, self.encoder)
        place = RunningPlace(app, self.access.caller_of, lambda: self.free_places[0], 100_000)
        retry = RetryPolicy(give_up_s, first_delay_s=0.01, max_delay_s=0.05)
        return BatchRunner(self.batches, place, name, uses_keys=bool(self.keys), retry=retry, look_s=0.01)

    def bearer(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[name]}"}


@asynccontextmanager
async def running(runner: BatchRunner) -> AsyncIterator[None]:
    """Runs batches and responses of the background meanwhile."""
    task = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


Serve = Callable[..., BatchService]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteObjects]:
    store = SqliteObjects(tmp_path / "log.sqlite")
    yield store
    await store.log.close()


@pytest.fixture
def serve(store: SqliteObjects, encoder: PromptEncoder, tmp_path: Path) -> Serve:
    texts = encoder

    def make(
        tenants: tuple[str, ...] = (),
        backend: ScriptedBackend | None = None,
        encoder: PromptEncoder = texts,
        **settings: Any,
    ) -> BatchService:
        clock = WallClock()
        keys = {name: add_key(tmp_path / "keys.json", name) for name in tenants}
        access = AccessControl(AccessSettings(key_file=tmp_path / "keys.json" if tenants else None))
        batches = Batches(Files(store, FilesConfig(**settings), clock))
        backend = backend or ScriptedBackend()
        app = build_app(backend, encoder, 100_000, access=access, batches=batches)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://test")
        return BatchService(backend, batches, clock, access, keys, client, encoder, [MANY_PLACES])

    return make
