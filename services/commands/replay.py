"""``farsight replay``: simulates logged traffic under other policies, or a trace of conversations over tiers of KV."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farsight.core.config.engine import parse_memory
from farsight.core.errors import ConfigError
from farsight.services.commands.ask import JsonOption
from farsight.services.commands.simulate import (
    FLAGS,
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
    preset_names,
)
from farsight.services.one_line_errors import failing_by_flag
from farsight.services.progress import progress_bar, wide_console
from farsight.services.words import counted

if TYPE_CHECKING:
    from rich.table import Table

    from farsight.services.commands.logged_traffic import Traffic
    from farsight.simulator.experiment import Experiment
    from farsight.simulator.replay import ReplaySettings, ReplayTraffic

HOST_POOLS = 2
"""The host pool's usual size, in pools of the device."""

EVERY_S = 120.0
"""Usual seconds between the begins of two conversations."""

LOGGED = "logged"
"""The name of the logged run among the presets."""

_Row = dict[str, Any]


def replay(
    log: Annotated[
        str | None, typer.Argument(metavar="[LOG]", help="The log, as in `log.path`: a SQLite file, or a redis:// URL.")
    ] = None,
    preset: Annotated[
        list[str] | None, typer.Option("--preset", help="Presets to simulate, as fcfs,fastserve; one with --trace.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A trace instead: conversations, or Mooncake's or ServeGen's rows."),
    ] = None,
    prices: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="With --trace: h200-7b, cpu, or a profile.")
    ] = "h200-7b",
    every: Annotated[float | None, typer.Option(help="With --trace: seconds between new conversations (120).")] = None,
    part: Annotated[
        str, typer.Option(metavar="K/N", help="With --trace: which of N parts of the conversations.")
    ] = "1/1",
    scale: Annotated[
        float, typer.Option(help="With --trace: tokens of conversations, as a share of the file's.")
    ] = 1.0,
    host_kv_tokens: Annotated[
        int | None, typer.Option(help="With --trace: host pool in tokens (default: twice the device's pool).")
    ] = None,
    disk_kv_bytes: Annotated[str, typer.Option(help="With --trace: disk for KV; 0 for none.")] = "2TB",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --trace: write a report to be looked at.")
    ] = None,
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
    """Run logged requests under other presets in virtual time, or a trace of conversations with tiers of KV memory."""
    with failing_by_flag(FLAGS):
        if (log is None) == (trace is None):
            raise ConfigError("LOG", log or "none", "a log, or --trace FILE, and not both")
        counts = {"--replicas": replicas, "--tensor-parallel": tensor_parallel}
        check_counts(counts | {"--kv-tokens": kv_tokens, "--max-num-seqs": max_num_seqs})
        if every is not None and not 0 <= every < math.inf:
            raise ConfigError("--every", every, "seconds >= 0")
        if not 0 < scale < math.inf:
            raise ConfigError("--scale", scale, "a number above 0")
        if host_kv_tokens is not None and host_kv_tokens < 0:
            raise ConfigError("--host-kv-tokens", host_kv_tokens, "an integer >= 0")
        if trace is not None:
            steps = {"--gpu": gpu, "--model": model, "--tensor-parallel": tensor_parallel, "--profile": profile}
            for flag, value in steps.items():
                if value is not None:
                    raise ConfigError(flag, str(value), "none beside --trace: --prices says what steps take")
            experiment = experiment_of(config, replicas, max_num_seqs)
            if config is None:  # as a server steps on such a device
                experiment = dataclasses.replace(experiment, max_batch_tokens=1024 if prices == "cpu" else 8192)
            given = _Given(trace, prices, every, part, scale, kv_tokens, host_kv_tokens, disk_kv_bytes)
            _replay_trace(given, experiment, preset or (), html, as_json)
            return
        assert log is not None
        if not preset:
            raise ConfigError("--preset", "none", "presets to simulate, as fcfs,fastserve")
        presets = preset_names("--preset", ",".join(preset))
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


@dataclass(frozen=True, slots=True)
class _Given:
    """The flags of ``--trace``."""

    trace: Path
    prices: str
    every_s: float | None
    part: str
    scale: float
    kv_tokens: int | None
    host_kv_tokens: int | None
    disk_kv_bytes: str

    def parts(self) -> tuple[int, int]:
        first, _, num = self.part.partition("/")
        if not (first.isdecimal() and num.isdecimal()):
            raise ConfigError("--part", self.part, "K/N, as 1/2 for the first of two halves")
        return int(first), int(num)


def _replay_trace(
    given: _Given, experiment: Experiment, presets: Sequence[str], page: Path | None, as_json: bool
) -> None:
    from farsight.simulator.replay import read_traffic, replay, to_dict
    from farsight.simulator.results import to_json

    names = preset_names("--preset", ",".join(presets)) if presets else [experiment.preset]
    if len(names) != 1:
        raise ConfigError("--preset", ",".join(names), "one preset with --trace")
    if not given.trace.is_file():
        raise ConfigError("--trace", str(given.trace), "an existing file")
    if not 0 < given.scale < math.inf:
        raise ConfigError("--scale", given.scale, "a number above 0")
    traffic = read_traffic(given.trace, *given.parts(), given.scale)
    if given.every_s is not None and not traffic.is_closed:
        raise ConfigError("--every", given.every_s, "none for single requests, which come when the trace says")
    settings = _settings(given, experiment.under(names[0]))
    with progress_bar("turns of three runs", 3 * traffic.num_turns, as_json=as_json) as progress:
        ended: dict[str, int] = {}

        def told(run: str, num_turns: int) -> None:
            ended[run] = num_turns
            if progress is not None:
                progress(sum(ended.values()))

        results = replay(settings, traffic, progress=told)
    report = to_dict(settings, traffic, results)
    if page is not None:
        from farsight.simulator.replay_report import report_page

        page.write_text(report_page(report, _title(settings, traffic, given)), "utf-8")
        typer.echo(f"written: {page}", err=True)
    if as_json:
        typer.echo(to_json(report))
    else:
        wide_console().print(_trace_table(report))
    if traffic.num_left_out:
        typer.echo(f"left out: {counted(traffic.num_left_out, 'turn')} of subagents", err=True)


def _settings(given: _Given, experiment: Experiment) -> ReplaySettings:
    from farsight.estimator.profile_file import DEVICE_PROFILES, find_device_profile
    from farsight.simulator.cluster.latency import LinearLatency
    from farsight.simulator.cluster.memory_below import MemoryBelow
    from farsight.simulator.replay import ReplaySettings

    try:
        device = find_device_profile(given.prices)
    except ConfigError as error:
        expected = f"{', '.join(DEVICE_PROFILES)}, or a profile that `farsight profile` wrote"
        raise ConfigError("--prices", given.prices, expected) from error
    pool = given.kv_tokens or device.kv_memory // device.kv_bytes
    if not pool:
        raise ConfigError("--kv-tokens", "none", "tokens of the device's pool: the profile has no kv_memory")
    if not device.copy_bandwidth:
        raise ConfigError("--prices", given.prices, "a profile with copy_bandwidth, between device and host")
    disk = 0 if given.disk_kv_bytes == "0" else parse_memory(given.disk_kv_bytes)
    if disk and not device.disk_bandwidth:
        raise ConfigError("--disk-kv-bytes", given.disk_kv_bytes, "0, for the profile has no disk_bandwidth")
    host = HOST_POOLS * pool if given.host_kv_tokens is None else given.host_kv_tokens
    latency = LinearLatency(device.cost, device.kv_bytes, device.copy_bandwidth, device.image_cost)
    return ReplaySettings(
        dataclasses.replace(experiment, workload=given.trace.name, latency=latency, kv_tokens=pool),
        MemoryBelow(host, disk // device.kv_bytes, device.disk_bandwidth, device.kv_bytes),
        EVERY_S if given.every_s is None else given.every_s,
    )


def _title(settings: ReplaySettings, traffic: ReplayTraffic, given: _Given) -> str:
    """Says in one line what was replayed."""
    experiment, below = settings.experiment, settings.below
    load = f", a new conversation every {settings.every_s:g} s" if traffic.is_closed else ""
    return (
        f"{given.trace.name}, part {given.part}: {counted(traffic.num_turns, 'turn')}{load}; {experiment.preset}, "
        f"prices {given.prices}; {experiment.kv_tokens:,} tokens of KV on the device, "
        f"{below.host_tokens:,} on the host, {below.disk_tokens:,} on disk"
    )


def _trace_table(report: Mapping[str, Any]) -> Table:
    from rich.table import Table

    from farsight.simulator.summary import show

    table = Table(
        "", "turns", "mean s", "p99 s", "first token s", "session s", "computed / new", "from host", "from disk"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for run in report["runs"]:
        times = (run["turn_s"]["mean"], run["turn_s"]["p99"], run["first_token_s"]["mean"], run["program_s"]["mean"])
        ratio = run["computed_tokens"] / run["new_tokens"] if run["new_tokens"] else None
        hits = (run["hits"]["host"], run["hits"]["disk"])
        table.add_row(run["name"], *map(show, (run["turns"], *times, ratio, *hits)))
    return table


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
