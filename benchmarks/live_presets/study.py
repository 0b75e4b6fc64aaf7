"""What a command measures: systems, setups and claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from farsight.simulator.cluster.records import Record
from farsight.simulator.summary import Sla
from farsight.simulator.traffic.workload import SimRequest

if TYPE_CHECKING:
    from benchmarks.live_presets.claims import Claim
    from benchmarks.live_presets.live import Hardware


class Setup(Protocol):
    """A workload and the replicas that serve it.

    Attributes:
        num_warmup: Requests that come first and do not count.
    """

    @property
    def sla(self) -> Sla: ...

    @property
    def hardware(self) -> Hardware: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def num_warmup(self) -> int: ...

    def arrivals(self, seed: int) -> list[SimRequest]:
        """With forecasts."""
        ...

    def sized(self, num_requests: int) -> Setup:
        """With another number of requests."""
        ...


@dataclass(frozen=True, slots=True)
class System:
    """A system that serves the arrivals.

    Attributes:
        settings: Settings of the live service, by table; None for a system that is only simulated, whose figures then
            stand for live ones.
        predict: Simulates the system: records of a setup's arrivals; None if the simulator does not support it.
    """

    settings: dict[str, dict[str, Any]] | None
    predict: Callable[[Any, list[SimRequest]], list[Record]] | None


@dataclass(frozen=True, slots=True)
class Study:
    """One command.

    Attributes:
        cache: Default file of the results.
    """

    description: str
    claims: Sequence[Claim]
    setups: Mapping[str, Setup]
    systems: Mapping[str, System]
    cache: Path
