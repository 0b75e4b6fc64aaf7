"""Schedulers in virtual time: the same policies as live, without a model and without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from farsight.core.errors import ConfigError
from farsight.services.commands.simulate import experiment_from

if TYPE_CHECKING:
    from farsight.simulator.compare import Compared
    from farsight.simulator.summary import Summary


class Load(TypedDict, total=False):
    """What is simulated, as the flags of ``farsight simulate``.

    Attributes:
        trace: Workload by name, or a trace file in Azure's or Mooncake's format.
        requests: Most requests; 1000 if not given, or all of a file.
        rate: Requests per second; infinity for all at once.
        clients: Closed loop: requests in flight at any time.
        replicas: Model replicas.
        predictor: none, history, shuffled, noisy or oracle.
        gpu, model, tensor_parallel: Step times from data sheets.
        profile: Step times from a file of ``farsight profile``.
        kv_tokens: KV pool of a replica in tokens.
        max_num_seqs: Most sequences in one step.
        sla_ttft, sla_mtpot: Seconds to the first token, and between two tokens, of a good request.
        config: A server's ``farsight.toml``: presets decide as they would there.
    """

    trace: str
    requests: int
    rate: float
    clients: int
    replicas: int
    predictor: str
    gpu: str
    model: str
    tensor_parallel: int
    profile: Path
    kv_tokens: int
    max_num_seqs: int
    sla_ttft: float
    sla_mtpot: float
    config: Path


def simulate(preset: str | None = None, *, seed: int = 0, **load: Unpack[Load]) -> Summary:
    """Runs a workload through a preset and returns its numbers; the same arguments give the same numbers.

    Args:
        preset: ``fcfs`` if not given, or the preset of ``config``.

    Raises:
        FarsightError: A setting is wrong; names it.
    """
    from farsight.simulator.experiment import make_arrivals
    from farsight.simulator.run import run

    experiment = experiment_from(_known(load), preset, seed)
    return run(experiment, make_arrivals(experiment)).summary


def compare(presets: Sequence[str], *, seeds: int | Sequence[int] = 5, **load: Unpack[Load]) -> list[Compared]:
    """Runs presets side by side on the same workloads; ratios are to the first of them.

    Args:
        seeds: One workload for each; a number stands for the seeds from 0 on.

    Raises:
        FarsightError: A setting is wrong; names it.
    """
    from farsight.simulator import compare as running

    names: list[Any] = list(presets)
    drawn = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    first = drawn[0] if drawn else 0
    return running.compare(experiment_from(_known(load), names[0] if names else None, first), names, drawn)


def _known(load: Load) -> dict[str, Any]:
    """Returns the settings; raises ConfigError for one that there is not."""
    for name, value in load.items():
        if name not in Load.__annotations__:
            raise ConfigError(name, value, f"one of {', '.join(Load.__annotations__)}")
    return dict(load)
