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
        rebalance_ratio: T_hbal: a replica is too heavy at so many times the load of the lightest one.
        rebalance_after: A replica's load is compared once it has so many requests in the window.
        autoscale: Give prefixes whose queueing doubles on a replica too heavy to one more.
        balance: Send what is not cached to replicas that mostly decode.
        imbalance_ratio: IMBALR: a replica mostly decodes if decoding is more than this share of its load ...
        balanced_ratio: ... and gets what is not cached if it is less than this share on another replica with load.
        initial_output_len: Output length in tokens that is assumed on replicas where no request ended in the window.
        max_tree_mib: MiB of the prefix tree, which ``e2-forecast`` has as well; beyond it, the Router forgets the least
            recently used prefixes.
    """

    window_s: float = 180.0
    rebalance: bool = True
    rebalance_ratio: float = 1.5
    rebalance_after: int = 50
    autoscale: bool = True
    balance: bool = True
    imbalance_ratio: float = 0.8
    balanced_ratio: float = 0.5
    initial_output_len: float = 200.0
    max_tree_mib: int = 256

    @property
    def max_tree_bytes(self) -> int:
        return self.max_tree_mib << 20

    def __post_init__(self) -> None:
        _require(self.window_s > 0, "window_s", self.window_s, "a number > 0")
        _require(self.max_tree_mib >= 1, "max_tree_mib", self.max_tree_mib, "an integer >= 1")
        _require(self.rebalance_ratio >= 1, "rebalance_ratio", self.rebalance_ratio, "a number >= 1")
        _require(self.rebalance_after >= 0, "rebalance_after", self.rebalance_after, "an integer >= 0")
        _require(0 < self.imbalance_ratio <= 1, "imbalance_ratio", self.imbalance_ratio, "a number > 0 and <= 1")
        _require(0 <= self.balanced_ratio <= 1, "balanced_ratio", self.balanced_ratio, "a number >= 0 and <= 1")
        _require(self.initial_output_len >= 0, "initial_output_len", self.initial_output_len, "a number >= 0")


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"placement.{name}", value, expected)
