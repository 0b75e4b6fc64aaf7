"""``farsight advise``: which preset, and how many replicas, a traffic needs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farsight.core.errors import ConfigError
from farsight.services.commands.ask import JsonOption
from farsight.services.commands.simulate import (
    FLAGS,
    ConfigOption,
    GpuOption,
    KvTokensOption,
    MaxNumSeqsOption,
    ModelOption,
    PredictorOption,
    ProfileOption,
    SlaMtpotOption,
    SlaTtftOption,
    TensorParallelOption,
    experiment_of,
    hardware,
    preset_names,
    say_if_pictures_cost_nothing,
)
from farsight.services.one_line_errors import failing_by_flag
from farsight.services.progress import progress_bar, wide_console
from farsight.services.words import counted

if TYPE_CHECKING:
    from farsight.simulator.advice import Advice, Measured, Setup
    from farsight.simulator.experiment import Experiment
    from farsight.simulator.traffic.workload import SimRequest, Workload

ABLATIONS = (
    *("magnus-vs", "magnus-vsq", "magnus-ccb", "magnus-glp", "magnus-abp"),
    *("fastserve-defer", "fastserve-reactive", "fastserve-recompute", "conservative", "aggressive"),
)
"""Presets that exist to be compared with; ``--presets`` takes them as well."""


def advise(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A trace (CSV or JSON lines), a workload by name, or a server's log (SQLite file or redis:// URL).",
        ),
    ],
    max_replicas: Annotated[int, typer.Option(min=1, max=64, help="Try 1 to so many replicas.")] = 4,
    presets: Annotated[
        str | None, typer.Option(help="Presets to try, as fcfs,farsight (default: all but those of ablations).")
    ] = None,
    requests: Annotated[int, typer.Option(min=20, help="Requests of one window of the trace.")] = 300,
    windows: Annotated[int, typer.Option(min=1, help="Most windows; intervals are over windows.")] = 8,
    seconds: Annotated[
        float,
        typer.Option(min=1, help="Begin no simulation after so many seconds; the first window always ends."),
    ] = 45.0,
    good: Annotated[float, typer.Option(help="Share of requests that should keep the SLA, above 0 to 1.")] = 0.99,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second (default: the trace's, or 8 for a workload by name)."),
    ] = None,
    predictor: PredictorOption = "history",
    gpu: GpuOption = None,
    model: ModelOption = None,
    tensor_parallel: TensorParallelOption = None,
    profile: ProfileOption = None,
    kv_tokens: KvTokensOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    config: ConfigOption = None,
    sla_ttft: SlaTtftOption = 10.0,
    sla_mtpot: SlaMtpotOption = 1.5,
    plot: Annotated[Path | None, typer.Option(help="Write a picture, as advice.png or advice.svg.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Try presets and numbers of replicas on a traffic in virtual time, and say which to run and why."""
    with failing_by_flag(FLAGS):
        if not 0 < good <= 1:
            raise ConfigError("--good", good, "a share above 0, at most 1")
        from farsight.simulator.advice import advise as judge
        from farsight.simulator.advice import cut_windows, setups, table, to_dict
        from farsight.simulator.results import to_json
        from farsight.simulator.summary import Sla

        names = _default_presets() if presets is None else preset_names("--presets", presets)
        if plot is not None:
            _check_picture(plot)
        latency, tokens = hardware(gpu, model, tensor_parallel, profile)
        experiment = dataclasses.replace(
            experiment_of(config, max_num_seqs=max_num_seqs),
            workload=source,
            rate=rate,
            predictor=predictor,
            latency=latency,
            kv_tokens=tokens if kv_tokens is None else kv_tokens,
            sla=Sla(sla_ttft, sla_mtpot),
        )
        arrivals = _arrivals(experiment, requests * windows)
        say_if_pictures_cost_nothing(arrivals, latency)
        parts = cut_windows(arrivals, requests, windows)
        options = setups(names, max_replicas)
        measured = _measure(experiment, options, parts, seconds, as_json)
        advice = judge(measured, good)
        if plot is not None:
            from farsight.simulator.plots import write_picture

            write_picture(plot, measured, advice, good)
        if as_json:
            typer.echo(to_json({"source": source, "good": good, **to_dict(measured, advice)}))
        else:
            wide_console().print(table(measured, advice.best))
            _say(advice, len(parts[0]), modelled=profile is None)
        if plot is not None:
            typer.echo(f"written: {plot}", err=True)


def _default_presets() -> list[str]:
    from farsight.policies.presets import PRESETS

    return [name for name in PRESETS if name not in ABLATIONS]


def _check_picture(plot: Path) -> None:
    from farsight.simulator.plots import check_matplotlib

    check_matplotlib()
    if plot.suffix not in (".png", ".svg"):
        raise ConfigError("--plot", str(plot), "a file that ends in .png or .svg")


def _arrivals(experiment: Experiment, num_requests: int) -> Workload:
    """The traffic of a log, of a trace, or of a workload by name."""
    from farsight.simulator.experiment import DEFAULT_RATE, TRACES, make_arrivals
    from farsight.simulator.traffic.workloads import WORKLOADS

    name = experiment.workload
    if name.startswith(("redis://", "rediss://")) or _is_sqlite(Path(name)):
        from farsight.services.commands.logged_traffic import read_traffic

        return read_traffic(name).arrivals()
    drawn = name in WORKLOADS and name not in TRACES
    if drawn and experiment.rate is None:
        experiment = dataclasses.replace(experiment, rate=DEFAULT_RATE)
    wanted = num_requests if drawn or name in TRACES else None
    return make_arrivals(dataclasses.replace(experiment, num_requests=wanted))


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(16) == b"SQLite format 3\0"
    except OSError:
        return False


_Results = dict[tuple[int, "Setup"], dict[str, float | None]]


def _measure(
    experiment: Experiment, options: Sequence[Setup], parts: Sequence[list[SimRequest]], seconds: float, as_json: bool
) -> list[Measured]:
    """Runs windows side by side on all processors until the time is over; the first window always to its end."""
    from farsight.core.children import worker_pool
    from farsight.core.processors import usable_processors
    from farsight.simulator.advice import complete, in_order, run_setup

    runs = in_order(options, len(parts))
    end = time.monotonic() + seconds
    results: _Results = {}
    under_way: dict[Future[dict[str, float | None]], tuple[int, Setup]] = {}
    jobs = max(1, usable_processors())
    with worker_pool(jobs) as pool, progress_bar("requests", as_json=as_json) as tell:
        while True:
            for index, setup in runs:
                if index and time.monotonic() > end:
                    break
                under_way[pool.submit(run_setup, experiment, setup, parts[index])] = (index, setup)
                if len(under_way) >= 2 * jobs:
                    break
            if not under_way:
                return complete(results, options, len(parts))
            _collect(under_way, results)
            _tell(tell, results, parts)


def _collect(under_way: dict[Future[dict[str, float | None]], tuple[int, Setup]], results: _Results) -> None:
    ended, _ = wait(under_way, return_when=FIRST_COMPLETED)
    for future in ended:
        results[under_way.pop(future)] = future.result()


def _tell(tell: Callable[[int], None] | None, results: _Results, parts: Sequence[list[SimRequest]]) -> None:
    if tell is not None:
        tell(len(results) * len(parts[0]))


def _say(advice: Advice, window: int, *, modelled: bool) -> None:
    best = advice.best.setup
    typer.echo(f"Advised: farsight serve --preset {best.preset} --replicas {best.num_replicas}")
    typer.echo(f"Why: {advice.reason}")
    for doubt in advice.doubts:
        typer.echo(f"Uncertain: {doubt}")
    windows = f"{counted(len(advice.best.windows), 'window')} of {counted(window, 'request')}"
    typer.echo(f"Uncertain: {windows}, each from an empty system.")
    if modelled:
        typer.echo("Uncertain: step times are a model's; `farsight profile` measures your machine's, for --profile.")
