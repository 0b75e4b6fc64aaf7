"""A access with keys in front of the real application over real HTTP; the backend is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from farsight.core.config.server import FilesConfig
from farsight.services.api.access.access_control import AccessControl, AccessSettings
from farsight.services.api.access.key_file import KeyFile, changed_key_file
from farsight.services.api.access.keys import Role, Tenant, make_key
from farsight.services.api.admin import Administration
from farsight.services.api.batches.files import Files
from farsight.services.api.batches.records import Batches
from farsight.services.api.streams.manager import StreamManager
from farsight.services.api.text.prompts import PromptEncoder
from tests.free_ports import free_port
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, whole_app
from tests.unit.services.api.batches.kept_support import SqliteObjects
from tests.unit.services.api.streams.stream_support import ShelfStore

LONG_S = 120.0
ADMIN_TOKEN = "t" * 64
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class GuardedServer:
    """A running server, its keys by name, and what is behind it."""

    app: FastAPI
    port: int
    key_file: Path
    keys: dict[str, str]
    access: AccessControl
    registry: CollectorRegistry
    backend: ScriptedBackend = field(default_factory=ScriptedBackend)
    clock: Clock = field(default_factory=Clock)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bearer(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[name]}"}


def add_key(path: Path, name: str, *roles: Role, tenant: Tenant | None = None) -> str:
    """Puts a key into the file; returns it."""
    owner = tenant or Tenant(name)
    key, record = make_key(name, owner.name, roles or (Role.SERVE,), 0.0)
    with changed_key_file(path) as content:
        content[0] = KeyFile((*content[0].keys, record), {**content[0].tenants, owner.name: owner})
    return key


@contextlib.contextmanager
def guarded_server(folder: Path, encoder: PromptEncoder, **settings: object) -> Iterator[GuardedServer]:
    """One server with a key for each role, and two of one tenant."""
    path = folder / "keys.json"
    keys = {role.value: add_key(path, role.value, role) for role in Role}
    keys |= {name: add_key(path, name, tenant=Tenant("acme", priority_min=5)) for name in ("acme-1", "acme-2")}
    clock, registry, backend = Clock(), CollectorRegistry(), ScriptedBackend()
    made = AccessSettings(key_file=path, admin_token=ADMIN_TOKEN, **settings)  # type: ignore[arg-type]
    access = AccessControl(made, registry, now=clock)
    store = SqliteObjects(folder / "log.sqlite")
    app = whole_app(
        backend,
        encoder,
        100_000,
        Administration(ADMIN_TOKEN),
        shares_across_keys=False,
        access=access,
        manager=StreamManager(ShelfStore()),
        batches=Batches(Files(store, FilesConfig())),
    )
    config = uvicorn.Config(app, port=free_port(), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + LONG_S
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive()
        time.sleep(0.01)
    yield GuardedServer(app, config.port, path, keys, access, registry, backend, clock)
    server.should_exit = True
    thread.join(LONG_S)
    # In a thread of its own: the thread of a browser's test runs an event loop.
    with ThreadPoolExecutor(1) as closing:
        closing.submit(asyncio.run, store.log.close()).result(LONG_S)
