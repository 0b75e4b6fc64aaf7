"""Who leaves the device, and how."""

from __future__ import annotations

import math

import pytest

from core.errors import InvalidValueError
from policies.interfaces import Job, KvMoves, KvView
from policies.kv.cheapest_victim import CheapestVictim
from policies.order.gittins import DecodePrice, Gittins
from tests.unit.policies.order.test_gittins import STEP, job


def policy(**options: object) -> CheapestVictim:
    return CheapestVictim(Gittins(DecodePrice(STEP, 64, 10_000)), **options)  # type: ignore[arg-type]


def moves_of(seen: KvView) -> KvMoves:
    """What is moved where the order knows exactly these jobs."""
    rule = policy()
    for each in (*seen.running, *seen.idle, *seen.offloaded):
        rule.order.add(each, 0.0)
    return rule.moves(seen, 0.0)


def view(
    running: list[Job] | None = None,
    idle: list[Job] | None = None,
    offloaded: list[Job] | None = None,
    free: int = 0,
    needed: int = 0,
    host_free: int = 100_000,
) -> KvView:
    return KvView(running or [], idle or [], offloaded or [], free, needed, host_free, 100_000)


def resident(name: str, length: float, computed_len: int = 500, **fields: object) -> Job:
    return job(name, length, prompt_len=computed_len, computed_len=computed_len, output_len=1, **fields)


def test_example_swap_or_compute_again() -> None:
    """Llama-2-7B, 2000 tokens of 512 KiB: 42 ms one way at 25 GB/s against 217 ms, so the victim is moved."""
    assert round(2000 * 512 * 1024 / 25e9 * 1e3) == 42
    assert round(2000 * 0.1085) == 217
    victim = resident("a", 50, 2000)
    assert moves_of(view(idle=[victim], needed=10)) == KvMoves(offload=(victim,))


def test_worst_idle_first_then_the_tail_of_the_running() -> None:
    short, long = resident("short", 50), resident("long", 900)
    running = [resident("first", 900), resident("last", 10)]
    full = view(running, [long, short], needed=400)
    assert moves_of(full).offload == (long,)
    assert moves_of(view(running, [short, long], needed=1001)).offload == (long, short, running[1])


def test_the_first_of_the_running_stays() -> None:
    only = resident("only", 10)
    assert moves_of(view([only], needed=10)) == KvMoves()


def test_urgent_jobs_leave_last() -> None:
    urgent, other = resident("urgent", 900, priority=-1), resident("other", 10)
    assert moves_of(view(idle=[urgent, other], needed=10)).offload == (other,)


@pytest.mark.parametrize(("computed_len", "host_free", "moved"), [(256, 256, 1), (255, 999, 0), (300, 299, 0)])
def test_dropped_if_small_or_the_host_is_full(computed_len: int, host_free: int, moved: int) -> None:
    moves = moves_of(view(idle=[resident("a", 50, computed_len)], needed=1, host_free=host_free))
    assert (len(moves.offload), len(moves.drop)) == (moved, 1 - moved)


def test_nothing_moves_without_need() -> None:
    idle, far = resident("idle", 20), job("far", 900, host_len=100)
    assert moves_of(view(idle=[idle], offloaded=[far], free=250, needed=250)) == KvMoves()


def test_host_guard() -> None:
    assert policy().start_room(view(host_free=10_100, free=20, needed=5)) == 115
    assert policy().start_room(view(host_free=9_999, free=20)) == 0
    assert policy().start_room(KvView([], [], [], 0, 0, 0, 0)) == math.inf


@pytest.mark.parametrize("options", [{"min_swap_len": -1}, {"min_host_share": 1.5}])
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(InvalidValueError):
        policy(**options)
