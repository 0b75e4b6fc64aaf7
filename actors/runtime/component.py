"""What every logical component is: a plain object with a name, messages in, a state that can be looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry

from actors.calls.message import declared
from actors.runtime.peer import PeerBook
from actors.runtime.site import Site
from core.config.load import FarsightConfig
from core.errors import MessageError
from core.messages.pulse import Work


@dataclass(frozen=True, slots=True)
class ComponentContext:
    """What a component is given.

    Attributes:
        name: Such as ``scheduler-0``.
        restarts: How often the supervisor has started it again.
        peers: Finds the other components, in this process or elsewhere.
        registry: Where its metrics go; served by its process under /metrics.
        count_refused: Called with (component, method, field) for every message that is refused.
    """

    name: str
    site: Site
    restarts: int
    peers: PeerBook
    registry: CollectorRegistry
    count_refused: Callable[[str, str, str], None] = lambda component, method, field: None

    @property
    def config(self) -> FarsightConfig:
        return self.site.config

    @property
    def index(self) -> str:
        """What follows the last dash of the name: the replica, or the number among several of a kind."""
        return self.name.rpartition("-")[2]


class Component:
    """A component answers the messages of the contracts in ``actors.calls`` that its class derives from."""

    kind: ClassVar[str]

    def __init__(self, context: ComponentContext) -> None:
        self.context = context
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.context.name

    async def answer(self, method: str, data: bytes) -> bytes:
        """Decodes a message, gives it to its handler and encodes what that returns.

        Raises:
            MessageError: no contract declares the method, or the component does not understand the message.
        """
        kind: Any = type(self)
        message = declared(kind).get(method)
        if message is None:
            self.context.count_refused(self.name, "unknown", "method")
            raise MessageError(f"{self.kind}.method", method, "a message that this component answers")
        try:
            return message.write_reply(await getattr(self, method)(*message.read_request(data)))
        except MessageError as error:
            self.context.count_refused(self.name, method, error.field)
            raise

    async def start(self) -> None:
        """Begins its work; raises FarsightError if it cannot."""

    async def stop(self) -> None:
        """Ends its tasks and closes what it has open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something as long as the component lives; if it ends by itself, the component has failed."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self.failed.done():
            error = task.exception() or RuntimeError(f"{self.name}: a task ended")
            self.failed.set_exception(error)

    @property
    def state(self) -> str:
        """As in ``ComponentStatus.state``."""
        return "ready"

    @property
    def queue(self) -> int:
        """Requests or records that it holds."""
        return 0

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since it last did what it exists for; None if never."""
        return None

    @property
    def work(self) -> Work | None:
        """What it is at, if that may hang while it still answers; None while it waits for something to do."""
        return None

    @property
    def url(self) -> str:
        """As in ``ComponentStatus.url``, and so ``breaker``."""
        return ""

    @property
    def breaker(self) -> str:
        return ""
