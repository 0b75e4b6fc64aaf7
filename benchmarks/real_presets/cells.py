"""One cell of the comparison: a workload, a load, a seed, and every system on the same arrivals."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.servers import RunningServer, ServerCommand, farsight_command, vocab_size
from benchmarks.peers.commands import PeerOptions, vllm_command
from core.errors import ConfigError
from services.bench.arrivals import drawn_arrivals
from services.bench.datasets import parse_texts
from services.bench.files import open_lines
from services.bench.load import Connection, measure
from services.bench.report import provenance
from services.bench.requests import BenchRequest
from services.bench.statistics import Metrics, error_kinds, run_metrics
from services.bench.targets import BenchTarget, BodyForm, make_call
from services.bench.workloads import make_workload

VLLM = "vllm"
WORKLOADS = ("hol", "texts")
CV = 2.0
"""Coefficient of variation of the gaps between arrivals."""

IN_FLIGHT = 64
"""Requests in flight while the capacity is measured: four for each place of the default."""

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
    """

    name: str
    preset: str = ""
    settings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> System:
        """From ``vllm``, ``PRESET`` or ``NAME=PRESET:KEY=VALUE,...``.

        Raises:
            ConfigError: It has another form.
        """
        if text == VLLM:
            return cls(VLLM)
        name, _, rest = text.rpartition("=") if ":" not in text else text.partition("=")
        preset, _, settings = rest.partition(":")
        if not preset:
            raise ConfigError("--systems", text, "vllm, PRESET, or NAME=PRESET:KEY=VALUE,KEY=VALUE")
        return cls(name or preset, preset, tuple(filter(None, settings.split(","))))


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cells share.

    Attributes:
        texts: File of the eight tasks.
        peer_venv: Where vLLM is installed; None without it.
    """

    model: Path
    num_requests: int = 500
    max_num_seqs: int = 16
    threads: int = 2
    texts: Path | None = None
    peer_venv: Path | None = None

    def requests(self, workload: str, seed: int) -> list[BenchRequest]:
        """The requests of a workload.

        Raises:
            ConfigError: ``texts`` without their file.
        """
        if workload == "hol":
            return make_workload("hol", self.num_requests, seed)
        if self.texts is None:
            raise ConfigError("--texts", None, "the file of the eight tasks, for the workload texts")
        with open_lines("--texts", self.texts) as lines:
            drawn = parse_texts(self.texts.name, lines, self.num_requests, seed, MAX_TOKENS)
        return [replace(each, output_tokens=min(each.output_tokens, MAX_TOKENS)) for each in drawn]

    def command(self, system: System, folder: Path) -> ServerCommand:
        """How the system is started; its configuration goes into ``folder``."""
        if not system.preset:
            if self.peer_venv is None:
                raise ConfigError("--peer-venv", None, "the virtual environment of vLLM")
            more = ("--max-num-seqs", str(self.max_num_seqs))
            return vllm_command(PeerOptions(self.peer_venv, self.model, threads=self.threads, more=more))
        config = folder / f"{system.name}.toml"
        engine = ["[engine]", f"max_num_seqs = {self.max_num_seqs}"]
        config.write_text("\n".join([*engine, "[scheduler]", *system.settings, ""]), "utf-8")
        options = ["--config", str(config), "--preset", system.preset, "--dtype", "bfloat16"]
        options += ["--threads", str(self.threads)]
        return farsight_command(self.model, options)


@contextlib.contextmanager
def running(bench: Bench, systems: Sequence[System], logs: Path) -> Iterator[dict[str, BenchTarget]]:
    """All systems at once, by name; each idles while another works."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for system in systems:
            server = RunningServer(bench.command(system, logs), logs / f"{system.name}.log")
            stack.callback(server.stop)
            servers[system.name] = server
        for server in servers.values():
            server.wait_until_ready(READY_S)
        yield {
            name: BenchTarget(name, each.command.base_url, each.command.model_name, each.pid)
            for name, each in servers.items()
        }


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


def capacity(bench: Bench, target: BenchTarget, workload: str, folder: Path) -> float:
    """Requests per second that the first system gets through; measured once a folder, on seed 0."""
    path = folder / f"capacity-{workload}.json"
    if not path.exists():
        found = run_load(bench, target, bench.requests(workload, 0)[:250], IN_FLIGHT, 2)
        path.write_text(json.dumps({"requests_per_s": found["requests_per_s"], "of": target.label}), "utf-8")
    per_s: float = json.loads(path.read_text("utf-8"))["requests_per_s"]
    return per_s


def run_cell(
    bench: Bench, targets: dict[str, BenchTarget], workload: str, load: float, seed: int, folder: Path
) -> dict[str, Any]:
    """Every system on the same arrivals; writes and returns the record."""
    first = next(iter(targets.values()))
    rate = load * capacity(bench, first, workload, folder)
    requests = bench.requests(workload, seed)
    arrivals = drawn_arrivals(len(requests), rate, CV, seed)
    cell: dict[str, Any] = {"workload": workload, "load": load, "seed": seed, "requests": len(requests), "rate": rate}
    for number, (name, target) in enumerate(targets.items()):
        metrics = run_load(bench, target, requests, arrivals, 1000 * seed + 10 * number)
        path = folder / f"{workload}-{load:g}-{seed}-{name}.json"
        path.write_text(json.dumps(cell | {"system": name, "metrics": metrics, **provenance(("python",))}), "utf-8")
        told = ", ".join(f"{key} {metrics[key]:.0f}" for key in ("jct_ms_mean", "jct_ms_p99", "mtpot_ms_p99"))
        print(f"{workload} {load:g}, seed {seed}, {name}: {told}, {metrics['output_tokens_per_s']:.0f} tokens/s")
    return cell
