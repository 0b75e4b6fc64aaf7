"""How a component sends messages to another component, wherever that runs, and waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from farsight.actors.calls.failures import PeerLost as PeerLost
from farsight.actors.calls.log_store import LogStoreCalls, StreamStoreCalls
from farsight.actors.calls.message import Meter, Peer, stub
from farsight.actors.calls.scheduling import (
    ImageEncoderCalls,
    KVOffloadCalls,
    LengthPredictorCalls,
    RouterCalls,
    SchedulerCalls,
    ServingTimeEstimatorCalls,
    WorkerCalls,
)
from farsight.actors.calls.supervisor import HostCalls, SupervisorCalls
from farsight.actors.runtime.names import (
    HOST,
    LOG_STORE,
    NAMESPACE,
    ROUTER,
    STREAM_STORE,
    SUPERVISOR,
    host_of,
    image_encoder_name,
    kv_offload_manager_name,
    length_predictor_name,
    scheduler_name,
    serving_time_estimator_name,
    worker_name,
)
from farsight.core.config.load import FarsightConfig
from farsight.core.messages.status import ComponentCounts

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from farsight.actors.runtime.remote import RemoteActor

T = TypeVar("T")

LOOK_AGAIN_S = 0.05
"""Seconds between two searches for a lost peer."""


AWAY_S = 10.0
"""Fewest seconds between two log lines of work that waits for a component that is away."""


class Answering(Protocol):
    """A component, as far as its peers are concerned."""

    async def answer(self, method: str, data: bytes) -> Any: ...


class LocalPeer:
    """A component in this process: the same messages, without a hop."""

    def __init__(self, components: Mapping[str, Answering], name: str) -> None:
        self._components = components
        self._name = name

    async def call(self, method: str, data: bytes = b"", *, long: bool = False) -> Any:
        component = self._components.get(self._name)
        if component is None:
            raise PeerLost(self._name)
        return await component.answer(method, data)


class RemotePeer:
    """A component in another actor."""

    def __init__(self, name: str, actor: RemoteActor, delay_s: float = 0.0) -> None:
        self._name = name
        self._actor = actor
        self._delay_s = delay_s

    async def call(self, method: str, data: bytes = b"", *, long: bool = False) -> Any:
        if not self._delay_s:
            return await self._actor.send(self._name, method, data, long=long)
        await asyncio.sleep(self._delay_s)
        reply = await self._actor.send(self._name, method, data, long=long)
        await asyncio.sleep(self._delay_s)
        return reply


class PeerBook:
    """The other components by name.

    Args:
        placement: As ``host_of`` takes it.
        local: The components of this process by name; may grow and shrink.
        host: The name of this process among the hosts; empty if it is not a host.
        delay_s: Seconds by which every message and its answer are held back, to measure that nothing waits for them.
        namespace: Ray namespace of the actors' names.
    """

    def __init__(
        self,
        placement: str,
        local: Mapping[str, Answering] | None = None,
        host: str = "",
        delay_s: float = 0.0,
        namespace: str = NAMESPACE,
    ) -> None:
        self.placement = placement
        self._namespace = namespace
        self._local = local if local is not None else {}
        self._host = host
        self._delay_s = delay_s
        self._actors: dict[str, RemoteActor] = {}

    def router(self) -> RouterCalls:
        return cast(RouterCalls, stub(RouterCalls, self.peer(ROUTER)))

    def scheduler(self, replica: str) -> SchedulerCalls:
        """Returns the Scheduler of a replica; an external server's backend answers ``ReplicaCalls`` alone."""
        return cast(SchedulerCalls, stub(SchedulerCalls, self.peer(scheduler_name(replica))))

    def worker(self, replica: str, meter: Meter | None = None) -> WorkerCalls:
        """Returns the ModelWorker of a replica; an external server's backend answers ``TokenCalls`` alone.

        Args:
            meter: Measures the encoding of requests and the decoding of answers.
        """
        return cast(WorkerCalls, stub(WorkerCalls, self.peer(worker_name(replica)), meter))

    def kv_offload_manager(self, replica: str) -> KVOffloadCalls:
        return cast(KVOffloadCalls, stub(KVOffloadCalls, self.peer(kv_offload_manager_name(replica))))

    def length_predictor(self, index: int) -> LengthPredictorCalls:
        return cast(LengthPredictorCalls, stub(LengthPredictorCalls, self.peer(length_predictor_name(index))))

    def serving_time_estimator(self, index: int) -> ServingTimeEstimatorCalls:
        peer = self.peer(serving_time_estimator_name(index))
        return cast(ServingTimeEstimatorCalls, stub(ServingTimeEstimatorCalls, peer))

    def image_encoder(self, index: int) -> ImageEncoderCalls:
        return cast(ImageEncoderCalls, stub(ImageEncoderCalls, self.peer(image_encoder_name(index))))

    def log_store(self) -> LogStoreCalls:
        return cast(LogStoreCalls, stub(LogStoreCalls, self.peer(LOG_STORE)))

    def stream_store(self) -> StreamStoreCalls:
        return cast(StreamStoreCalls, stub(StreamStoreCalls, self.peer(STREAM_STORE)))

    def supervisor(self) -> SupervisorCalls:
        return cast(SupervisorCalls, stub(SupervisorCalls, self.peer(SUPERVISOR)))

    def peer(self, name: str) -> Peer:
        """Returns the component of that name, here or elsewhere, for messages that are encoded already."""
        host = host_of(name, self.placement)
        if host == self._host or name in self._local:
            return LocalPeer(self._local, name)
        return RemotePeer(name, self.actor(host), self._delay_s)

    def host(self, host: str) -> HostCalls:
        """Returns the process of that name, for messages about all of its components."""
        return cast(HostCalls, stub(HostCalls, RemotePeer(HOST, self.actor(host))))

    def actor(self, host: str) -> RemoteActor:
        """Returns the actor of the process of that name."""
        from farsight.actors.runtime.remote import (
            RemoteActor,  # Ray reads its settings when it is imported: not before they are made
        )

        if host not in self._actors:
            self._actors[host] = RemoteActor(host, self._namespace)
        return self._actors[host]

    def close(self) -> None:
        """Closes the connections to processes of this node."""
        for actor in self._actors.values():
            actor.close()


@dataclass(frozen=True, slots=True)
class Site:
    """What every process of the service knows about it.

    Attributes:
        config: ``model.name`` is the name that clients use.
        model_dir: Directory of config, weights and tokenizer.
        placement: As ``host_of`` takes it.
        namespace: Ray namespace of the actors' names.
        detached: Whether the actors outlive the job that started them.
        model_version: Number of the weights in ``model_dir`` since the start; a request runs on one version only.
        sees: Whether the model reads pictures.
        model_since: Earliest time at which a request on these weights may have come in, in seconds since the epoch.
    """

    config: FarsightConfig
    model_dir: str
    placement: str
    namespace: str = NAMESPACE
    detached: bool = True
    model_version: int = 0
    model_since: float = 0.0
    sees: bool = False

    def peers(self, local: Mapping[str, Answering] | None = None, host: str = "") -> PeerBook:
        """Makes the peer book of the process named ``host``, which hosts the components in ``local`` itself."""
        delay_s = self.config.actors.scheduler_delay_s if host.startswith("scheduler-") else 0.0
        return PeerBook(self.placement, local, host, delay_s, self.namespace)


async def answer_of(call: Awaitable[T]) -> T | None:
    """Returns the answer to a message; None from a component that is away."""
    try:
        return await call
    except PeerLost:
        return None


async def reaches(call: Awaitable[None]) -> bool:
    """Returns whether a message that has no answer reaches its component."""
    try:
        await call
    except PeerLost:
        return False
    return True


async def current_counts(peers: PeerBook, known: ComponentCounts) -> ComponentCounts:
    """Returns the Supervisor's present counts; ``known`` while there is no Supervisor."""
    return await answer_of(peers.supervisor().counts()) or known


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Waits until the event is set, but no longer than ``timeout_s``.

    Without ``asyncio.wait_for``, which in Python 3.11 swallows a cancellation that comes just as the event is set.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def again_and_again(work: Callable[[], Coroutine[Any, Any, None]], pause_s: float) -> None:
    """Runs work that never ends by itself and keeps no state. An exception in it is logged, and the work begins again.

    A component that is away is no fault of the work: one log line in ``AWAY_S`` reports it.
    """
    name, told_at = getattr(work, "__qualname__", work), -AWAY_S
    while True:
        try:
            await work()
        except PeerLost as error:
            now = asyncio.get_running_loop().time()
            if now - told_at >= AWAY_S:
                logger.warning("%s waits: %s is away", name, error)
                told_at = now
            await asyncio.sleep(pause_s)
        except Exception:
            logger.exception("%s broke and begins again", name)
            await asyncio.sleep(pause_s)
