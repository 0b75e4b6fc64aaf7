"""A Ray cluster of several nodes on this machine, each of which can be lost."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil
from ray.cluster_utils import Cluster

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}


class Nodes:
    """A head node and further nodes.

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
        """The nodes without the head node."""
        return len(self._cluster.worker_nodes)

    def add(self) -> None:
        """Adds a node; returns when it is alive."""
        self._cluster.add_node(**NODE)

    def of(self, pid: int) -> str:
        """Id of the node that a process belongs to; empty for the head node."""
        parents = {parent.pid for parent in psutil.Process(pid).parents()}
        return next((node.node_id for node in self._cluster.worker_nodes if _raylet(node).pid in parents), "")

    def remove(self, node_id: str) -> None:
        """Kills only the raylet of a node, as Ray's own tests do; the processes that it started notice and end."""
        self._cluster.remove_node(self._node(node_id), allow_graceful=False)

    def kill(self, node_id: str) -> None:
        """Kills every process of a node at once; the system lives and closes their connections."""
        for process in self._processes(node_id):
            with suppress(psutil.NoSuchProcess):  # it has ended with its raylet
                process.kill()
        self.remove(node_id)

    def freeze(self, node_id: str) -> None:
        """Stops every process of a node at once and closes no connection, as when a machine loses its power."""
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
