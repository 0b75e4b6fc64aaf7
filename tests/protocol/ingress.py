"""An ingress replica: the real ledger and inboxes in a shell of virtual time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from farsight.core.messages.requests import AnnounceReply, Keys, Refusal, Submit, SubmitReply
from farsight.core.messages.tokens import TokenBatches, TokenPoll
from farsight.core.request import Request
from farsight.services.ingress.ledger import OpenStream, RequestLedger
from farsight.services.ingress.streams import TokenInbox
from tests.protocol.network import Component, attempts

if TYPE_CHECKING:
    from tests.protocol.worker import WorkerComponent
    from tests.protocol.world import World

LOOK_AGAIN_S, ANNOUNCE_S = 0.05, 0.5


class _Connection:
    """To one worker life; ``number`` counts polls, so that only the latest is followed by another."""

    __slots__ = ("inbox", "number", "worker")

    def __init__(self, worker: WorkerComponent) -> None:
        self.worker, self.inbox, self.number = worker, TokenInbox(), 0


class IngressComponent(Component):
    """The one life of an ingress replica: its clients die with it."""

    def __init__(self, world: World, name: str, replicas: Iterable[str]) -> None:
        super().__init__(world, name)
        self.name = name
        self.ledger = RequestLedger(name)
        self._connections: dict[str, _Connection | None] = {}
        self._submits = False
        self._follow(replicas)
        self._announce()

    def open(self, request: Request) -> None:
        """A client comes."""
        self.ledger.open(OpenStream(request))
        self._flush()

    def close(self, request_id: str) -> None:
        """A client goes."""
        self.ledger.close(request_id, self.world.clock.now)
        self._flush()

    def _flush(self) -> None:
        """One submit at a time; what comes meanwhile goes with the next one."""
        for given_up in self.ledger.take_given_up():
            self.world.give_up(given_up.request_id)
        if self._submits or not self.ledger.has_outgoing:
            return
        requests, aborts = self.ledger.take_outgoing()
        if requests:
            self._submit(requests, aborts)
        else:
            self._abort(aborts)

    def _submit(self, requests: tuple[Request, ...], aborts: tuple[tuple[str, int], ...]) -> None:
        self._submits = True
        self._tell_submit(requests)

        def on_reply(reply: SubmitReply) -> None:
            self._submits = False
            self._refuse(self.ledger.submitted(reply))
            self._follow(placed.replica for placed in reply.placed if placed.replica)
            self._abort(aborts)
            self._flush()

        def on_lost() -> None:
            self.ledger.submit_failed(requests)
            self.later(LOOK_AGAIN_S, retry)

        def retry() -> None:
            self._submits = False
            self._abort(aborts)
            self._flush()

        self.world.network.call(self.life, "router", "submit", Submit(requests), on_reply, on_lost)

    def _tell_submit(self, requests: tuple[Request, ...]) -> None:
        for request in requests:
            self.world.count("resumed with tokens", bool(request.output_ids))
        self.world.tell(self.name, "submits %s", attempts(requests))

    def _abort(self, keys: tuple[tuple[str, int], ...]) -> None:
        """Said once: if it still sends tokens, it is aborted again."""
        if keys:
            self.world.tell(self.name, "aborts %s", keys)
            self.world.network.call(self.life, "router", "abort", Keys(keys), lambda _: None, lambda: None)

    def _announce(self) -> None:
        def on_reply(reply: AnnounceReply) -> None:
            if reply.lost:
                self.world.tell(self.name, "hears that no replica runs %s", reply.lost)
            self._refuse(self.ledger.announced(reply))
            self._follow(reply.replicas)
            self._flush()
            self.later(0.0 if self.ledger.is_asked and not lists else ANNOUNCE_S, self._announce)

        lists = self.ledger.is_asked
        again = self.ledger.announce()
        on_lost = lambda: self.later(LOOK_AGAIN_S, self._announce)  # noqa: E731
        self.world.network.call(self.life, "router", "announce", again, on_reply, on_lost)

    def _refuse(self, refusals: Iterable[Refusal]) -> None:
        for refusal in refusals:
            self.world.refuse(refusal)

    def _follow(self, replicas: Iterable[str]) -> None:
        for replica in replicas:
            if replica not in self._connections:
                self._connections[replica] = None
                self._connect(replica)

    def _connect(self, replica: str) -> None:
        """A worker that is away fails every poll."""
        worker = self.world.network.living.get(f"worker-{replica}")
        if worker is None:
            self._resume(replica)
            self.later(LOOK_AGAIN_S, lambda: self._connect(replica))
            return
        connection = self._connections[replica] = _Connection(worker)
        self.world.network.watch(self.life, worker.life, lambda: self.lose_worker(replica, connection))
        self._poll(replica, connection)

    def lose_worker(self, replica: str, connection: _Connection | None = None) -> None:
        """The connection broke: the worker is dead, or only looks so."""
        current = self._connections.get(replica)
        if current is None or connection not in (None, current):
            return
        self.world.tell(self.name, "has lost the worker of replica %s", replica)
        self._connections[replica] = None
        self._resume(replica)
        self.later(LOOK_AGAIN_S, lambda: self._connect(replica))

    def _resume(self, replica: str) -> None:
        self.ledger.worker_lost(replica)
        self._flush()

    def _poll(self, replica: str, connection: _Connection) -> None:
        connection.number += 1
        number, worker, letter = connection.number, connection.worker, self.world.network.letter

        def send(batches: TokenBatches) -> None:
            letter(self.life, batches, lambda batches: self._take_tokens(replica, connection, number, batches))

        poll = TokenPoll(self.name, connection.inbox.ack_seq, self.world.slow_clients(self.name))
        letter(worker.life, poll, lambda poll: worker.poll_tokens(poll, send))
        patience_s = self.world.patience_s(busy=len(self.ledger) > 0)
        self.later(patience_s, lambda: self._poll_again(replica, connection, number))

    def _poll_again(self, replica: str, connection: _Connection, number: int) -> None:
        if self._connections[replica] is connection and connection.number == number:
            self._poll(replica, connection)

    def _take_tokens(self, replica: str, connection: _Connection, number: int, batches: TokenBatches) -> None:
        if self._connections[replica] is not connection:
            return
        inbox, now = connection.inbox, self.world.clock.now
        deltas = inbox.receive(batches)
        for delta in self.ledger.receive(replica, inbox.incarnation, deltas, now):
            self.world.show(delta)
        self._flush()
        self._poll_again(replica, connection, number)
