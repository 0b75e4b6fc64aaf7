"""The data that ranks exchange in a step: sums within a stage, activations from stage to stage, in memory set aside.

Every failure of an exchange raises RankLost.

A step's order alone determines which sums, activations and logits the ranks exchange. So a rank that has no memory for
its part does not leave the others waiting: it takes part in every remaining exchange with zeros from here, and reports
afterwards that the step failed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there; torch does not say so to mypy

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import RankLost
from farsight.engine.parallel.mesh import Mesh, Part

_TIMEOUT_S = 600.0
"""Timeout of an exchange between living ranks; rank 0 learns of a dead rank sooner."""

_MAX_SENDS = 8
"""Most sends of activations in flight to the next stage; a stage that is further ahead waits."""


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Turns any failure of an exchange into RankLost: it leaves the ranks out of step."""
    try:
        yield
    except Exception as error:
        raise RankLost(f"an exchange between ranks failed: {type(error).__name__}: {error}") from error


class Arrival:
    """Activations in flight to this rank. The rank must wait for them even if it does not need them."""

    def __init__(self, buffer: Tensor, work: Any) -> None:
        self._buffer = buffer
        self._work = work

    def wait(self) -> Tensor:
        if self._work is not None:
            with _together():
                self._work.wait()
            self._work = None  # a second wait would wait for further activations
        return self._buffer


class RankGroup:
    """The ranks of one replica as a torch process group; one rank in each process.

    Args:
        host, port: Address of the store that rank 0 keeps; on rank 0, ``listener`` is open there.
        device: gloo between processors, nccl between GPUs.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        host: str,
        port: int,
        device: torch.device,
        listener: socket.socket | None = None,
    ) -> None:
        _listen_towards(host, port)
        timeout = datetime.timedelta(seconds=_TIMEOUT_S)
        store = TCPStore(
            host,
            port,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=mesh.size, timeout=timeout)
        self._mesh = mesh
        self._stage, self._column = mesh.stage_of(rank), mesh.column_of(rank)
        self._device = device
        self._columns = self._make_columns()
        self._sends: deque[tuple[Any, Tensor]] = deque()
        self._connect()

    def _make_columns(self) -> Any:
        """Returns the group of this stage. Every rank has to make every group."""
        mine = None
        for stage in range(self._mesh.pipeline):
            ranks = [self._mesh.rank_at(stage, column) for column in range(self._mesh.tensor)]
            group = dist.new_group(ranks) if self._mesh.tensor > 1 else None
            mine = group if stage == self._stage else mine
        return mine

    def _connect(self) -> None:
        """Uses each kind of exchange once, so that the backend takes memory for its connections now, not in a step."""
        token = torch.zeros(1, device=self._device)
        shares = [torch.zeros_like(token) for _ in range(self._mesh.tensor)] if self._column == 0 else None
        if self._columns is not None:
            self.add_up(token)
            self.gather(token, shares)
        if self._stage > 0:
            self.receive(torch.zeros_like(token)).wait()
        if self._stage < self._mesh.pipeline - 1:
            self.send(token)

    def add_up(self, partial: Tensor) -> None:
        """Adds up over the columns of this stage, in place."""
        with _together():
            dist.all_reduce(partial, group=self._columns)

    def gather(self, share: Tensor, shares: list[Tensor] | None) -> None:
        """Gathers the tensors of all columns of this stage into ``shares`` on column 0."""
        with _together():
            dist.gather(share, shares, dst=self._mesh.rank_at(self._stage, 0), group=self._columns)

    def send(self, hidden: Tensor) -> None:
        """Sends to the same column of the next stage; this rank computes the next batch meanwhile."""
        with _together():
            while self._sends and (len(self._sends) >= _MAX_SENDS or self._sends[0][0].is_completed()):
                self._sends.popleft()[0].wait()
            work = dist.isend(hidden, self._mesh.rank_at(self._stage + 1, self._column))
        self._sends.append((work, hidden))

    def receive(self, buffer: Tensor) -> Arrival:
        """Receives from the stage before, in the order in which it sends."""
        with _together():
            return Arrival(buffer, dist.irecv(buffer, self._mesh.rank_at(self._stage - 1, self._column)))


def _listen_towards(host: str, port: int) -> None:
    """Lets torch's backends use only the network by which this process reaches rank 0, unless one is configured."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: it only selects a route
        address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


_SUMS_PER_LAYER = 2
"""Sums of a layer: attention and MLP (``engine.models.layers.DecoderLayers``)."""


class Exchange:
    """The exchanges of one step after the other.

    The zeros matter: the others' results land in blocks whose unused slots are multiplied with 0.

    Args:
        dtype: Dtype of the activations.
    """

    def __init__(self, group: RankGroup, part: Part, engine: EngineConfig, dtype: torch.dtype) -> None:
        self._group = group
        self._num_sums = _SUMS_PER_LAYER * len(part.layers) if part.mesh.tensor > 1 else 0
        self._sums_left = 0
        self._num_rows = 0
        device = torch.device(engine.device)
        num_rows = max(engine.step_tokens, engine.max_num_seqs)
        self._blank = torch.zeros(num_rows, part.config.hidden_size, dtype=dtype, device=device)
        self._shares: list[Tensor] | None = None
        if part.is_last and part.mesh.tensor > 1:
            share = -(-part.whole.vocab_size // part.mesh.tensor)
            self._own = torch.zeros(engine.max_num_seqs, share, dtype=torch.float32, device=device)
            if part.rank == 0:
                self._shares = [torch.zeros_like(self._own) for _ in range(part.mesh.tensor)]

    def receive(self, num_rows: int, *, blank: bool) -> Arrival:
        """Receives activations from the stage before, in the order in which it sends; ``blank`` if of no use here.

        Raises:
            torch.OutOfMemoryError: There is no room for them; then no transfer has started.
        """
        buffer = self._zeros(num_rows) if blank else self._blank.new_empty(num_rows, self._blank.shape[1])
        return self._group.receive(buffer)

    def begin(self, num_rows: int) -> None:
        """Begins a step of so many rows."""
        self._num_rows = num_rows
        self._sums_left = self._num_sums

    def add_up(self, partial: Tensor) -> Tensor:
        """Adds up over the columns of this stage, in place."""
        if self._num_sums:
            self._sums_left -= 1
            self._group.add_up(partial)
        return partial

    def sit_out(self) -> None:
        """Adds zeros to the remaining sums of the step."""
        while self._sums_left:
            self.add_up(self._zeros(self._num_rows))

    def send(self, hidden: Tensor | None) -> None:
        """Sends activations to the next stage; zeros if there are none."""
        self._group.send(self._zeros(self._num_rows) if hidden is None else hidden)

    def gather(self, part: Tensor | None, num_rows: int, whole: Tensor | None) -> None:
        """Gathers the columns' logits on rank 0: ``[num_rows, share]`` of each, arbitrary values if it has none.

        Args:
            whole: The target on rank 0, float32 ``[num_rows, vocab]``; None if the logits are not needed.
        """
        size = len(self._own)
        for first in range(0, num_rows, size):
            rows = slice(first, min(first + size, num_rows))
            own = self._own[: rows.stop - first]
            shares = None if self._shares is None else [share[: len(own)] for share in self._shares]
            if part is not None:
                own[:, : part.shape[1]].copy_(part[rows])
            self._group.gather(own, shares)
            if whole is not None and shares is not None:
                for share, target in zip(shares, torch.split(whole[rows], own.shape[1], 1), strict=False):
                    target.copy_(share[:, : target.shape[1]])

    def _zeros(self, num_rows: int) -> Tensor:
        assert num_rows <= len(self._blank), "no step has more rows than a step may compute tokens"
        return self._blank[:num_rows].zero_()
