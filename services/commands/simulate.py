"""``farsight simulate`` and ``farsight compare``: policies under virtual time, from the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farsight.core.errors import ConfigError
from farsight.services.commands.ask import JsonOption
from farsight.services.one_line_errors import failing_by_flag
from farsight.services.progress import progress_bar, wide_console
from farsight.services.words import counted

if TYPE_CHECKING:
    from farsight.simulator.cluster.latency import LatencyModel, LinearLatency, Roofline
    from farsight.simulator.experiment import Experiment
    from farsight.simulator.traffic.workload import Workload

FLAGS = {
    "scheduler.preset": "--preset",
    "num_replicas": "--replicas",
    "num_requests": "--requests",
    "workload": "--trace",
    "ttft_s": "--sla-ttft",
    "mtpot_s": "--sla-mtpot",
}
"""Flags of the fields that have another name than their flag."""

TraceOption = Annotated[
    str,
    typer.Option(
        "--trace", metavar="NAME|FILE", help="Workload by name, or a trace file in Azure's or Mooncake's format."
    ),
]
RequestsOption = Annotated[int | None, typer.Option("--requests", help="Most requests (default: 1000; all of a file).")]
ReplicasOption = Annotated[
    int | None, typer.Option("--replicas", help="Number of model replicas (default: 1, or the server's).")
]
RateOption = Annotated[
    float | None,
    typer.Option("--rate", help="Requests per second; inf: all at once (default: a trace's own, else 8 a replica)."),
]
ClientsOption = Annotated[
    int | None, typer.Option("--clients", help="Closed loop: number of requests in flight at any time.")
]
PredictorOption = Annotated[
    str, typer.Option("--predictor", help="Output-length predictor: none, history, shuffled, noisy or oracle.")
]
GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", help="GPU whose data sheet gives the step times (default with --model: a100-80g)."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model on that GPU (default with --gpu: llama-2-7b).")]
MaxReplicasOption = Annotated[
    int | None,
    typer.Option(
        "--max-replicas", help="Let the number of replicas follow the predicted queue delay, from --replicas to this."
    ),
]
ReplicaStartOption = Annotated[
    float, typer.Option("--replica-start-s", help="Seconds until an added replica takes requests.")
]
TensorParallelOption = Annotated[int | None, typer.Option("--tensor-parallel", help="GPUs per replica (default: 1).")]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="Step times from a JSON file instead (default: a 7B model on an A100).")
]
KvTokensOption = Annotated[
    int | None,
    typer.Option("--kv-tokens", help="KV pool of a replica in tokens (default: the GPU's free memory, or 120000)."),
]
MaxNumSeqsOption = Annotated[
    int | None, typer.Option("--max-num-seqs", help="Most sequences in one step (default: 256, or the server's).")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="A server's farsight.toml: presets decide as they would there."),
]
SlaTtftOption = Annotated[float, typer.Option("--sla-ttft", help="SLA: most seconds to the first token of a request.")]
SlaMtpotOption = Annotated[
    float, typer.Option("--sla-mtpot", help="SLA: most seconds between two tokens of a request.")
]


_WITH_CONFIG = ("config", "out", "plot", "as_json")


def simulate(
    context: typer.Context,
    preset: Annotated[str | None, typer.Option(help="Scheduling preset (default: fcfs, or the server's).")] = None,
    trace: TraceOption = "sharegpt-like",
    requests: RequestsOption = None,
    rate: RateOption = None,
    clients: ClientsOption = None,
    replicas: ReplicasOption = None,
    max_replicas: MaxReplicasOption = None,
    replica_start_s: ReplicaStartOption = 30.0,
    predictor: PredictorOption = "none",
    gpu: GpuOption = None,
    model: ModelOption = None,
    tensor_parallel: TensorParallelOption = None,
    profile: ProfileOption = None,
    kv_tokens: KvTokensOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    sla_ttft: SlaTtftOption = 10.0,
    sla_mtpot: SlaMtpotOption = 1.5,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same result.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write config.json, summary.json and requests.jsonl into this directory.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots into this directory.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A server's farsight.toml: the preset decides as it would there. Or a config.json from --out: repeats "
            "that run; only output flags may be added.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a workload through a preset in virtual time: no GPU, the same policy objects as live."""
    given = dict(locals())
    with failing_by_flag(FLAGS):
        is_saved = config is not None and config.suffix != ".toml"
        experiment = _saved(context, config) if is_saved else experiment_from(given, preset, seed)  # type: ignore[arg-type]
        if plot is not None:
            from farsight.simulator.plots import check_matplotlib

            check_matplotlib()
        _make_directory("--out", out)
        _make_directory("--plot", plot)
        _simulate(experiment, out, plot, as_json)


def compare(
    presets: Annotated[str, typer.Option(help="Presets, as fcfs,fastserve; ratios are relative to the first.")],
    trace: TraceOption = "sharegpt-like",
    requests: RequestsOption = None,
    rate: RateOption = None,
    clients: ClientsOption = None,
    replicas: ReplicasOption = None,
    max_replicas: MaxReplicasOption = None,
    replica_start_s: ReplicaStartOption = 30.0,
    predictor: PredictorOption = "none",
    gpu: GpuOption = None,
    model: ModelOption = None,
    tensor_parallel: TensorParallelOption = None,
    profile: ProfileOption = None,
    kv_tokens: KvTokensOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    sla_ttft: SlaTtftOption = 10.0,
    sla_mtpot: SlaMtpotOption = 1.5,
    seeds: Annotated[int, typer.Option(help="Workloads, each run under every preset.")] = 5,
    seed: Annotated[int, typer.Option(help="First of the random seeds.")] = 0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run presets side by side on the same workloads: means over seeds and ratios with 95 % confidence intervals."""
    given = dict(locals())
    with failing_by_flag(FLAGS):
        names = preset_names("--presets", presets)
        if seeds < 1:
            raise ConfigError("--seeds", seeds, "an integer >= 1")
        experiment = experiment_from(given, names[0], seed)
        _compare(experiment, names, range(seed, seed + seeds), as_json)


def check_counts(given: Mapping[str, int | None]) -> None:
    """Raises ConfigError for the first flag whose value is below 1."""
    for flag, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(flag, value, "an integer >= 1")


def preset_names(flag: str, given: str) -> list[str]:
    """Returns the presets in a flag such as ``fcfs,fastserve``.

    Raises:
        ConfigError: One does not exist, or stands there twice; names the flag.
    """
    from farsight.policies.presets import find_preset

    names = [name.strip() for name in given.split(",")]
    if len(set(names)) != len(names) or not all(names):
        raise ConfigError(flag, given, "names as fcfs,fastserve, each once")
    for name in names:
        try:
            find_preset(name)
        except ConfigError as error:
            raise ConfigError(flag, name, error.expected) from error
    return names


def _make_directory(flag: str, path: Path | None) -> None:
    """Checks that the outputs can be written before anything runs."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(flag, str(path), f"a directory, new or not ({error.strerror})") from error


def _saved(context: typer.Context, path: Path) -> Experiment:
    """The experiment of a config.json; other flags are refused, since they could contradict it."""
    from farsight.simulator.results import read_config

    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in _WITH_CONFIG and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(parameter.opts[0], context.params[name], "nothing beside --config")
    return read_config(path)


def experiment_from(given: Mapping[str, Any], preset: str | None, seed: int) -> Experiment:
    """Returns the experiment of these values of flags; a flag that is not given has its default.

    Raises:
        FarsightError: A value is wrong; names the flag, or the field.
    """
    from dataclasses import replace

    from farsight.simulator.summary import Sla

    values: dict[str, Any] = {
        "trace": "sharegpt-like",
        "predictor": "none",
        "sla_ttft": 10.0,
        "sla_mtpot": 1.5,
        **given,
    }
    value: Callable[[str], Any] = values.get
    latency, kv_tokens = hardware(value("gpu"), value("model"), value("tensor_parallel"), value("profile"))
    experiment = replace(
        experiment_of(value("config"), value("replicas"), value("max_num_seqs")),
        workload=value("trace"),
        num_requests=value("requests"),
        rate=value("rate"),
        clients=value("clients"),
        predictor=value("predictor"),
        latency=latency,
        kv_tokens=kv_tokens if value("kv_tokens") is None else value("kv_tokens"),
        sla=Sla(value("sla_ttft"), value("sla_mtpot")),
        seed=seed,
    )
    experiment = _scaled(experiment, value("config"), value("max_replicas"), values.get("replica_start_s", 30.0))
    return experiment if preset is None else experiment.under(preset)


def experiment_of(config: Path | None, replicas: int | None = None, max_num_seqs: int | None = None) -> Experiment:
    """Returns an experiment whose policies, replicas and steps are those of a server's file; flags go before it.

    Raises:
        ConfigError: The file cannot be read, or a setting in it is wrong.
    """
    from dataclasses import replace

    from farsight.core.config.load import load_config
    from farsight.simulator.experiment import Experiment

    experiment = Experiment()
    if config is not None:
        server = load_config(config, {})
        experiment = replace(
            experiment,
            scheduler=server.scheduler,
            placement=server.placement,
            batch=server.batch,
            num_replicas=max(1, server.model.replicas),
            max_num_seqs=server.engine.max_num_seqs,
            max_batch_tokens=server.engine.step_tokens,
        )
    flags = {"num_replicas": replicas, "max_num_seqs": max_num_seqs}
    return replace(experiment, **{name: value for name, value in flags.items() if value is not None})  # type: ignore[arg-type]


def _scaled(experiment: Experiment, config: Path | None, max_replicas: int | None, start_s: float) -> Experiment:
    """Returns the experiment with the bounds of the number of replicas: those of a server's file, flags before it."""
    from dataclasses import replace

    from farsight.core.config.engine import ModelConfig
    from farsight.core.config.load import load_config
    from farsight.policies.presets import max_running
    from farsight.simulator.cluster.fleet import Scaling

    bounds = ModelConfig() if config is None else load_config(config, {}).model
    least = experiment.num_replicas if max_replicas is not None else bounds.min_replicas
    most = bounds.max_replicas if max_replicas is None else max_replicas
    if not 0 <= start_s < math.inf:
        raise ConfigError("--replica-start-s", start_s, "seconds >= 0")
    if not most:
        return experiment
    if most < experiment.num_replicas:
        raise ConfigError("--max-replicas", most, f"at least --replicas, {experiment.num_replicas}")
    places = max_running(experiment.preset, experiment.max_num_seqs, experiment.batch.batch_size)
    delays = bounds.target_queue_delay_s, bounds.scale_down_after_s
    return replace(experiment, scaling=Scaling(least, most, *delays, places, start_s))


def hardware(
    gpu: str | None, model: str | None, tensor_parallel: int | None, profile: Path | None
) -> tuple[LinearLatency | Roofline, int]:
    """Returns step times of a replica, and its KV pool in tokens."""
    from farsight.simulator.cluster.latency import GPUS, MODELS, Roofline
    from farsight.simulator.experiment import Experiment, free_kv_tokens

    if gpu is None and model is None and tensor_parallel is None:
        default = Experiment()
        return (default.latency if profile is None else _read_profile(profile)), default.kv_tokens
    if profile is not None:
        raise ConfigError("--profile", str(profile), "none beside --gpu, --model and --tensor-parallel")
    gpu, model, num_gpus = gpu or "a100-80g", model or "llama-2-7b", 1 if tensor_parallel is None else tensor_parallel
    if gpu not in GPUS:
        raise ConfigError("--gpu", gpu, f"one of {', '.join(GPUS)}")
    if model not in MODELS:
        raise ConfigError("--model", model, f"one of {', '.join(MODELS)}")
    if num_gpus < 1:
        raise ConfigError("--tensor-parallel", num_gpus, "an integer >= 1")
    latency = Roofline(GPUS[gpu], MODELS[model], num_gpus)
    return latency, free_kv_tokens(latency)


def _read_profile(path: Path) -> LinearLatency:
    """Reads a profile, from `farsight profile` or hand-written; missing fields default as in ``LinearLatency``."""
    from dataclasses import replace

    from farsight.estimator.profile_file import parse_profile
    from farsight.simulator.cluster.latency import LinearLatency

    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("--profile", str(path), f"a JSON file ({error})") from error
    profile = parse_profile(text, f"--profile {path}")
    latency = LinearLatency(profile.cost, image_cost=profile.image_cost)
    if profile.kv_bytes is not None:
        latency = replace(latency, kv_bytes=profile.kv_bytes)
    if profile.copy_bandwidth is not None:
        latency = replace(latency, copy_bandwidth=profile.copy_bandwidth)
    return latency


def say_if_pictures_cost_nothing(arrivals: Workload, latency: LatencyModel) -> None:
    """Warns where a traffic has pictures and nothing says how long an encoder takes for them."""
    if latency.image_cost.is_free and any(arrival.images for arrival in arrivals):
        typer.echo(
            "pictures are encoded in no time here: the profile has no image_batch_s, image_token_s or image_pair_s",
            err=True,
        )


def _simulate(experiment: Experiment, out: Path | None, plot: Path | None, as_json: bool) -> None:
    from farsight.simulator.cluster.records import Timeline
    from farsight.simulator.experiment import make_arrivals
    from farsight.simulator.plots import write_plots
    from farsight.simulator.results import config_of, to_json, write_results
    from farsight.simulator.run import run
    from farsight.simulator.summary import tables

    arrivals = make_arrivals(experiment)
    say_if_pictures_cost_nothing(arrivals, experiment.latency)
    timeline = None if plot is None else Timeline()
    with progress_bar("requests", len(arrivals), as_json=as_json) as progress:
        outcome = run(experiment, arrivals, progress=progress, timeline=timeline)
    if as_json:
        typer.echo(to_json({"config": config_of(experiment), "summary": outcome.summary.to_dict()}))
    else:
        console = wide_console()
        console.print(f"{_title(experiment)}, seed {experiment.seed}", highlight=False)
        for table in tables(outcome.summary):
            console.print(table)
    if outcome.failed:
        limit = f"the {experiment.kv_tokens} KV tokens of a replica"
        typer.echo(f"refused: {counted(len(outcome.failed), 'request')} may grow beyond {limit}", err=True)
    written = []
    if out is not None:
        written += write_results(out, experiment, outcome.summary, outcome.recorder.done)
    if plot is not None and outcome.recorder.done:
        title = f"{_title(experiment)}, seed {experiment.seed}"
        written += write_plots(plot, title, outcome.recorder.done, timeline, experiment.kv_tokens)
    for path in written:
        typer.echo(f"written: {path}", err=True)


def _compare(experiment: Experiment, presets: list[str], seeds: range, as_json: bool) -> None:
    from farsight.simulator.compare import compare as run_all
    from farsight.simulator.compare import comparison_table, idle_slowdown
    from farsight.simulator.results import to_json

    num_requests = experiment.num_requests
    total = None if num_requests is None else num_requests * len(presets) * len(seeds)
    with progress_bar("requests", total, as_json=as_json) as progress:
        compared = run_all(experiment, presets, seeds, progress)
    slowdown = idle_slowdown(compared)
    if slowdown is not None:
        told = f"nothing waited at this load (mean slowdown {slowdown:.2f}), so the presets had nothing to order"
        typer.echo(f"{told}; a higher --rate shows how they differ", err=True)
    if as_json:
        for each in compared:
            typer.echo(to_json(each.to_dict()))
        return
    console = wide_console()
    seen = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    console.print(f"{_title(experiment, ', '.join(presets))}, {seen}", highlight=False)
    console.print(comparison_table(compared))


def _title(experiment: Experiment, presets: str = "") -> str:
    """Returns the experiment in one line."""
    load = "" if experiment.rate is None else f", {experiment.rate:g} requests/s"
    load = load if experiment.clients is None else f", {counted(experiment.clients, 'client')}"
    replicas = counted(experiment.num_replicas, "replica")
    return f"{presets or experiment.preset}: {experiment.workload}{load}, {replicas}"
