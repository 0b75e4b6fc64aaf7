"""``farsight replay``: simulates logged traffic under other policies and compares it with the log."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farsight.services.commands.ask import JsonOption
from farsight.services.commands.simulate import (
    ConfigOption,
    GpuOption,
    KvTokensOption,
    MaxNumSeqsOption,
    ModelOption,
    ProfileOption,
    ReplicasOption,
    TensorParallelOption,
    check_counts,
    experiment_of,
    hardware,
    one_line_errors,
    preset_names,
    wide_console,
)
from farsight.services.progress import progress_bar
from farsight.services.words import counted

if TYPE_CHECKING:
    from rich.table import Table

    from farsight.services.commands.logged_traffic import Traffic
    from farsight.simulator.experiment import Experiment

LOGGED = "logged"
"""The name of the logged run among the presets."""

_Row = dict[str, Any]


def replay(
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="The log, as in `log.path`: a SQLite file, or a redis:// URL.")
    ],
    preset: Annotated[list[str], typer.Option("--preset", help="Presets to simulate, as fcfs,fastserve.")],
    replicas: ReplicasOption = None,
    gpu: GpuOption = None,
    model: ModelOption = None,
    tensor_parallel: TensorParallelOption = None,
    profile: ProfileOption = None,
    kv_tokens: KvTokensOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the requests of a log under other presets in virtual time and compare with the logged run."""
    with one_line_errors():
        presets = preset_names("--preset", ",".join(preset))
        counts = {"--replicas": replicas, "--tensor-parallel": tensor_parallel}
        check_counts(counts | {"--kv-tokens": kv_tokens, "--max-num-seqs": max_num_seqs})
        from farsight.services.commands.logged_traffic import read_traffic

        traffic = read_traffic(log)
        latency, tokens = hardware(gpu, model, tensor_parallel, profile)
        experiment = dataclasses.replace(
            experiment_of(config, replicas, max_num_seqs),
            workload=log,
            latency=latency,
            kv_tokens=tokens if kv_tokens is None else kv_tokens,
        )
        rows = [_truth(traffic), *_replayed(experiment, presets, traffic, as_json)]
        if as_json:
            from farsight.simulator.results import to_json

            for row in rows:
                typer.echo(to_json(row))
        else:
            wide_console().print(_table(rows))
        _say_what_is_missing(traffic, rows)
        if profile is None and gpu is None and model is None:
            typer.echo("step times are those of a 7B model on an A100; --profile FILE takes the server's own", err=True)


def _truth(traffic: Traffic) -> _Row:
    """The logged run, with the same measures as the summary of a simulation."""
    from farsight.simulator.summary import MeanAndPercentiles, distribution

    requests = [each.request for each in traffic.logged]
    measured = {
        "ttft_s": distribution([request.ttft_s for request in requests if request.ttft_s is not None]),
        "jct_s": distribution([request.jct_s for request in requests]),
    }
    row: _Row = {"preset": LOGGED, "num_requests": len(requests), "num_failed": 0}
    for name, value in measured.items():
        row |= {f"{name}_{field.name}": getattr(value, field.name) for field in dataclasses.fields(MeanAndPercentiles)}
    return row


def _replayed(experiment: Experiment, presets: Sequence[str], traffic: Traffic, as_json: bool) -> list[_Row]:
    from farsight.simulator.run import run

    arrivals, rows = traffic.arrivals(), []
    for name in presets:
        with progress_bar("requests", len(arrivals), as_json=as_json) as progress:
            outcome = run(experiment.under(name), arrivals, progress=progress)
        rows.append({"preset": name} | outcome.summary.to_dict())
    return rows


_COLUMNS = {
    "requests": "num_requests",
    "JCT mean s": "jct_s_mean",
    "JCT p50 s": "jct_s_p50",
    "JCT p99 s": "jct_s_p99",
    "TTFT mean s": "ttft_s_mean",
    "TTFT p99 s": "ttft_s_p99",
}


def _table(rows: Sequence[_Row]) -> Table:
    from rich.table import Table

    from farsight.simulator.summary import show

    table = Table("", *_COLUMNS, "mean JCT to logged")
    for column in table.columns[1:]:
        column.justify = "right"
    logged = rows[0]["jct_s_mean"]
    for row in rows:
        mean = row["jct_s_mean"]
        ratio = "-" if mean is None or not logged else f"{mean / logged:.2f}"
        table.add_row(row["preset"], *(show(row[name]) for name in _COLUMNS.values()), ratio)
    return table


def _say_what_is_missing(traffic: Traffic, rows: Sequence[_Row]) -> None:
    if traffic.num_left_out:
        left_out = counted(traffic.num_left_out, "request")
        typer.echo(f"left out: {left_out} of the log had no output, or failed", err=True)
    for row in rows:
        if row["num_failed"]:
            failed = counted(row["num_failed"], "request")
            typer.echo(f"{row['preset']}: {failed} too long for a replica's KV memory", err=True)
