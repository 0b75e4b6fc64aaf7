"""What a rank does about a step that it could not compute."""

from __future__ import annotations

import socket
from typing import cast

import pytest

from core.errors import WorkerBroken
from engine.parallel.follower import _Orders
from engine.parallel.links import Link
from engine.parallel.stage import Stage, StepOutcome
from engine.parallel.wire import Finished, unpack_report


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
