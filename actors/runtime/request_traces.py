"""A scheduler's decisions about a request, in the form of the log."""

from __future__ import annotations

from core.decisions import on_clock
from core.messages.log import RequestTrace
from policies.replica.events import AccountClosed


def request_trace(account: AccountClosed, source: str, epoch_s: float, *, ended: bool) -> RequestTrace:
    """Makes the log record of an account.

    Args:
        epoch_s: Seconds since the epoch at which the clock of the decisions stood at 0.
    """
    origin = account.origin
    return RequestTrace(
        trace_id=f"{origin.response_id}/{account.request_id}/{account.attempt}",
        request_id=account.request_id,
        choice=origin.choice,
        owner=origin.owner,
        source=source,
        attempt=account.attempt,
        ended=ended,
        num_left_out=account.num_left_out,
        decisions=account.placement + on_clock(epoch_s, account.decisions),
    )
