"""Thousands of clients leave at once: what that costs the ingress ledger, counted and not timed."""

from __future__ import annotations

import pytest

from services.ingress.ledger import ABORT_AGAIN_S, RequestLedger
from tests.opcodes import num_opcodes
from tests.unit.services.ingress.ledger_messages import delta, receive, stream


def leave(num: int) -> tuple[RequestLedger, int]:
    """So many leave at one instant; what it took."""
    ledger = RequestLedger("i")
    for index in range(num):
        ledger.open(stream(f"r{index}"))
    ledger.take_outgoing()

    def close_all() -> None:
        for index in range(num):
            ledger.close(f"r{index}", 5.0)

    return ledger, num_opcodes(close_all)


def test_a_mass_disconnect_costs_each_leaving_client_the_same() -> None:
    _, few = leave(500)
    ledger, many = leave(3000)
    assert many / 3000 <= 1.1 * few / 500
    assert len(ledger.take_outgoing()[1]) == 3000


def test_those_who_leave_later_pay_for_forgetting_each_abort_once() -> None:
    ledger, _ = leave(2000)
    ledger.take_outgoing()
    ledger.open(stream("late"))
    ledger.take_outgoing()
    first = num_opcodes(lambda: ledger.close("late", 5.0 + ABORT_AGAIN_S))
    ledger.open(stream("later"))
    ledger.take_outgoing()
    second = num_opcodes(lambda: ledger.close("later", 5.0 + ABORT_AGAIN_S))
    assert first <= 2000 * 40
    assert second <= 400


@pytest.mark.parametrize(("later_s", "again"), [(0.0, False), (0.9 * ABORT_AGAIN_S, False), (ABORT_AGAIN_S, True)])
def test_an_attempt_that_goes_on_sending_is_aborted_again_after_a_while(later_s: float, again: bool) -> None:
    ledger, _ = leave(3)
    ledger.take_outgoing()
    stray = delta("r1", 0, 7)
    assert ledger.receive("a", "a-0", [stray], 5.0 + later_s) == []
    assert ledger.take_outgoing()[1] == ((("r1", 0),) if again else ())
    assert receive(ledger) == []
