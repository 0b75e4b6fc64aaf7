"""The base class of logical components, plain objects with a name that take messages and show their state; and which
class belongs to which name."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry

from farsight.actors.calls.message import declared
from farsight.actors.runtime.names import ROUTER
from farsight.actors.runtime.peer import PeerBook, Site
from farsight.core.config.load import FarsightConfig
from farsight.core.decisions import Decision
from farsight.core.errors import FarsightError, MessageError
from farsight.core.messages.status import Degraded, Work
from farsight.policies.compose import is_batch_mode

logger = logging.getLogger(__name__)

Gone = Callable[[Collection[str]], Awaitable[frozenset[str]]]
"""Takes ingress replicas that are silent at the moment; returns the ones whose processes have ended."""


async def all_gone(ingress_ids: Collection[str]) -> frozenset[str]:
    """Replaces ``gone_ingresses`` in a process without Ray, where each client that is silent has been closed."""
    return frozenset(ingress_ids)


async def gone_ingresses(ingress_ids: Collection[str]) -> frozenset[str]:
    """Returns the ingress replicas that Ray has no living actor for; none while Ray cannot be asked."""
    if not ingress_ids:
        return frozenset()
    try:
        return without_actor(ingress_ids, await asyncio.to_thread(_actor_names))
    except Exception:
        logger.warning("Ray could not be asked which ingress replicas live; none counts as dead", exc_info=True)
        return frozenset()


def without_actor(ingress_ids: Iterable[str], actor_names: Iterable[str]) -> frozenset[str]:
    """Returns the ids without a living actor: Ray Serve ends the name of a replica's actor with ``#`` and the id."""
    living = {name.rpartition("#")[2] for name in actor_names}
    return frozenset(ingress_ids) - living


def _actor_names() -> list[str]:
    import ray  # not at the top: Ray reads its settings at import

    if not ray.is_initialized():  # else the call would start Ray
        raise FarsightError("this process is not connected to Ray")
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


MAX_RECENT = 20
"""Most decisions that a component keeps for the operator's pages."""


@dataclass(frozen=True, slots=True)
class ComponentContext:
    """What a component is made from.

    Attributes:
        name: Name of the component, such as ``scheduler-0``.
        restarts: How often the Supervisor has started the component again.
        peers: Finds the other components, in this process or elsewhere.
        registry: Registry of the component's metrics; its process serves them under /metrics.
        degraded: Why the component works less well than it should; shown in its status and metrics.
        gone: Returns which silent ingress replicas have died.
        count_refused: Called with (component, method, field) for every message that is refused.
    """

    name: str
    site: Site
    restarts: int
    peers: PeerBook
    registry: CollectorRegistry
    count_refused: Callable[[str, str, str], None] = lambda component, method, field: None
    degraded: Degraded = field(default_factory=Degraded)
    gone: Gone = all_gone

    @property
    def config(self) -> FarsightConfig:
        return self.site.config

    @property
    def index(self) -> str:
        """The part of the name after the last dash: the replica, or the number among several of a kind."""
        return self.name.rpartition("-")[2]


class Component:
    """A component answers the messages of the contracts in ``actors.calls`` that its class derives from."""

    kind: ClassVar[str]

    def __init__(self, context: ComponentContext) -> None:
        self.context = context
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._aside: set[asyncio.Task[None]] = set()
        self.num_answered = 0  # since the start
        self._noted: deque[Decision] = deque(maxlen=MAX_RECENT)

    @property
    def name(self) -> str:
        return self.context.name

    async def answer(self, method: str, data: bytes) -> bytes:
        """Decodes a message, gives it to its handler and encodes what the handler returns.

        Raises:
            MessageError: No contract declares the method, or the component does not understand the message.
        """
        self.num_answered += 1
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
        """Begins the component's work; raises FarsightError if it cannot."""

    async def stop(self) -> None:
        """Ends the component's tasks and closes what it has open."""
        tasks = (*self._tasks, *self._aside)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` as long as the component lives; if ``work`` ends by itself, the component has failed."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def spawn_aside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs ``work`` that ends by itself, unless the component stops before; an exception fails the component."""
        task = asyncio.create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._ended_aside)
        return task

    def _ended_aside(self, task: asyncio.Task[None]) -> None:
        self._aside.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._task_ended(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.fail(task.exception() or RuntimeError(f"{self.name}: a task ended"))

    def fail(self, error: BaseException) -> None:
        """Ends the component by this error, or by an earlier one."""
        if not self.failed.done():
            self.failed.set_exception(error)

    @property
    def state(self) -> str:
        """As in ``ComponentStatus.state``."""
        return "ready"

    @property
    def queue(self) -> int:
        """Number of requests or records that the component holds."""
        return 0

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since the component last did what it exists for; None if never."""
        return None

    @property
    def work(self) -> Work | None:
        """The unit of work under way, if it may hang while the component still answers; None while idle."""
        return None

    @property
    def work_done(self) -> Mapping[str, float]:
        """Counts of work done since the start, by names that people read; the operator's pages show the rates."""
        return {}

    def note(self, kind: str, **facts: float | str) -> None:
        """Keeps a decision for the operator's pages: no text of clients, and no facts that are costly to compute."""
        self._noted.append(Decision(kind, time.time(), facts))

    def recent(self) -> Iterable[Decision]:
        """Returns the last decisions, oldest first; instants in seconds since the epoch."""
        return tuple(self._noted)

    @property
    def url(self) -> str:
        """As in ``ComponentStatus.url``, and so ``breaker``."""
        return ""

    @property
    def breaker(self) -> str:
        return ""

    @property
    def loaded(self) -> float | None:
        """As in ``ComponentStatus.loaded``."""
        return None

    @property
    def preparing(self) -> str:
        """As in ``ComponentStatus.preparing``."""
        return ""


_CLASSES = {
    "router": "farsight.actors.scheduling.router:Router",
    "scheduler": "farsight.actors.scheduling.scheduler:Scheduler",
    "kv-offload-manager": "farsight.actors.scheduling.kv_offload_manager:KVOffloadManager",
    "worker": "farsight.actors.worker.model_worker:ModelWorker",
    "rank": "farsight.actors.worker.rank:Rank",
    "backend": "farsight.actors.external.backend:OpenAIBackend",
    "length-predictor": "farsight.actors.learning.length_predictor:LengthPredictor",
    "serving-time-estimator": "farsight.actors.learning.serving_time_estimator:ServingTimeEstimator",
    "image-encoder": "farsight.actors.vision.image_encoder:ImageEncoder",
    "log-store": "farsight.actors.log.log_store:LogStore",
    "stream-store": "farsight.actors.log.stream_store:StreamStore",
    "supervisor": "farsight.actors.supervision.supervisor:Supervisor",
}


_BATCHER = "farsight.actors.scheduling.batcher:Batcher"
"""The class that takes requests in, under the Router's name, if idle workers pull them in batches."""


def component_class(name: str, config: FarsightConfig) -> type[Component]:
    """Imports and returns the class of the component of that name, such as ``scheduler-0``."""
    module, _, attribute = _path(name, config).partition(":")
    found: type[Component] = getattr(importlib.import_module(module), attribute)
    return found


def kind_of(name: str, config: FarsightConfig) -> str:
    """Returns the kind of the component of that name, without importing its class."""
    return _path(name, config).partition(":")[2]


def _path(name: str, config: FarsightConfig) -> str:
    if name == ROUTER and is_batch_mode(config.scheduler.preset):
        return _BATCHER
    return _CLASSES[name if name in _CLASSES else name.rpartition("-")[0]]
