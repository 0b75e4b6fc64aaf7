"""Ranks as child processes of this one, without Ray."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from core.errors import RankLost
from engine.parallel.links import Gathering, Ranks
from engine.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 60.0

RANK_MODULE = "engine.parallel"
"""The module that a rank runs: ``python -m RANK_MODULE HOST PORT RANK PARENT``, the key on standard input."""


class LocalRanks:
    """Starts ranks 1, 2 ... of a replica whose rank 0 is this process. One at a time in a process.

    Args:
        module: As ``RANK_MODULE``.

    Attributes:
        ranks: For ``build_worker``.
        processes: The other ranks, from rank 1 on.
    """

    def __init__(self, mesh: Mesh, module: str = RANK_MODULE) -> None:
        self._module = module
        self._closing = False
        gathering = Gathering(mesh.size)
        self.ranks = Ranks(mesh, gathering, self._lost)
        self.processes = [self._spawn(gathering, rank) for rank in range(1, mesh.size)]

    def _spawn(self, gathering: Gathering, rank: int) -> subprocess.Popen[bytes]:
        ticket = gathering.ticket
        root = Path(__file__).resolve().parents[2]
        command = [sys.executable, "-m", self._module, ticket.host, str(ticket.port), str(rank), str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root)
        assert process.stdin is not None
        process.stdin.write(ticket.key.encode())  # not an argument: every user of the machine sees those
        process.stdin.close()
        return process

    def _lost(self, error: RankLost) -> None:
        if not self._closing:
            logger.error("%s", error)

    def close(self) -> None:
        """Ends the processes and leaves torch's process group."""
        import torch.distributed as dist

        self._closing = True
        self.ranks.gathering.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(_END_TIMEOUT_S)
        if dist.is_initialized():
            dist.destroy_process_group()
