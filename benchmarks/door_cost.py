"""CPU time that the door adds to a request: ``python -m benchmarks.door_cost``.

The door of a file with many keys and a tenant with limits stands before an application that does nothing; the same
application without the door is taken off.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.access.door import Door, DoorSettings
from services.api.access.gate import Gate
from services.api.access.key_file import KeyFile, changed_key_file
from services.api.access.keys import Role, Tenant, make_key
from services.api.access.roles import ROLES, RouteRoles

NUM_KEYS = 1000
NUM_REQUESTS = 20_000
ROUNDS = 5
LIMIT = 10**9


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers at once."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b"{}"})


async def receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def send(message: Message) -> None:
    """Drops what a server would write."""


async def cpu_us(app: ASGIApp, key: str) -> float:
    """CPU time of a request in microseconds."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"user-agent", b"benchmark")]
    headers.append((b"authorization", b"Bearer " + key.encode()))
    gc.disable()
    began = time.process_time()
    for _ in range(NUM_REQUESTS):
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        await app(scope, receive, send)
    taken_s = time.process_time() - began
    gc.enable()
    return 1e6 * taken_s / NUM_REQUESTS


def make_door(path: Path) -> tuple[Door, str]:
    """A door with ``NUM_KEYS`` keys, and the last key."""
    limits = {"requests_per_minute": LIMIT, "tokens_per_minute": LIMIT, "max_in_flight": LIMIT}
    made = [make_key(f"key-{number}", "tenant", [Role.SERVE], 0.0) for number in range(NUM_KEYS)]
    with changed_key_file(path) as content:
        content[0] = KeyFile(tuple(record for _, record in made), {"tenant": Tenant("tenant", **limits)})
    return Door(DoorSettings(key_file=path, hosts=("localhost",))), made[-1][0]


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        door, key = make_door(Path(folder) / "keys.json")
        gate = Gate(nothing, door, RouteRoles(ROLES))
        rounds = [(await cpu_us(nothing, key), await cpu_us(gate, key)) for _ in range(ROUNDS)]
    bare, guarded = (min(values) for values in zip(*rounds, strict=True))
    print(f"{guarded - bare:.1f} us of CPU a request ({guarded:.1f} with the door, {bare:.1f} without)")


if __name__ == "__main__":
    asyncio.run(main())
