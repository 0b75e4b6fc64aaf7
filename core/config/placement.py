"""Placement by prefixes: the table ``[placement]``."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Which parts of E2 are on, where the placement is ``e2`` (Preble, section 4.2).

    Attributes:
        window_s: H, seconds over which load, sharing and queueing are counted.
        rebalance: Redirect requests from replicas that are too heavy.
        rebalance_ratio: A replica is too heavy at so many times the load of the lightest one.
        autoscale: Give prefixes whose queueing doubles on a replica too heavy to one more.
        balance: Send what is not cached to replicas that mostly decode.
        max_tree_mib: MiB of the prefix tree, which ``e2-forecast`` has as well; beyond it, the Router forgets the least
            recently used prefixes.
    """

    window_s: float = 180.0
    rebalance: bool = True
    rebalance_ratio: float = 1.5
    autoscale: bool = True
    balance: bool = True
    max_tree_mib: int = 256

    def __post_init__(self) -> None:
        _require(self.window_s > 0, "window_s", self.window_s, "a number > 0")
        _require(self.max_tree_mib >= 1, "max_tree_mib", self.max_tree_mib, "an integer >= 1")
        _require(self.rebalance_ratio >= 1, "rebalance_ratio", self.rebalance_ratio, "a number >= 1")


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"placement.{name}", value, expected)
