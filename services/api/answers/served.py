"""The id of the answer that a task is about, for what is written beside the request."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class ServedRequest:
    """A request of which a log line will tell; ``response_id`` is empty until its body has been understood."""

    response_id: str = ""


SERVED: ContextVar[ServedRequest | None] = ContextVar("farsight_served", default=None)
"""Set for the task that serves a request; None where no access log is written."""


def served(response_id: str) -> None:
    """Notes the id of the answer that this task gives."""
    request = SERVED.get()
    if request is not None:
        request.response_id = response_id
