"""One cell of the comparison: a workload, a load, a seed, and every system on the same arrivals."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.servers import RunningServer, ServerCommand, farsight_command, vocab_size
from benchmarks.peers.commands import PeerOptions, vllm_command
from benchmarks.real_presets import chats
from farsight.core.errors import ConfigError
from farsight.services.bench.datasets import text_requests
from farsight.services.bench.load import Connection, measure
from farsight.services.bench.report import provenance
from farsight.services.bench.requests import BenchRequest
from farsight.services.bench.statistics import Metrics, error_kinds, run_metrics
from farsight.services.bench.targets import BenchTarget, BodyForm, make_call
from farsight.services.bench.workloads import drawn_arrivals, make_workload

VLLM = "vllm"
WORKLOADS = ("hol", "texts", *chats.GAPS)
"""What servers are measured on."""

LEARNED = 60
"""Chats that a server answers before those that are measured, so that its forecasts have begun."""

CV = 2.0
"""Coefficient of variation of the gaps between arrivals."""

IN_FLIGHT = 64
"""Requests in flight while the capacity is measured: four for each place of the default."""

MOST_FOR_CAPACITY = 250
"""Requests of the measurement of the capacity, where there is time for them."""

SALTS = 1000
"""Salts of a seed; those below are for the measurement of the capacity."""

READY_S = 240.0
WARM_UP = 8
MAX_TOKENS = 1024
"""Longest output; what the scheduler of a preset is told of every request, whose true length is hidden from it."""


@dataclass(frozen=True, slots=True)
class System:
    """A server under comparison.

    Attributes:
        name: In tables.
        preset: The preset of a Farsight server; empty for vLLM.
        settings: Entries of ``[scheduler]`` as TOML, in place of the preset's own.
        places: Most requests that run at once; 0 for those of all systems.
    """

    name: str
    preset: str = ""
    settings: tuple[str, ...] = ()
    places: int = 0

    @classmethod
    def parse(cls, text: str) -> System:
        """From ``vllm``, ``PRESET`` or ``NAME=PRESET:KEY=VALUE,...``; ``places`` is the one key of no setting.

        Raises:
            ConfigError: It has another form.
        """
        if text == VLLM:
            return cls(VLLM)
        name, _, rest = text.rpartition("=") if ":" not in text else text.partition("=")
        preset, _, settings = rest.partition(":")
        if not preset:
            raise ConfigError("--systems", text, "vllm, PRESET, or NAME=PRESET:KEY=VALUE,KEY=VALUE")
        entries = [each for each in settings.split(",") if each]
        places = [int(each.partition("=")[2]) for each in entries if each.startswith("places=")]
        rest_of = tuple(each for each in entries if not each.startswith("places="))
        return cls(name or preset, preset, rest_of, *places)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cells share.

    Attributes:
        dtype: The type of weights and KV in each server.
        texts: File of the eight tasks.
        chat_file: What ``chats.record`` has written.
        peer_venv: Where vLLM is installed; None without it.
    """

    model: Path
    num_requests: int = 500
    max_num_seqs: int = 16
    threads: int = 2
    dtype: str = "bfloat16"
    texts: Path | None = None
    peer_venv: Path | None = None
    chat_file: Path | None = None

    def requests(self, workload: str, seed: int) -> list[BenchRequest]:
        """The requests of a workload.

        Raises:
            ConfigError: ``texts`` without their file.
        """
        if workload == "hol":
            return make_workload("hol", self.num_requests, seed)
        if self.texts is None:
            raise ConfigError("--texts", None, "the file of the eight tasks, for the workload texts")
        drawn = text_requests(self.texts, self.num_requests, seed, MAX_TOKENS)
        return [replace(each, output_tokens=min(each.output_tokens, MAX_TOKENS)) for each in drawn]

    def drawn_chats(self, workload: str, num: int, per_s: float, seed: int) -> list[chats.Drawn]:
        """Returns the chats of a workload, without forecasts: a server makes its own.

        Raises:
            ConfigError: There is no file of them.
        """
        if self.chat_file is None:
            raise ConfigError("--chats", None, "a file that record has written, for the workloads of chats")
        return chats.draw(chats.read_chats(self.chat_file, folds=0), num, per_s, workload, seed)

    def command(self, system: System, folder: Path) -> ServerCommand:
        """How the system is started; its configuration goes into ``folder``."""
        if not system.preset:
            if self.peer_venv is None:
                raise ConfigError("--peer-venv", None, "the virtual environment of vLLM")
            more = ("--max-num-seqs", str(self.max_num_seqs))
            options = PeerOptions(self.peer_venv, self.model, threads=self.threads, more=more, dtype=self.dtype)
            return vllm_command(options)
        config = folder / f"{system.name}.toml"
        engine = ["[engine]", f"max_num_seqs = {system.places or self.max_num_seqs}"]
        config.write_text("\n".join([*engine, "[scheduler]", *system.settings, ""]), "utf-8")
        arguments = ["--config", str(config), "--preset", system.preset, "--dtype", self.dtype]
        arguments += ["--threads", str(self.threads)]
        return farsight_command(self.model, arguments)


@contextlib.contextmanager
def running(bench: Bench, system: System, logs: Path) -> Iterator[BenchTarget]:
    """The system, started, until the block ends."""
    server = RunningServer(bench.command(system, logs), logs / f"{system.name}.log")
    try:
        server.wait_until_ready(READY_S)
        yield BenchTarget(system.name, server.command.base_url, server.command.model_name, server.pid)
    finally:
        server.stop()


def run_load(
    bench: Bench, target: BenchTarget, requests: Sequence[BenchRequest], load: int | Sequence[float], salt: int
) -> Metrics:
    """Figures of one pass; Farsight is told one ``max_tokens`` for all, vLLM the lengths, which its order ignores.

    Args:
        salt: Another one gives other prompts, so that no cache of prefixes helps.

    Raises:
        RuntimeError: A request failed.
    """
    longest = max(each.output_tokens for each in requests)
    hidden = None if target.label == VLLM else longest
    drawn = all(each.text is None for each in requests)
    form = BodyForm(vocab_size=vocab_size(bench.model) if drawn else None, hidden_max_tokens=hidden)
    warm_up = [make_call(each, target.model, form, salt + 1, 8) for each in requests[:WARM_UP]]
    measure(target, warm_up, Connection(form), len(warm_up))
    calls = [make_call(each, target.model, form, salt) for each in requests]
    result = measure(target, calls, Connection(form), load)
    if failed := error_kinds(result.answers):
        raise RuntimeError(f"{target.label}: {failed}")
    return run_metrics(result)


def known_capacity(workload: str, folder: Path) -> float | None:
    """Requests per second at a load of 1, once measured."""
    path = _capacity_file(workload, folder)
    if not path.exists():
        return None
    per_s: float = json.loads(path.read_text("utf-8"))["requests_per_s"]
    return per_s


def measure_capacity(bench: Bench, target: BenchTarget, workload: str, folder: Path, for_s: float) -> float:
    """The requests per second that the system gets through, on seed 0; kept for all later parts of the comparison.

    A first pass of two requests for each place says how many fit into ``for_s``; a second one has these. Where they
    are not twice as many as those of the first pass, its figure stands: too low, since its places empty one by one.

    Args:
        for_s: Seconds for both; a first pass that takes longer is not cut off.
    """
    began_at = time.monotonic()
    if workload in chats.GAPS:
        served = chats.serve(target, bench.drawn_chats(workload, MOST_FOR_CAPACITY, 1.0, 0), IN_FLIGHT)
        keep_capacity(workload, folder, served["requests_per_s"], target.label, MOST_FOR_CAPACITY)
        return served["requests_per_s"]
    requests = bench.requests(workload, 0)[:MOST_FOR_CAPACITY]
    num_requests = min(2 * bench.max_num_seqs, len(requests))
    per_s = _requests_per_s(bench, target, requests[:num_requests], 2)
    num_within = requests_within(per_s, for_s - (time.monotonic() - began_at), len(requests))
    if num_within >= 2 * num_requests:
        num_requests = num_within
        per_s = _requests_per_s(bench, target, requests[:num_requests], 4)
    keep_capacity(workload, folder, per_s, target.label, num_requests)
    return per_s


def keep_capacity(workload: str, folder: Path, per_s: float, system: str, num_requests: int) -> None:
    """Writes what a load of 1 is, and says it."""
    kept = json.dumps({"requests_per_s": per_s, "of": system, "requests": num_requests})
    _capacity_file(workload, folder).write_text(kept, "utf-8")
    told = f"{per_s:.2f} requests/s by {system} are a load of 1"
    print(f"{workload}: {told} ({num_requests} requests)", flush=True)


def _requests_per_s(bench: Bench, target: BenchTarget, requests: Sequence[BenchRequest], salt: int) -> float:
    return float(run_load(bench, target, requests, IN_FLIGHT, salt)["requests_per_s"])


def requests_within(per_s: float, seconds: float, most: int) -> int:
    """Requests that end within so many seconds at this rate, at most ``most``; seconds may be infinite or over."""
    return math.floor(min(most, max(0.0, per_s * seconds)))


def _capacity_file(workload: str, folder: Path) -> Path:
    return folder / f"capacity-{workload}.json"


@dataclass(frozen=True, slots=True)
class Run:
    """One system in one cell."""

    workload: str
    load: float
    seed: int
    system: str

    def path(self, folder: Path) -> Path:
        """Where its figures lie once they have been measured."""
        return folder / f"{self.workload}-{self.load:g}-{self.seed}-{self.system}.json"


def missing(
    names: Sequence[str], workloads: Sequence[str], loads: Sequence[float], seeds: Sequence[int], folder: Path
) -> list[Run]:
    """What has no figures in ``folder`` yet; a seed is whole before the next, the systems of a cell are neighbours."""
    runs = [
        Run(workload, load, seed, name) for seed in seeds for workload in workloads for load in loads for name in names
    ]
    return [each for each in runs if not each.path(folder).exists()]


def run_arrivals(run: Run, num_requests: int, per_s: float) -> list[float]:
    """When its requests arrive, the same for all systems of a cell.

    Args:
        per_s: Requests per second at a load of 1.
    """
    return drawn_arrivals(num_requests, run.load * per_s, CV, run.seed)


def run_one(bench: Bench, target: BenchTarget, per_s: float, run: Run, folder: Path) -> None:
    """Measures a run and writes its record.

    Args:
        per_s: Requests per second at a load of 1.
    """
    if run.workload in chats.GAPS:
        chats.serve(target, bench.drawn_chats(run.workload, LEARNED, 1.0, SALTS + run.seed), chats.IN_FLIGHT)
        drawn = bench.drawn_chats(run.workload, bench.num_requests, run.load * per_s, run.seed)
        keep(run, per_s, chats.serve(target, drawn), folder)
        return
    requests = bench.requests(run.workload, run.seed)
    # Every system has the same prompts: how many guesses come true, and so the speed, depends on them.
    metrics = run_load(bench, target, requests, run_arrivals(run, len(requests), per_s), SALTS * run.seed)
    keep(run, per_s, metrics, folder)


def keep(run: Run, per_s: float, metrics: Metrics, folder: Path) -> None:
    """Writes the record of a run and says its main figures."""
    cell: dict[str, Any] = {"workload": run.workload, "load": run.load, "seed": run.seed, "system": run.system}
    cell |= {"requests": metrics["requests"], "rate": run.load * per_s}
    text = json.dumps(cell | {"metrics": metrics, **provenance(("python",))})
    part = run.path(folder).with_suffix(".part")
    part.write_text(text, "utf-8")
    part.replace(run.path(folder))
    told = ", ".join(f"{key} {metrics[key]:.0f}" for key in ("jct_ms_mean", "jct_ms_p99", "mtpot_ms_p99"))
    setting = f"{run.workload} {run.load:g}, seed {run.seed}, {run.system}"
    print(f"{setting}: {told}, {metrics['output_tokens_per_s']:.0f} tokens/s", flush=True)
