"""What a rank exchanges in a step, and that it does so whether it can compute or not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from core.config.engine import EngineConfig
from core.errors import RankLost, WorkerBroken
from engine.checkpoint.model_config import load_model_config
from engine.parallel.driver import StepReports
from engine.parallel.exchange import Exchange
from engine.parallel.follower import _Orders
from engine.parallel.group import Arrival
from engine.parallel.links import Link
from engine.parallel.mesh import Mesh, Part
from engine.parallel.stage import Stage, StepOutcome
from engine.parallel.wire import Copied, Finished, pack_report, unpack_report

MAX_ROWS, MAX_SEQS = 8, 2


class Group:
    """Notes what it is given; the other column has logits of its own."""

    def __init__(self, other: Tensor | None = None) -> None:
        self.sums: list[Tensor] = []
        self.sent: list[Tensor] = []
        self._other = other

    def add_up(self, partial: Tensor) -> None:
        self.sums.append(partial.clone())
        partial += 1.0

    def send(self, hidden: Tensor) -> None:
        self.sent.append(hidden.clone())

    def receive(self, buffer: Tensor) -> Arrival:
        return Arrival(buffer, None)

    def gather(self, share: Tensor, shares: list[Tensor] | None) -> None:
        assert shares is not None and self._other is not None
        shares[0].copy_(share)
        rows, self._other = self._other[: len(share)], self._other[len(share) :]
        shares[1][:, : rows.shape[1]] = rows


@pytest.fixture
def make(model_dir: Callable[[str], Path]) -> Callable[[Group, Mesh, int], Exchange]:
    config = load_model_config(model_dir("gqa"))
    engine = EngineConfig(max_num_seqs=MAX_SEQS, max_batch_tokens=MAX_ROWS)

    def make(group: Any, mesh: Mesh, rank: int) -> Exchange:
        return Exchange(group, Part(config, mesh, rank), engine, torch.float32)

    return make


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_a_rank_without_memory_gives_zeros_to_what_is_left(make: Any, num_done: int) -> None:
    group = Group()
    exchange = make(group, Mesh(2, 2), 2)  # the first stage: one layer of two, and so two sums
    for _ in range(2):
        exchange.begin(3)
        for _ in range(num_done):
            exchange.add_up(torch.ones(3, 64))
        exchange.sit_out()
        exchange.send(None)
    expected = [torch.ones(3, 64)] * num_done + [torch.zeros(3, 64)] * (2 - num_done)
    assert len(group.sums) == 4
    assert all(torch.equal(found, wanted) for found, wanted in zip(group.sums, expected * 2, strict=True))
    assert [bool(sent.any()) for sent in group.sent] == [False, False]


def test_stages_of_one_column_have_no_sums(make: Any) -> None:
    group = Group()
    exchange = make(group, Mesh(1, 2), 1)
    exchange.begin(3)
    exchange.sit_out()
    assert exchange.add_up(torch.ones(3, 64)).sum() == 3 * 64
    assert not group.sums


def test_more_logits_than_sequences_are_gathered_in_turn(make: Any) -> None:
    """Those of a prompt."""
    logits = torch.randn(5, 320)
    whole = torch.empty(5, 320)
    exchange = make(Group(logits[:, 160:].clone()), Mesh(2, 1), 0)
    exchange.gather(logits[:, :160], 5, whole)
    assert torch.equal(whole, logits)
    exchange = make(Group(logits[:, 160:].clone()), Mesh(2, 1), 0)
    exchange.gather(None, 5, None)  # takes part, and has nothing of it


def test_a_step_is_over_when_all_have_reported() -> None:
    reports, lack = StepReports(2), Finished("no room", out_of_memory=True)
    for rank, report in ((2, lack), (1, Finished()), (1, Finished("broken")), (2, Finished())):
        read = unpack_report(pack_report(report))
        assert isinstance(read, Finished)
        reports.hear(rank, read)
    assert reports.take() == [Finished(), lack]
    assert reports.take() == [Finished("broken"), Finished()]
    reports.rank_lost()
    with pytest.raises(RankLost):
        reports.take()
    assert unpack_report(pack_report(Copied(7, failed=True))) == Copied(7, failed=True)


class Unable:
    """A stage whose every step comes to nothing, in step with the other ranks."""

    def finish(self) -> StepOutcome:
        return StepOutcome(None, Finished("RuntimeError: CUDA error: unspecified launch failure"))


@pytest.mark.parametrize("lost", [False, True])
def test_it_tells_rank_0_unless_its_device_is_lost(lost: bool) -> None:
    ours, theirs = _tcp_pair()
    orders = _Orders(Link(ours), cast(Stage, Unable()), None, lambda: None, lambda: lost, lambda: None)
    if lost:
        with pytest.raises(WorkerBroken, match="device of this rank is lost"):
            orders._finish_step()
    else:
        orders._finish_step()
        report = unpack_report(Link(theirs).receive())
        assert isinstance(report, Finished) and "unspecified launch failure" in report.failure
    ours.close()
    theirs.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """A link is a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]
