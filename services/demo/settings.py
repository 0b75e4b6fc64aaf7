"""What the demo runs, the same for the live services and for the simulator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.estimator.profile_file import A100_7B
from farsight.simulator.experiment import Experiment, make_arrivals
from farsight.simulator.traffic.workload import SimRequest

CHUNK = 512
"""Prompt tokens of a step beside the decodes."""

DEFAULT_TRACE = "chat-and-reports"
MAX_REQUESTS = 2000
"""Lanes that a page can draw."""

_HOST_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Arrivals, and one emulated A100 for each preset.

    Attributes:
        trace: A workload's name, or a file.
        rate: Requests per second; None for the trace's own.
        kv_tokens: KV tokens of each device.
    """

    presets: tuple[str, str] = ("fcfs", "farsight-mean")
    trace: str = DEFAULT_TRACE
    num_requests: int = 150
    rate: float | None = 6.0
    max_num_seqs: int = 6
    kv_tokens: int = 30_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.num_requests <= MAX_REQUESTS:
            raise ConfigError("--requests", self.num_requests, f"a number from 2 to {MAX_REQUESTS}")

    def experiment(self, preset: str) -> Experiment:
        """The simulator's settings; lengths are predicted from the outputs that have ended, as the live services do.

        Raises:
            InvalidValueError: A field is wrong.
        """
        return Experiment(
            scheduler=SchedulerConfig(preset=preset),
            workload=self.trace,
            num_requests=self.num_requests,
            rate=self.rate,
            predictor="history",
            kv_tokens=self.kv_tokens,
            host_kv_tokens=_HOST_TOKENS,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=CHUNK + self.max_num_seqs,
            seed=self.seed,
        )

    def arrivals(self) -> list[SimRequest]:
        """The requests, in order of arrival.

        Raises:
            InvalidValueError: There is no such workload, or a request needs more KV than a device has.
        """
        arrivals = list(make_arrivals(self.experiment(self.presets[0])))
        longest = max(each.prompt_len + each.max_new_tokens for each in arrivals)
        if longest > self.kv_tokens:
            raise InvalidValueError(
                "kv_tokens", self.kv_tokens, f"at least {longest}, the longest request of the trace"
            )
        return arrivals

    def config(self, preset: str, arrivals: list[SimRequest]) -> dict[str, dict[str, Any]]:
        """The configuration of the live service with that preset, by table."""
        kv_bytes = A100_7B.kv_bytes
        return {
            "engine": {
                "device": "emulated:a100-7b",
                "kv_memory": str(self.kv_tokens * kv_bytes),
                "host_kv_memory": str(_HOST_TOKENS * kv_bytes),
                "prefix_cache": False,
                "max_num_seqs": self.max_num_seqs,
                "max_batch_tokens": CHUNK + self.max_num_seqs,
                "max_model_len": max(each.prompt_len + each.max_new_tokens for each in arrivals),
                "benchmark_mode": True,
            },
            "scheduler": {"preset": preset},
            "predictor": {"from_traffic": False},
            "server": {"ingress_replicas": 1},
        }


def to_toml(tables: dict[str, dict[str, Any]]) -> str:
    """The tables as TOML; values are strings, numbers and booleans."""
    lines = []
    for name, fields in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{field} = {json.dumps(value)}" for field, value in fields.items()]  # JSON of a scalar is TOML
    return "\n".join(lines) + "\n"
