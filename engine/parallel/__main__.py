"""One rank: ``python -m farsight.engine.parallel HOST PORT RANK PARENT``, the key on standard input."""

from __future__ import annotations

import os
import sys

from farsight.core.children import end_with_parent
from farsight.core.errors import FarsightError
from farsight.engine.parallel.follower import follow
from farsight.engine.parallel.links import Ticket, join


def main() -> None:
    """Ends when rank 0 does, or the process that started it."""
    end_with_parent(int(sys.argv[4]))
    host, port, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        ticket = Ticket(host, port, sys.stdin.read())
        follow(join(ticket, rank), ticket, rank, on_ready=lambda: None, on_lost=lambda: os._exit(1))
    except FarsightError:  # rank 0 knows why, or is gone
        os._exit(1)  # torch's own threads may wait for the others still


if __name__ == "__main__":
    main()
