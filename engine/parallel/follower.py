"""A rank that carries out rank 0's orders."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import torch

from farsight.core.codec import decode, encode
from farsight.core.errors import FarsightError, RankLost, WorkerBroken
from farsight.engine import cuda
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.parallel.exchange import Exchange, RankGroup
from farsight.engine.parallel.links import Link, Ticket
from farsight.engine.parallel.mesh import Part
from farsight.engine.parallel.shards import load_shard
from farsight.engine.parallel.stage import Stage, free_bytes, make_pools, make_stage
from farsight.engine.parallel.wire import (
    Copied,
    RankLoaded,
    RankMeasured,
    RankPools,
    RankSetup,
    StepOrder,
    pack_report,
    unpack_order,
)
from farsight.engine.runner import Copier
from farsight.kvcache import KVCopy


def follow(
    link: Link, ticket: Ticket, rank: int, on_ready: Callable[[], object], on_lost: Callable[[], object]
) -> None:
    """Carries out rank 0's orders as long as rank 0 lives. Never returns.

    Args:
        link: The connection from ``join``, to the address in ``ticket``.
        on_ready: Called when this rank has loaded its part and waits for orders.
        on_lost: Called from another thread when rank 0 is gone: this thread may be waiting for activations then.

    Raises:
        FarsightError: It cannot load its part; rank 0 is told.
        RankLost: rank 0 is gone.
        WorkerBroken: the device of this rank is lost.
    """
    setup = decode(link.receive(), RankSetup)
    torch.set_num_threads(setup.num_threads)
    engine, dtype = setup.engine, getattr(torch, setup.dtype)
    try:
        cuda.check_device(engine.device)
        model_dir = Path(setup.model_dir)
        part = Part(load_model_config(model_dir), setup.mesh, rank)
        weights = load_shard(model_dir, part, dtype, engine.device)
    except FarsightError as error:
        link.send(encode(RankLoaded(error=str(error))))
        raise
    link.send(encode(RankLoaded()))
    link.receive()  # the others have loaded theirs
    group = RankGroup(setup.mesh, rank, ticket.host, setup.store_port, torch.device(engine.device))
    exchange = Exchange(group, part, engine, dtype)
    link.send(encode(RankMeasured(free_bytes(part, weights, engine, setup.num_sharers))))
    pools = decode(link.receive(), RankPools)
    pool, copier = make_pools(part, pools, engine, dtype)
    stage = make_stage(part, weights, pool, exchange, engine, setup.context_len)
    link.send(b"")
    on_ready()
    _Orders(link, stage, copier, cuda.recover_on(engine.device), cuda.lost_on(engine.device), on_lost).carry_out()


class _Orders:
    """Carries out orders one after the other; copies begin in their turn and go on beside the steps after them."""

    def __init__(
        self,
        link: Link,
        stage: Stage,
        copier: Copier | None,
        recover: Callable[[], None],
        is_lost: Callable[[], bool],
        on_lost: Callable[[], object],
    ) -> None:
        self._link = link
        self._stage = stage
        self._copier = copier
        self._recover = recover
        self._is_lost = is_lost
        self._on_lost = on_lost
        self._arrived: SimpleQueue[StepOrder | KVCopy | None] = SimpleQueue()
        self._sending = threading.RLock()  # a copy may end before this thread waits for it
        if copier is not None:
            copier.when_done(self._report_copies)

    def carry_out(self) -> None:
        """Runs until it raises RankLost or WorkerBroken."""
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        waiting: deque[StepOrder | KVCopy] = deque()
        while True:
            while not waiting or not self._arrived.empty():
                order = self._arrived.get()
                if order is None:
                    raise RankLost("rank 0 is gone")
                if isinstance(order, StepOrder):
                    self._stage.begin(order)  # at once: its activations may come while others are computed
                waiting.append(order)
            order = waiting.popleft()
            if isinstance(order, StepOrder):
                self._finish_step()
            else:
                self._begin_copy(order)

    def _finish_step(self) -> None:
        report = self._stage.finish().report
        if report.out_of_memory:
            self._recover()
        elif report.failure and self._is_lost():
            raise WorkerBroken(f"the device of this rank is lost: {report.failure}")
        with self._sending:
            self._link.send(pack_report(report))

    def _begin_copy(self, copy: KVCopy) -> None:
        assert self._copier is not None, "copies need a host pool"
        with self._sending:
            self._copier.begin(copy)

    def _report_copies(self) -> None:
        """Reports copies that have ended; called by the copying thread."""
        assert self._copier is not None
        with self._sending:
            for copy_id, failed in self._copier.take_done():
                self._link.send(pack_report(Copied(copy_id, failed)))

    def _read(self) -> None:
        try:
            while True:
                self._arrived.put(unpack_order(self._link.receive()))
        except RankLost:
            self._arrived.put(None)
            self._on_lost()
