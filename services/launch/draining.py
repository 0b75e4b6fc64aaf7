"""Lets the requests of a service end before its processes do, after a TERM signal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from core.messages.supervision import DrainProgress, DrainService
from services.launch.signals import StopSignal

ASK_S = 0.2
"""Seconds between two orders to drain."""

LAST_ERRORS_S = 3.0
"""Seconds after the time limit in which the ingress replicas tell the remaining clients that their requests end."""

LAST_BYTES_S = 0.5
"""Seconds after the last request in which the proxy passes on what it still holds of the answers."""

Order = Callable[[DrainService], DrainProgress | None]
"""Gives the Supervisor the order; None if no Supervisor answers now."""


def drain(
    order: Order, stop: StopSignal, drain_s: float, num_ingress: int, say: Callable[[str], None]
) -> DrainProgress | None:
    """Returns when no request is open, the time is over, or a second signal came; the last thing that was heard.

    Args:
        drain_s: Seconds that open requests have to end by themselves.
    """
    began = time.monotonic()
    say(f"Draining: new requests are refused, open ones have {drain_s:g} s. A second signal ends them at once.")
    heard: DrainProgress | None = None
    while not stop.at_once and time.monotonic() - began < drain_s + LAST_ERRORS_S:
        left_s = max(0.0, began + drain_s - time.monotonic())
        heard = order(DrainService(left_s, num_ingress)) or heard
        if heard is not None and heard.is_over:
            stop.wait(LAST_BYTES_S)
            break
        stop.wait(ASK_S)
    took_s = math.ceil(time.monotonic() - began)
    if stop.at_once:
        say(f"Not drained: a second signal came; {_open(heard)}.")
    elif heard is None or not heard.is_over:
        say(f"Not drained after {took_s} s: {_open(heard)}.")
    else:
        say(f"Drained after {took_s} s.")
    return heard


def _open(heard: DrainProgress | None) -> str:
    return "what is open is not known" if heard is None else f"open requests: {heard.num_open}"
