"""Sessions: how they are found, what they count, how tenants are kept apart, and what bounds them."""

from __future__ import annotations

import sys
from functools import partial

import pytest

from farsight.core.messages.live import SessionsQuery
from farsight.core.messages.plans import FinishedSequence
from farsight.core.request import Origin, Request, SamplingParams, SequenceStatus
from farsight.policies.fleet.sessions import KEPT_ENDS, MAX_APPLICATIONS, OTHERS, SessionTable
from tests.opcodes import num_opcodes

BLOCK = 16
SAMPLING = SamplingParams(8)


def turn(name: str, num_blocks: int, first: int = 0, **fields: object) -> Request:
    """A request whose prompt has the first blocks of a chain that begins with ``first``, and 4 tokens more."""
    hashes = tuple(range(1000 * first + 1, 1000 * first + num_blocks + 1))
    prompt = (0,) * (num_blocks * BLOCK + 4)
    return Request(name, 0, "ingress-0", prompt, SAMPLING, prefix_hashes=hashes, **fields)  # type: ignore[arg-type]


def end(name: str, cached_len: int = 0, status: SequenceStatus = SequenceStatus.FINISHED_STOPPED) -> FinishedSequence:
    return FinishedSequence(name, 0, status, 5, cached_len, 1.0, 0.5)


def test_a_turn_is_found_by_the_prompt_that_it_continues() -> None:
    table = SessionTable(BLOCK)
    table.began(turn("a", 3), 10.0)
    assert table.told("a") == {"session": "#1", "turn": 1, "new_tokens": 52}
    table.ended(end("a"), 12.0)
    table.began(turn("other", 3, first=7), 12.0)
    table.began(turn("b", 5), 20.0)
    assert table.told("b") == {"session": "#1", "turn": 2, "new_tokens": 5 * BLOCK + 4 - 3 * BLOCK}
    table.ended(end("b", cached_len=2 * BLOCK), 23.0)
    table.check_integrity()
    view = table.view(SessionsQuery(10), 30.0)
    counts = view.rows[0].counts
    assert view.num_sessions == 2 and view.rows[0].name == "#1" and not view.rows[0].is_named
    assert (counts.turns, counts.answers, counts.prompt_tokens, counts.output_tokens) == (2, 2, 52 + 84, 10)
    assert (counts.new_tokens, counts.computed_tokens, counts.gpu_s) == (52 + 36, 52 + 52, 1.0)
    assert (counts.in_model_s, counts.away_s) == (2.0 + 3.0, 8.0)
    total = table.totals()
    assert (total.sessions, total.turns, total.answers) == (2, 3, 2)


def test_a_client_may_name_the_session_or_the_answer_that_it_goes_on_from() -> None:
    table = SessionTable(BLOCK)
    table.began(turn("a", 2, session="chat", origin=Origin("resp_1")), 0.0)
    table.began(turn("b", 2, first=5, session="chat"), 0.0)
    assert table.told("b") == {"session": "chat", "turn": 2, "new_tokens": 36}, "nothing of it was there before"
    table.began(turn("c", 4, session="chat"), 0.0)
    assert table.told("c")["new_tokens"] == 36
    table.began(turn("d", 1, first=9, continues="resp_1"), 0.0)
    assert table.told("d")["session"] == "chat"
    table.began(turn("e", 1, first=9, continues="resp_1", tenant="else"), 0.0)
    assert table.told("e")["session"] != "chat", "another tenant's answer"
    table.check_integrity()


def test_tenants_share_no_session() -> None:
    table = SessionTable(BLOCK)
    for tenant in ("one", "two"):
        table.began(turn(f"{tenant}-named", 2, session="same", tenant=tenant), 0.0)
        table.began(turn(f"{tenant}-found", 3, first=1, tenant=tenant), 0.0)
        table.began(turn(f"{tenant}-goes-on", 4, first=1, tenant=tenant), 0.0)
    assert len(table) == 4
    assert {row.tenant for row in table.view(SessionsQuery(9, "one"), 0.0).rows} == {"one"}
    assert all(row.counts.turns == (1 if row.is_named else 2) for row in table.rows())


def test_attempts_aborts_and_strangers_are_not_counted_twice() -> None:
    table = SessionTable(BLOCK)
    table.began(turn("a", 2), 0.0)
    table.began(turn("a", 2), 1.0)
    table.ended(end("stranger"), 1.0)
    table.left(["stranger"], 1.0)
    table.ended(end("a", status=SequenceStatus.FINISHED_ABORTED), 4.0)
    table.ended(end("a"), 5.0)
    table.began(turn("b", 2), 5.0)
    table.lose("ingress-0", 6.0)
    table.check_integrity()
    [row] = table.rows()
    assert (row.counts.turns, row.counts.answers, row.num_open, row.counts.in_model_s) == (2, 0, 0, 5.0)


def test_choices_of_one_answer_are_one_turn() -> None:
    table = SessionTable(BLOCK)
    for choice in range(3):
        table.began(turn(f"r{choice}", 2, origin=Origin("cmpl_1", choice)), 0.0)
        table.ended(end(f"r{choice}", cached_len=32 * (choice > 0)), 1.0)
    [row] = table.rows()
    counts = row.counts
    assert (counts.turns, counts.answers, counts.prompt_tokens, counts.output_tokens) == (1, 1, 36, 15)


def test_a_request_that_is_in_flight_no_more_has_ended() -> None:
    table = SessionTable(BLOCK)
    for number, name in enumerate(("refused", "open", "between attempts", "new")):
        table.began(turn(name, 2, number), 20.0 if name == "new" else 0.0)
    table.look({"open", "between attempts"}.__contains__, 9.0)
    table.look({"open"}.__contains__, 18.5)
    table.check_integrity()
    assert [row.num_open for row in table.rows()] == [1, 1, 1, 0], "in the order of their latest events"


def test_a_request_costs_the_same_beside_many_sessions_that_are_all_open() -> None:
    costs = []
    for num_open in (200, 2_000):
        table = SessionTable(BLOCK, max_sessions=100)
        for number in range(num_open):
            table.began(turn(f"r{number}", 2, number), 0.0)
        costs.append(num_opcodes(partial(table.began, turn("last", 2, num_open), 1.0)))
        table.check_integrity()
    assert costs[0] == costs[1]


@pytest.mark.parametrize("num_ids", [5_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_strange_names_without_end_take_bounded_memory(num_ids: int) -> None:
    """A client that names a new session and a new application each time, and prompts that no other continues."""
    table = SessionTable(BLOCK, max_sessions=100)
    for number in range(num_ids):
        name = f"r{number}"
        session = f"\x00{number}" * 200 if number % 2 else ""
        origin = Origin(f"resp_{number}")
        request = turn(name, 2, number, session=session, application=str(number) + " " * 200, origin=origin)
        table.began(request, float(number))
        if number % 3:
            table.ended(end(name), float(number))
        else:
            table.left([name], float(number))
    table.check_integrity()
    assert len(table) == 100 and table.num_forgotten == num_ids - 100
    applications = {row.application: row.counts for row in table.applications()}
    assert len(applications) == MAX_APPLICATIONS + 1
    assert applications[OTHERS].turns == num_ids - MAX_APPLICATIONS, "forgotten ones are still counted"
    assert sum(map(len, table._by_end.values())) + len(table._by_answer) <= 2 * 100 * KEPT_ENDS
    assert all(len(row.name) <= 128 and sys.getsizeof(row.application) < 400 for row in table.rows())
