"""Sequences between device and host: orders obeyed once, blocks freed only after the copy, come what may."""

from __future__ import annotations

import pytest

from farsight.core.errors import IntegrityError
from farsight.core.messages.kv import KVTraffic
from farsight.core.messages.plans import Plan, Slot, SlotProgress
from farsight.core.request import Request, Residency, SamplingParams, SequenceStatus
from farsight.kvcache import BatchLimits, BlockManager, KVCopy, LeaseExecutor
from farsight.kvcache.block_manager import hash_blocks

SIZE = 4
DEVICE, HOST = Residency.DEVICE, Residency.HOST


class Loop:
    """An executor with a host pool; every sequence has a prompt of ones."""

    def __init__(self, num_blocks: int = 8, num_host_blocks: int = 8) -> None:
        host = BlockManager(num_host_blocks, SIZE) if num_host_blocks else None
        self.executor = LeaseExecutor(BlockManager(num_blocks, SIZE, block_bytes=100), BatchLimits(8, 64), "w", host)
        self.seq = 0

    def plan(self, *slots: tuple[str, Residency, int], preemptions: int = 0, prompt: int = 6) -> None:
        """Slots of (name, residency, num_moves)."""
        self.seq += 1
        made = []
        for name, residency, num_moves in slots:
            request = Request(name, 0, "i", (1,) * prompt, SamplingParams(20))
            made.append(Slot(name, 0, 99, 99, False, preemptions, request, residency, num_moves))
        self.executor.apply_plan(Plan("w", 0, self.seq, 0, 0, tuple(made)))
        self.executor.check_integrity()

    def step(self) -> tuple[dict[str, tuple[int, int]], list[KVCopy]]:
        batch = self.executor.next_batch()
        self.executor.check_integrity()
        copies = self.executor.take_copies()
        items = () if batch is None else batch.items
        if batch is not None:
            self.executor.commit(batch)
        self.executor.check_integrity()
        return {item.request_id: (item.start, item.num_tokens) for item in items}, copies

    def complete(self, copy: KVCopy, *, failed: bool = False) -> None:
        self.executor.complete_copy(copy.copy_id, failed=failed)
        self.executor.check_integrity()

    @property
    def free(self) -> tuple[int, int]:
        host = self.executor.host
        return self.executor.blocks.num_free, 0 if host is None else host.num_free

    @property
    def progress(self) -> SlotProgress:
        return self.executor.report().progress[0]


def offloading(loop: Loop) -> KVCopy:
    """``a`` has computed its prompt and one token and is on its way to the host."""
    loop.plan(("a", DEVICE, 0))
    loop.step()
    loop.step()
    loop.plan(("a", HOST, 1))
    _, (copy,) = loop.step()
    return copy


def test_there_and_back_without_computing_anything_twice() -> None:
    loop = Loop()
    out = offloading(loop)
    assert (out.to, len(out.source), len(out.target)) == (HOST, 2, 2)
    assert loop.step() == ({}, []), "it does not run while it is copied, and is copied once"
    assert loop.free == (6, 6), "the source is free only when the copy is done"
    assert (loop.executor.report().flying_blocks, loop.executor.report().free_host_blocks) == (2, 6)
    loop.complete(out)
    assert loop.free == (8, 6)
    assert loop.executor.report().traffic == KVTraffic(offloads=1, offloaded_bytes=200)
    assert (loop.progress.status, loop.progress.num_host_blocks) == (SequenceStatus.OFFLOADED, 2)
    assert loop.step() == ({}, [])
    loop.plan(("a", DEVICE, 2))
    items, (back,) = loop.step()
    assert (items, back.to, back.source) == ({}, DEVICE, out.target)
    assert loop.step() == ({}, [])
    loop.complete(back)
    assert loop.free == (6, 8)
    assert loop.executor.report().traffic == KVTraffic(1, 1, 200, 200)
    assert loop.executor.report().flying_blocks == 0
    assert loop.step() == ({"a": (7, 1)}, [])
    loop = Loop()
    out = offloading(loop)
    loop.plan(("a", DEVICE, 2))
    assert loop.step() == ({}, []), "called back while it leaves"
    loop.complete(out)
    assert [copy.to for copy in loop.step()[1]] == [DEVICE]


def test_late_and_repeated_orders_move_nothing() -> None:
    loop = Loop()
    loop.complete(offloading(loop))
    loop.plan(("a", DEVICE, 2))
    loop.complete(loop.step()[1][0])
    loop.plan(("a", HOST, 1))
    assert loop.step() == ({"a": (7, 1)}, [])
    loop.plan(("a", DEVICE, 2))
    assert loop.step() == ({"a": (8, 1)}, [])


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_on_the_host_the_order_is_refused_and_it_runs_on(num_host_blocks: int) -> None:
    loop = Loop(num_host_blocks=num_host_blocks)
    loop.plan(("a", DEVICE, 0))
    loop.step()
    loop.plan(("a", HOST, 1))
    assert loop.step() == ({"a": (6, 1)}, [])
    assert (loop.progress.num_moves, loop.progress.residency, loop.progress.num_host_blocks) == (1, DEVICE, 0)
    assert loop.executor.report().traffic == KVTraffic(refused_offloads=num_host_blocks)


@pytest.mark.parametrize("back", [False, True])
def test_an_abort_in_flight_frees_both_sides_when_the_copy_is_done(back: bool) -> None:
    loop = Loop()
    copy = offloading(loop)
    if back:
        loop.complete(copy)
        loop.plan(("a", DEVICE, 2))
        copy = loop.step()[1][0]
    loop.plan()
    assert loop.free == (6, 6)
    loop.plan(("b", DEVICE, 0))
    assert loop.step()[0] == {"b": (0, 6)}
    loop.complete(copy)
    assert loop.free == (6, 8)


@pytest.mark.parametrize("landed", [False, True])
def test_a_preemption_drops_what_is_on_the_host_or_on_its_way(landed: bool) -> None:
    loop = Loop()
    copy = offloading(loop)
    if landed:
        loop.complete(copy)
    loop.plan(("a", DEVICE, 2), preemptions=1)
    assert loop.step()[0] == {"a": (0, 8)}
    if not landed:
        loop.complete(copy)
    assert loop.free == (6, 8)


def test_an_upload_waits_for_room_and_keeps_its_rank() -> None:
    loop = Loop(num_blocks=3)
    loop.complete(offloading(loop))
    loop.plan(("a", HOST, 1), ("b", DEVICE, 0))
    loop.step()
    loop.plan(("a", DEVICE, 2), ("b", DEVICE, 0), ("c", DEVICE, 0), prompt=2)
    items, copies = loop.step()
    assert (list(items), copies) == (["b"], []), "c would fit, but ranks below a"
    loop.plan(("a", DEVICE, 2))
    assert [copy.to for copy in loop.step()[1]] == [DEVICE]


def test_shared_blocks_are_copied_but_only_its_own_hold_on_them_is_given_up() -> None:
    loop = Loop()
    loop.executor.share_prefixes(lambda name, count: hash_blocks((1,) * 40, SIZE)[:count])
    loop.plan(("a", DEVICE, 0), ("b", DEVICE, 0))
    loop.step()
    loop.step()
    loop.plan(("a", HOST, 1), ("b", DEVICE, 0))
    _, (out,) = loop.step()
    loop.complete(out)
    assert loop.executor.blocks.table("b")[0] == out.source[0]
    loop.plan(("a", DEVICE, 2), ("b", DEVICE, 0))
    _, (back,) = loop.step()
    loop.complete(back)
    assert loop.executor.blocks.table("a")[0] == out.source[0], "the block that came back is merged with the cached one"


def test_integrity_sees_a_lost_host_block() -> None:
    loop = Loop()
    offloading(loop)
    assert loop.executor.host is not None
    loop.executor.host.grow("nobody", 1)
    with pytest.raises(IntegrityError, match="host blocks"):
        loop.executor.check_integrity()


def test_tokens_computed_again_are_counted_once_each_time() -> None:
    loop = Loop()
    loop.plan(("a", DEVICE, 0))
    for preemptions in (1, 2):
        loop.step()
        loop.step()
        loop.plan(("a", DEVICE, 0), preemptions=preemptions)
    loop.step()
    assert loop.executor.report().traffic == KVTraffic(recomputed_tokens=7 + 9)
    loop = Loop()
    loop.complete(offloading(loop), failed=True)
    assert (loop.free, loop.executor.report().traffic) == ((8, 8), KVTraffic())
    assert loop.step()[0] == {"a": (0, 8)}, "what a failed copy did not bring"
    assert loop.executor.report().traffic == KVTraffic(recomputed_tokens=7)
