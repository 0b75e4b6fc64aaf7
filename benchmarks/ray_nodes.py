"""A Ray cluster of several nodes on this machine, of which each can be lost."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil
from ray.cluster_utils import Cluster

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}


class Nodes:
    """A head and others.

    Args:
        system_config: Ray's system configuration.
    """

    def __init__(self, num_others: int, system_config: dict[str, Any] | None = None) -> None:
        head = NODE | {"include_dashboard": False, "_system_config": system_config}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(num_others):
            self.add()

    @property
    def address(self) -> str:
        """For ``ray.init``."""
        return str(self._cluster.address)

    @property
    def num_others(self) -> int:
        """Beside the head."""
        return len(self._cluster.worker_nodes)

    def add(self) -> None:
        """One more, that lives when this returns."""
        self._cluster.add_node(**NODE)

    def of(self, pid: int) -> str:
        """The id of the node that a process belongs to; empty for the head."""
        parents = {parent.pid for parent in psutil.Process(pid).parents()}
        return next((node.node_id for node in self._cluster.worker_nodes if _raylet(node).pid in parents), "")

    def remove(self, node_id: str) -> None:
        """As Ray's own tests do: its raylet is killed, and those that it has started find that and end."""
        self._cluster.remove_node(self._node(node_id), allow_graceful=False)

    def kill(self, node_id: str) -> None:
        """Everything on it at once; its system lives and closes the connections."""
        for process in self._processes(node_id):
            with suppress(psutil.NoSuchProcess):  # it has ended with its raylet
                process.kill()
        self.remove(node_id)

    def freeze(self, node_id: str) -> None:
        """Everything on it stops at once and no connection is closed, as when a machine loses its power."""
        for process in self._processes(node_id):
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def _processes(self, node_id: str) -> list[psutil.Process]:
        raylet = _raylet(self._node(node_id))
        return [raylet, *raylet.children(recursive=True)]

    def end(self) -> None:
        self._cluster.shutdown()

    def _node(self, node_id: str) -> Any:
        return next(node for node in self._cluster.worker_nodes if node.node_id == node_id)


def _raylet(node: Any) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)
