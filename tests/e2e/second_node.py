"""A second Ray node beside the cluster of a running server, on the same machine, whose raylet can be killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator

import psutil

from tests.e2e.server import LONG_S, Server, wait_until

_NODE = """
import sys

from farsight.services.launch.cluster import few_daemons
from farsight.services.proxy.ports import reserved_ports

with reserved_ports() as ports, few_daemons(ports):
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    settings = RayParams(
        gcs_address=sys.argv[1], node_ip_address="127.0.0.1", num_cpus=1, object_store_memory=80_000_000
    )
    Node(settings, head=False, shutdown_at_exit=False, spawn_reaper=False)
"""
"""As ``ray start --address`` does, which takes the loopback address for that of another interface.

The agents get their ports: a raylet gives up after 15 s without the port that an agent chooses.
"""


STAYS_S = 3.0


class SecondNode:
    """The cluster of a server, and whether a second node is in it."""

    def __init__(self, server: Server) -> None:
        self._head = next(process for process, _ in _raylets(server.children()))
        words = _words(self._head)
        self._session = next(word for word in words if word.startswith("--session-name="))
        self._address = next(word for word in words if word.startswith("--gcs-address=")).partition("=")[2]

    @property
    def pid(self) -> int:
        """The process of its raylet; 0 where there is none."""
        found = [
            process.pid
            for process, words in _raylets(psutil.process_iter())
            if self._session in words and "--head" not in words
        ]
        return max(found, default=0)

    def start(self) -> None:
        """Returns when its raylet runs.

        It has the environment of the head's raylet: the token, and the directory by which the server finds and ends
        all processes of its own. Ray's own wait of 30 s for its registration may fail on a busy machine; the raylet
        goes on all the same, or ends: then a node is started once more.
        """
        command = [sys.executable, "-c", _NODE, self._address]
        environment = self._head.environ()

        def runs() -> bool:
            subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL, timeout=LONG_S)
            return self._runs()

        wait_until(runs, "the second node has no raylet")

    def _runs(self) -> bool:
        """Whether its raylet is there and stays: one that could not register ends within a second or two."""
        pid = self.pid
        if not pid:
            return False
        with contextlib.suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
            psutil.Process(pid).wait(STAYS_S)
        return psutil.pid_exists(pid) and self.pid == pid

    def holds(self, pid: int) -> bool:
        """Whether its raylet started that process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self.pid in {parent.pid for parent in psutil.Process(pid).parents()}
        return False


def _raylets(processes: Iterable[psutil.Process]) -> Iterator[tuple[psutil.Process, list[str]]]:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                yield process, _words(process)


def _words(process: psutil.Process) -> list[str]:
    """Some arguments are whole commands."""
    return " ".join(process.cmdline()).split()
