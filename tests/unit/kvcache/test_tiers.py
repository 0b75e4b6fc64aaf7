"""Tiers below the device: what is saved, what comes back, what leaves first, and within which bounds."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from farsight.core.errors import InvalidValueError
from farsight.core.messages.kv import BlockName, KVIdentity
from farsight.core.messages.plans import Plan, Slot
from farsight.core.request import Request, Residency, SamplingParams
from farsight.kvcache import BatchLimits, BlockManager, KVCopy, LeaseExecutor
from farsight.kvcache.block_manager import hash_blocks
from farsight.kvcache.tiers import HOUR_S, MOST_SAVED, KVTiers, TierLimits, TierPrices

DEVICE, HOST, DISK = Residency
IDENTITY = KVIdentity("llama", "a1", "float32", "full", "1.0", 32, 4096)


def chain(first: int, num: int, owner: str = "") -> list[BlockName]:
    return [BlockName(first + i, first + i - 1 if i else 0, owner) for i in range(num)]


def names(blocks: list[BlockName]) -> list[int]:
    return [block.name for block in blocks]


def save_all(tiers: KVTiers, blocks: list[BlockName]) -> list[tuple[Residency, Residency, int]]:
    """Ends a sequence with these blocks; returns the orders (source, target, blocks) until nothing is to be saved."""
    tiers.keep(blocks)
    orders = []
    while saves := [save for to in (HOST, DISK) if (save := tiers.next_save(to, lambda _: True)) is not None]:
        for save in saves:
            orders.append((save.source, save.to, len(save.blocks)))
            tiers.saved(save)
            tiers.check_integrity()
    return orders


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(KVIdentity)])
def test_any_difference_is_another_identity(field: str) -> None:
    value = getattr(IDENTITY, field)
    changed: Any = {field: value + 1 if isinstance(value, int) else value + "x"}
    other = dataclasses.replace(IDENTITY, **changed)
    assert other.digest() != IDENTITY.digest() == dataclasses.replace(IDENTITY).digest()


def test_a_block_is_saved_once() -> None:
    num = MOST_SAVED + 4
    tiers = KVTiers(TierLimits(disk_blocks=2 * num))
    assert save_all(tiers, chain(1, num)) == [(DEVICE, DISK, MOST_SAVED), (DEVICE, DISK, 4)]
    assert save_all(tiers, chain(1, num + 2)) == [(DEVICE, DISK, 2)]
    assert (tiers.counts.disk_saved, tiers.tier_of(1), tiers.take_dropped()) == (num + 2, DISK, [])


def test_blocks_go_to_the_host_first_and_on_to_the_disk() -> None:
    tiers = KVTiers(TierLimits(host_blocks=4, disk_blocks=100))
    one = [(DEVICE, HOST, 1), (HOST, DISK, 1)]  # a part of the host tier at once
    assert save_all(tiers, chain(1, 4)) == [one[0], *3 * [one[0], one[1]], one[1]]
    assert tiers.tier_of(1) is HOST
    save_all(tiers, chain(11, 4))
    assert (tiers.tier_of(1), tiers.tier_of(11)) == (DISK, HOST)
    assert [tier for tier, _ in tiers.take_dropped()] == [HOST] * 4
    assert tiers.counts.unsaved == 0


def test_a_block_that_the_device_has_evicted_is_not_saved() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=100))
    tiers.keep(chain(1, 3))
    save = tiers.next_save(DISK, lambda name: name != 2)
    assert save is not None and names(list(save.blocks)) == [1, 3]
    assert tiers.counts.unsaved == 1


def test_unsaved_blocks_do_not_pile_up_where_nothing_may_be_written() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=10**6, block_bytes=100, write_bytes_per_hour=99))
    for first in range(1, 100_000, 100):
        tiers.keep(chain(first, 100))
        assert tiers.next_save(DISK, first.__le__) is None
    assert len(tiers._unsaved) < 3000
    assert tiers.counts.unsaved > 90_000


def test_writes_of_an_hour_are_bounded() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=1000, block_bytes=100, write_bytes_per_hour=1000))
    save_all(tiers, chain(1, 30))
    assert len(tiers.disk) == 10
    tiers.tick(HOUR_S / 2)
    save_all(tiers, [])
    assert len(tiers.disk) == 15
    tiers.tick(9 * HOUR_S)  # an idle night does not allow more than an hour's bytes at once
    save_all(tiers, [])
    assert len(tiers.disk) == 25


def test_least_recently_used_chains_leave_from_their_ends() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=10))
    for first in (1, 11):
        save_all(tiers, chain(first, 4))
    save_all(tiers, chain(1, 4))  # used again
    save_all(tiers, chain(21, 5))
    assert [block.name for tier, block in tiers.take_dropped() if tier is DISK] == [14, 13, 12]
    assert tiers.tier_of(11) is DISK
    assert tiers.counts.evicted == 3


def test_a_turn_that_waits_keeps_its_blocks_until_nothing_else_is_left() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=8))
    save_all(tiers, chain(1, 4))
    save_all(tiers, chain(11, 4))
    tiers.wait("r", [1, 2, 3, 4])
    save_all(tiers, chain(21, 4))
    assert [tiers.tier_of(name) for name in (1, 4, 11)] == [DISK, DISK, None]
    save_all(tiers, chain(31, 8))
    assert all(tiers.tier_of(name) is DISK for name in (1, 4))
    tiers.leave("r")
    save_all(tiers, chain(41, 8))
    assert tiers.tier_of(1) is None
    tiers.check_integrity()


def test_a_tenant_has_a_quota_and_only_his_own_blocks_leave_for_it() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=100, owner_blocks=5))
    save_all(tiers, chain(1, 5, "a"))
    save_all(tiers, chain(101, 8, "b"))
    assert (tiers.disk.num_blocks("a"), tiers.disk.num_blocks("b")) == (5, 5)
    tiers.drop_owner("a")
    assert {block.name for _, block in tiers.take_dropped()} >= {1, 2, 3, 4, 5}
    assert (tiers.disk.num_blocks("a"), tiers.disk.num_blocks("b")) == (0, 5)


def test_everything_comes_back_before_prices_are_known() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=100))
    save_all(tiers, chain(1, 6))
    expected = tiers.worth([1, 2, 3, 4, 5, 6, 7], 2, 7, 32)
    assert expected is not None and expected.tiers == (DISK,) * 4


@pytest.mark.parametrize(("token_s", "num_back"), [(1.0, 8), (0.05, 4), (0.001, 0)])
def test_what_is_cheaper_to_compute_stays_and_the_rest_comes_back(token_s: float, num_back: int) -> None:
    """The first four blocks lie on the host at 1 s each, the others on the disk at 10 s."""
    tiers = KVTiers(TierLimits(host_blocks=4, disk_blocks=100), TierPrices(token_s, 1.0, 10.0))
    save_all(tiers, chain(5, 4))
    save_all(tiers, chain(1, 4))
    expected = tiers.worth(range(1, 9), 0, 8, 32)
    assert (0 if expected is None else len(expected.tiers)) == num_back


def test_a_return_spares_all_that_wait_for_the_device() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=100), TierPrices(0.001, 0.0, 0.1))
    save_all(tiers, chain(1, 8))
    assert tiers.worth(range(1, 9), 0, 8, 32, num_held=3) is None
    expected = tiers.worth(range(1, 9), 0, 8, 32, num_held=4)
    assert expected is not None and len(expected.tiers) == 8


def test_a_return_behind_others_is_dearer() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=100), TierPrices(0.01, 0.0, 0.2))
    save_all(tiers, chain(1, 8))
    save_all(tiers, chain(11, 2))
    first, second = tiers.worth(range(1, 9), 0, 8, 32), tiers.worth([11, 12], 0, 2, 32)
    assert first is not None and second is not None
    tiers.begin_return(range(1, 9), first)
    assert tiers.worth([11, 12], 0, 2, 32) is None
    tiers.prices.disk_block_s = 0.1  # by other measurements: what is booked is taken off all the same
    tiers.returned(range(1, 9), first, 8, 0.8)
    tiers.prices.disk_block_s = 0.2
    assert tiers.worth([11, 12], 0, 2, 32) == second


def test_a_damaged_block_is_dropped_and_counted() -> None:
    tiers = KVTiers(TierLimits(disk_blocks=100))
    save_all(tiers, chain(1, 4))
    expected = tiers.worth([1, 2, 3, 4], 0, 4, 32)
    assert expected is not None
    tiers.take_dropped()
    tiers.begin_return([1, 2, 3, 4], expected)
    tiers.returned([1, 2, 3, 4], expected, 2, 1.0)
    assert (tiers.counts.disk_brought, tiers.counts.damaged) == (2, 1)
    assert (tiers.tier_of(2), tiers.tier_of(3)) == (DISK, None)
    assert tiers.take_dropped() == [(DISK, BlockName(3, 2))]
    tiers.check_integrity()


def test_prices_follow_what_was_measured() -> None:
    prices = TierPrices()
    prices.computed(1000, 10.0)
    prices.brought(10, 0, 1.0)
    prices.brought(10, 10, 5.0)
    assert (prices.prefill_token_s, prices.host_block_s, prices.disk_block_s) == (0.01, 0.1, 0.4)


def test_limits_are_checked() -> None:
    with pytest.raises(InvalidValueError, match="disk_blocks"):
        TierLimits(disk_blocks=-1)


def test_bounds_hold_in_any_order_of_events() -> None:
    rng = random.Random(5)
    tiers = KVTiers(TierLimits(host_blocks=7, disk_blocks=30, owner_blocks=12))
    open_saves, returns = [], []
    for _ in range(3000):
        first, owner = 100 * rng.randrange(1, 8), rng.choice(["a", "b", "c"])
        match rng.randrange(6):
            case 0:
                tiers.keep(chain(first, rng.randrange(1, 9), owner))
            case 1:
                save = tiers.next_save(rng.choice([HOST, DISK]), lambda _: rng.random() < 0.8)
                open_saves += [] if save is None else [save]
            case 2 if open_saves:
                save = open_saves.pop(rng.randrange(len(open_saves)))
                spoiled = {save.blocks[0].name} if rng.random() < 0.1 else ()
                tiers.saved(save, rng.choice([None, 0, 1, None, None]), spoiled)
            case 3:
                wanted = range(first, first + 8)
                expected = tiers.worth(wanted, 0, 8, 4)
                if expected is not None:
                    back = wanted[: len(expected.tiers)]
                    tiers.begin_return(back, expected)
                    returns.append((back, expected))
            case 4 if returns:
                back, expected = returns.pop()
                tiers.returned(back, expected, rng.randrange(len(back) + 1), rng.random())
            case _:
                tiers.wait(str(first), [first, first + 1]) if rng.random() < 0.5 else tiers.leave(str(first))
        for _, block in tiers.take_dropped():
            assert block.owner in "abc"
        tiers.check_integrity()
        assert max(map(tiers.disk.num_blocks, "abc")) <= 12
    assert tiers.counts.disk_brought and tiers.counts.evicted and tiers.counts.damaged


SIZE = 4
A, B, C = (tuple(range(first, first + 17)) for first in (100, 200, 300))
ON_DISK = TierLimits(disk_blocks=100)
NUM_OUTPUT = 4


class Machine:
    """An executor whose tiers hold what a device of names would: every block that comes back is compared."""

    def __init__(self, num_blocks: int = 6, limits: TierLimits = ON_DISK) -> None:
        self.executor = LeaseExecutor(BlockManager(num_blocks, SIZE, block_bytes=100), BatchLimits(8, 64), "w")
        self.tiers = KVTiers(limits)
        self.device: dict[int, int] = {}  # block -> name of what it holds
        self.below: dict[Residency, dict[int, int]] = {HOST: {}, DISK: {}}
        self.requests: dict[str, Request] = {}
        self.open: list[KVCopy] = []
        self.seq = 0
        self.num_computed = 0
        self.executor.share_prefixes(self.hashes)
        self.executor.keep_tiers(self.tiers)

    def hashes(self, request_id: str, num_blocks: int) -> list[int]:
        return hash_blocks(self.requests[request_id].prompt_ids + (7,) * 50, SIZE)

    def plan(self, *names: str) -> None:
        self.seq += 1
        slots = tuple(Slot(name, 0, 99, 99, False, 0, self.requests[name]) for name in names)
        self.executor.apply_plan(Plan("w", 0, self.seq, self.executor._report_seq, 0, slots))
        self.executor.report()

    def ask(self, name: str, prompt: tuple[int, ...], num_output: int = 1, tenant: str = "") -> None:
        self.requests[name] = Request(name, 0, "i", prompt, SamplingParams(num_output), tenant=tenant)

    def step(self, *, moves: bool = True) -> bool:
        """Runs a step and, unless moves are held up, ends all copies; returns whether anything has happened."""
        batch = self.executor.next_batch()
        for tier, block in self.tiers.take_dropped():
            self.below[tier].pop(block.name, None)
        self.open += self.executor.take_copies()
        if batch is not None:
            for item in batch.items:
                self.num_computed += item.num_tokens
                names = self.hashes(item.request_id, 0)
                for i in range(item.start // SIZE, len(item.blocks)):
                    self.device[item.blocks[i]] = names[i]
            self.executor.commit(batch, duration_s=1.0)
        ended, self.open = (self.open, []) if moves else ([], self.open)
        for copy in ended:
            self.end(copy)
        self.executor.check_integrity()
        return batch is not None or bool(ended)

    def end(self, copy: KVCopy, num_good: int | None = None) -> None:
        names = [block.name for block in copy.names]
        if copy.to is DEVICE:
            for name, block, tier in zip(names, copy.target, copy.tiers, strict=True):
                self.device[block] = self.below[tier][name]
        elif copy.source:
            for name, block in zip(names, copy.source, strict=True):
                if self.executor.blocks.has_read(block, name):
                    self.below[copy.to][name] = self.device[block]
        else:
            self.below[copy.to].update({name: self.below[HOST][name] for name in names})
        if copy.to is DEVICE:
            self.tiers.outcomes[copy.copy_id] = len(names) if num_good is None else num_good, 0.01
        self.executor.complete_copy(copy.copy_id)
        self.executor.check_integrity()

    def run(self, name: str, prompt: tuple[int, ...], num_output: int = 1) -> int:
        """Serves a request alone; returns the tokens computed."""
        before = self.num_computed
        self.ask(name, prompt, num_output)
        self.plan(name)
        while self.step():
            self.check()
        assert not self.executor.holds(name)
        return self.num_computed - before

    def check(self) -> None:
        """Everything cached is what its name says."""
        for tier, index in ((HOST, self.tiers.host), (DISK, self.tiers.disk)):
            assert all(self.below[tier][block.name] == block.name for block in index.blocks())
        for name, block in self.executor.blocks._cached.items():
            assert self.device[block] == name


@pytest.mark.parametrize("limits", [ON_DISK, TierLimits(host_blocks=5, disk_blocks=100)])
def test_a_conversation_that_lost_its_blocks_gets_them_back(limits: TierLimits) -> None:
    machine = Machine(limits=limits)
    assert machine.run("a", A) == 17
    assert machine.run("b", B) == 17  # takes most of the pool
    assert machine.run("c", C) == 17
    assert machine.run("a2", A) == 1
    assert machine.tiers.counts.host_brought + machine.tiers.counts.disk_brought == 4
    assert machine.executor.prefix_hits == 16
    assert machine.run("b2", B) == 1
    assert machine.executor.transfers.num_brought == 32


def test_what_is_damaged_is_computed_again_and_saved_again() -> None:
    machine = Machine()
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        machine.run(name, prompt)
    machine.ask("a2", A)
    machine.plan("a2")
    machine.step(moves=False)
    (copy,) = [each for each in machine.open if each.to is DEVICE]
    machine.open.remove(copy)
    machine.end(copy, num_good=2)
    while machine.step():
        machine.check()
    assert machine.num_computed == 3 * 17 + 9
    assert machine.tiers.counts.damaged == 1
    assert all(machine.tiers.tier_of(name) is DISK for name in machine.hashes("a", 0)[:4])


def test_a_request_that_is_broken_off_while_its_blocks_come_back_leaves_nothing_behind() -> None:
    machine = Machine()
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        machine.run(name, prompt)
    machine.ask("a2", A)
    machine.plan("a2")
    machine.step(moves=False)
    machine.plan()
    machine.executor.check_integrity()
    assert machine.executor.blocks.num_free == 1  # the copy still writes there
    while machine.step():
        machine.check()
    assert machine.executor.blocks.num_free == 6
    assert machine.run("a3", A) == 1


def test_two_requests_of_one_prefix_bring_it_back_once() -> None:
    machine = Machine(num_blocks=16)
    for name, prompt in (("a", A), ("b", B * 2), ("c", C * 2)):
        machine.run(name, prompt)
    machine.ask("a2", A)
    machine.ask("a3", (*A, 1, 2))
    machine.plan("a2", "a3")
    before = machine.num_computed
    while machine.step():
        machine.check()
    assert machine.num_computed - before == 1 + 3
    assert machine.tiers.counts.disk_brought <= 4


def test_a_block_that_was_overwritten_while_it_was_read_is_not_kept() -> None:
    machine = Machine()
    machine.ask("a", A)
    machine.plan("a")
    machine.step(moves=False)
    machine.ask("b", B + C[:7])
    machine.plan("b")
    machine.step(moves=False)  # takes all six blocks, while four are still read
    (copy,) = machine.open
    machine.open.clear()
    machine.end(copy)
    machine.step()
    assert machine.tiers.counts.unsaved == 4
    machine.check()


def test_where_nobody_returns_nothing_is_written_until_somebody_does() -> None:
    machine, rng = Machine(limits=TierLimits(disk_blocks=1000)), random.Random(6)
    talks = [tuple(rng.randrange(1000) for _ in range(17)) for _ in range(80)]
    for number, talk in enumerate(talks):
        machine.run(f"r{number}", talk)
    written = machine.tiers.counts.disk_saved
    assert machine.tiers.tier_of(machine.hashes("r0", 0)[0]) is DISK, "at first it is not known"
    assert machine.tiers.tier_of(machine.hashes("r79", 0)[0]) is None
    assert written < 4 * 60
    for number in (3, 4):  # take its place on the device
        machine.run(f"x{number}", talks[number][::-1])
    assert machine.run("again", talks[79]) == 17  # it was not kept, and is from now on
    assert machine.tiers.counts.disk_saved == written + 4
    for number in range(3):
        machine.run(f"x{number}", talks[number][::-1])
    assert machine.run("and again", talks[79]) == 1


def test_a_request_that_shares_nothing_is_not_saved() -> None:
    machine = Machine()
    sampling = SamplingParams(1, logprobs=1, prompt_logprobs=True)
    machine.requests["p"] = Request("p", 0, "i", A, sampling)
    machine.plan("p")
    while machine.step():
        pass
    assert not machine.below[DISK]


def test_random_conversations_come_back_as_they_were() -> None:
    rng = random.Random(3)
    machine = Machine(12, TierLimits(host_blocks=8, disk_blocks=40, owner_blocks=30))
    talks = [tuple(rng.randrange(1000) for _ in range(40)) for _ in range(6)]
    running: list[str] = []
    for turn in range(600):
        running = [name for name in running if machine.executor.holds(name)]
        if len(running) < 3:
            name = f"t{turn}"
            talk = rng.choice(talks)
            machine.ask(name, talk[: rng.randrange(4, 40)], rng.randrange(1, 4), rng.choice("ab"))
            running.append(name)
        if rng.random() < 0.05:
            running.pop(0)
        machine.plan(*running)
        machine.step(moves=rng.random() < 0.5)
        machine.check()
    assert machine.tiers.counts.disk_brought > 50
    assert machine.tiers.counts.host_brought > 30


@pytest.mark.parametrize(("below", "least", "most"), [(True, 1.0, 1.15), (False, 3.0, 9.0)])
def test_eight_conversations_in_a_pool_for_two_are_computed_once(below: bool, least: float, most: float) -> None:
    """Ten turns each, the next as soon as one has ended: another turn that waits takes its blocks in the same step.

    With one tier most of each prompt is computed at every turn.
    """
    machine = Machine(2 * 32, TierLimits(disk_blocks=1000))
    if not below:
        machine.executor.tiers = machine.executor.transfers.tiers = None
    rng, turns = random.Random(4), [0] * 8
    talks: list[tuple[int, ...]] = [()] * 8
    names: list[str] = []
    while True:
        for i in range(8):
            if turns[i] < 10 and f"{i}-{turns[i] - 1}" not in names:
                talks[i] += tuple(rng.randrange(1000) for _ in range(12))
                machine.ask(f"{i}-{turns[i]}", talks[i], NUM_OUTPUT)
                names.append(f"{i}-{turns[i]}")
                turns[i] += 1
        machine.plan(*names[:2])
        if not machine.step():
            break
        names = [*(name for name in names[:2] if machine.executor.holds(name)), *names[2:]]
        machine.check()
    assert turns == [10] * 8
    num_prompt_tokens = machine.num_computed - 8 * 10 * (NUM_OUTPUT - 1)
    assert least <= num_prompt_tokens / sum(map(len, talks)) <= most
