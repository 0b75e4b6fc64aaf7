"""A simulated server decides with the settings of the server that it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farsight.core.config.load import make_config
from farsight.core.config.scheduling import PlacementConfig, SchedulerConfig
from farsight.core.messages.log import ServedAs
from farsight.policies.compose import build_router, configured_replica
from farsight.policies.interfaces import Job
from farsight.policies.presets import PRESETS
from farsight.policies.settings import PolicySettings
from farsight.services.commands.simulate import experiment_of
from farsight.services.ingress.explanations import served_settings
from farsight.simulator import run
from farsight.simulator.cluster.latency import LinearLatency
from farsight.simulator.counterfactual import experiment_as
from farsight.simulator.experiment import Experiment
from farsight.simulator.traffic.workload import SimRequest

NUM_SEQS = 100
PRIOR = PolicySettings()
"""What a server assumes before it has measured anything."""

PLAIN = (int, float, str, bool, bytes, type(None))


def fields_of(value: Any, path: str = "", seen: set[int] | None = None) -> dict[str, str]:
    """Every plain value that can be reached through the attributes of policies, by its path."""
    seen = set() if seen is None else seen
    if isinstance(value, PLAIN):
        return {path: repr(value)}
    if id(value) in seen or isinstance(value, (type, np.random.Generator, Job)) or callable(value):
        return {}
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        return {path: repr(value.tolist())}  # not a number equals itself
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = {str(i): each for i, each in enumerate(value)}
    elif isinstance(value, dict):
        parts = {str(key): each for key, each in value.items()}
    else:
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})
    found: dict[str, str] = {}
    for name, each in parts.items():
        found |= fields_of(each, f"{path}.{name}", seen)
    return found


def simulated(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The router and the scheduler of replica 0 that a run composes."""
    made: list[Any] = []

    class Stop(Exception):
        pass

    def fleet(shape: Any, router: Any, make_scheduler: Callable[[int], Any], **_: Any) -> None:
        made.extend((router, make_scheduler(0)))
        raise Stop

    monkeypatch.setattr(run, "Fleet", fleet)
    arrival = SimRequest("r0", 0.0, 10, 10, PRIOR.max_new_tokens)
    with pytest.raises(Stop):
        run.run(experiment, [arrival])
    return made[0], made[1]


SETTINGS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "changed": {
        "gamma": 0.7,
        "tail": 3.0,
        "max_gap_ms": 80.0,
        "watermark": 0.6,
        "standby_slots": 3,
        "quantum_s": 0.05,
        "starve_limit_s": 7.0,
        "min_idle_slots": 2,
        "reserve_ratio": 0.2,
        "history_window": 77,
        "overcommit": 1.5,
        "offload_deadline_ms": 7.0,
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_composed_as_a_server_composes_it(
    preset: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, placement = SchedulerConfig(preset=preset, **settings), PlacementConfig(window_s=60.0)
    experiment = Experiment(
        scheduler=config,
        placement=placement,
        max_num_seqs=NUM_SEQS,
        latency=LinearLatency(PRIOR.cost),
        block_size=PRIOR.block_size,
        offload_hop_s=0.0,
    )
    router, replica = simulated(experiment, monkeypatch)
    served = fields_of(configured_replica(config, NUM_SEQS))
    assert served and fields_of(replica) == served
    if PRESETS[preset].mode == "continuous":
        live = build_router(preset, settings=dataclasses.replace(PRIOR, placement=placement))
        assert fields_of(router) == fields_of(live)


READ_BY = {
    "gamma": "farsight-mean",
    "tail": "farsight",
    "watermark": "aggressive",
    "quantum_s": "fastserve",
    "starve_limit_s": "fastserve",
    "min_idle_slots": "fastserve",
    "overcommit": "conservative",
    "offload_deadline_ms": "fastserve",
}
"""A preset that reads the setting; the others are read by past-future."""


@pytest.mark.parametrize("name", SETTINGS["changed"])
def test_another_setting_is_another_scheduler(name: str) -> None:
    """The comparison sees every number that is changed."""
    plain = SchedulerConfig(preset=READ_BY.get(name, "past-future"))
    changed = dataclasses.replace(plain, **{name: SETTINGS["changed"][name]})
    assert fields_of(configured_replica(plain, 8)) != fields_of(configured_replica(changed, 8))


def test_a_servers_file_says_how_it_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "farsight.toml"
    path.write_text(
        "[model]\nreplicas = 3\n[engine]\nmax_num_seqs = 24\nmax_batch_tokens = 512\n[scheduler]\n"
        'preset = "fastserve"\nquantum_s = 0.03\n[placement]\nwindow_s = 9.0\n[batch]\nnum_bins = 6\n'
    )
    found = experiment_of(path)
    assert (found.preset, found.scheduler.quantum_s, found.placement.window_s) == ("fastserve", 0.03, 9.0)
    assert (found.batch.num_bins, found.num_replicas, found.max_num_seqs, found.max_batch_tokens) == (6, 3, 24, 512)
    flags = experiment_of(path, 2, 5)
    assert (flags.num_replicas, flags.max_num_seqs) == (2, 5)
    assert experiment_of(None) == Experiment()
    tables = {"scheduler": {"preset": "fastserve", "quantum_s": 0.03}, "batch": {"num_bins": 6}}
    what_if = experiment_as(ServedAs(served_settings(make_config(tables)), 2, 5000, 7, PRIOR.cost))
    assert (what_if.preset, what_if.scheduler.quantum_s, what_if.batch.num_bins) == ("fastserve", 0.03, 6)
    assert (what_if.num_replicas, what_if.kv_tokens, what_if.max_num_seqs) == (2, 5000, 7)
