"""Measures one server, or several in turn (A B A B), so that changes of the machine affect all of them alike."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from farsight.core.errors import ConfigError
from farsight.services.bench.answers import Sla
from farsight.services.bench.cases import Case, fit_cases, make_cases
from farsight.services.bench.client import find_model
from farsight.services.bench.load import Connection, Conversations, RunResult, measure, run_async
from farsight.services.bench.options import BenchOptions, body_form, check_options, read_sla
from farsight.services.bench.report import case_table, provenance, write_json
from farsight.services.bench.statistics import (
    Metrics,
    counted_by,
    error_examples,
    error_kinds,
    latencies,
    per_request,
    ratios,
    run_metrics,
    summarize,
    token_rate,
)
from farsight.services.bench.targets import BenchTarget, make_call

WARM_UP_TOKENS = 8
SALT_BITS = 24
"""Range of a call's random salt; its runs count up from the salt, far apart from those of other calls."""
_RUN_BITS = 16

Say = Callable[[str], None]


def run_salt(salt: int, run: int) -> int:
    """Returns the salt of a call's run of this number, from 1; warm-ups are runs too."""
    return (salt << _RUN_BITS) + run


class Bench:
    """Runs loads on servers.

    Args:
        options: Checked.
        targets: The servers; ratios are relative to the first.
    """

    def __init__(self, options: BenchOptions, targets: Sequence[BenchTarget], say: Say) -> None:
        self.salt = secrets.randbits(SALT_BITS) if options.salt is None else options.salt
        self._options = options
        self._targets = targets
        self._sla: Sla | None = read_sla(options)
        self._say = say
        self._num_runs = 0

    def run(self, case: Case) -> dict[str, Any]:
        """Measures every server under a load; prints the table and the errors."""
        for target in self._targets:
            self._warm_up(target, case)
        runs: dict[str, list[RunResult]] = {target.label: [] for target in self._targets}
        for number in range(self._options.repeats):
            for target, salt in zip(self._targets, self._salts_of_a_round(), strict=True):
                runs[target.label].append(self._measure(target, case, number, salt))
        record = self._record(case, runs)
        self._say(f"\n{case_table(record)}")
        if isinstance(case.load, Conversations):
            self._tell_computed(runs, case.load.each)
        self._tell_errors(record)
        if self._options.plots is not None:
            self._plot(case, runs, self._options.plots)
        return record

    def _tell_computed(self, runs: dict[str, list[RunResult]], num_turns: int) -> None:
        """Prints how many prompt tokens servers have computed for each that was new in a conversation."""
        for label, results in runs.items():
            for number, run in enumerate(results, start=1):
                told = [answer.prompt_tokens for answer in run.answers]
                new = sum(max(told[first : first + num_turns]) for first in range(0, len(told), num_turns))
                computed = sum(told) - sum(answer.cached_tokens for answer in run.answers)
                share = f", {computed / new:.2f} for each" if new else ""
                self._say(f"{label}, round {number}: {computed} prompt tokens computed for {new} new ones{share}")

    def _next_salt(self) -> int:
        """A salt that makes new prompts, so that no prefix cache helps; none if all runs send the same prompts."""
        if self._options.same_prompts:
            return 0
        self._num_runs += 1
        return run_salt(self.salt, self._num_runs)

    def _salts_of_a_round(self) -> list[int]:
        """Salts for the targets: servers answer the same prompts, since how many guesses come true depends on them.

        A server that is several targets gets other prompts for each, so that no prefix cache helps.
        """
        roots = [target.root for target in self._targets]
        turns = [roots[:number].count(root) for number, root in enumerate(roots)]
        salts = [self._next_salt() for _ in range(max(turns) + 1)]
        return [salts[turn] for turn in turns]

    def _connection(self, case: Case) -> Connection:
        options = self._options
        return Connection(body_form(options, case.longest_output), options.timeout, options.keep_alive)

    def _warm_up(self, target: BenchTarget, case: Case) -> None:
        """Sends a few short requests that are not counted; a request that fails here fails again in the run."""
        connection, salt = self._connection(case), self._next_salt()
        num = min(self._options.warm_up, 1) if isinstance(case.load, Conversations) else self._options.warm_up
        chosen = case.requests[:num]
        calls = [make_call(request, target.model, connection.form, salt, WARM_UP_TOKENS) for request in chosen]
        if calls:
            measure(target, calls, connection, case.load if isinstance(case.load, int) else len(calls))

    def _measure(self, target: BenchTarget, case: Case, number: int, salt: int) -> RunResult:
        connection = self._connection(case)
        salt = 0 if self._options.chat_texts else salt  # Chats are sent as people wrote them.
        calls = [make_call(request, target.model, connection.form, salt) for request in case.of_round(number)]
        return measure(target, calls, connection, case.load)

    def _record(self, case: Case, runs: dict[str, list[RunResult]]) -> dict[str, Any]:
        metrics = {label: [run_metrics(run, self._sla) for run in results] for label, results in runs.items()}
        base, *others = metrics
        wanted = {
            "requests": len(case.requests),
            "prompt_tokens": sum(request.prompt_tokens for request in case.requests),
            "output_tokens": sum(request.output_tokens for request in case.requests),
        }
        return {
            "name": case.name,
            "load": case.load if isinstance(case.load, int) else list(case.load),
            "wanted": wanted,
            "targets": [_target_record(target, runs[target.label], metrics[target.label]) for target in self._targets],
            "ratios": [
                {"label": label, "base": base, "ratios": ratios(metrics[label], metrics[base])} for label in others
            ],
        }

    def _tell_errors(self, record: dict[str, Any]) -> None:
        for target in record["targets"]:
            for number, run in enumerate(target["runs"], start=1):
                for kind, count in run["errors"].items():
                    example = run["error_examples"][kind]
                    self._say(f"error at {target['label']}, round {number}, {count} times: {kind}: {example}")
                    if kind == "HTTP 400":
                        self._say(
                            "requests that do not fit the context: cut by --max-prompt-tokens, --max-output-tokens"
                        )

    def _plot(self, case: Case, runs: dict[str, list[RunResult]], directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        path = directory / f"{case.file_name}.png"
        plot_case(path, case.name, runs)
        self._say(f"plot: {path}")


def _target_record(target: BenchTarget, runs: Sequence[RunResult], metrics: Sequence[Metrics]) -> dict[str, Any]:
    records = [
        {
            "metrics": numbers,
            "errors": error_kinds(run.answers),
            "error_examples": error_examples(run.answers),
            "tokens_counted_by": counted_by(run.answers),
            "requests": per_request(run),
        }
        for run, numbers in zip(runs, metrics, strict=True)
    ]
    named = {"label": target.label, "url": target.base_url, "model": target.model}
    return {**named, "summary": summarize(metrics), "runs": records}


def run_bench(
    options: BenchOptions, say: Say, program: Sequence[str] = ("farsight",), facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Runs the benchmark; writes and returns the record of the JSON file.

    Args:
        say: Prints a line.
        program: The program's name, without arguments.
        facts: More entries of the record.

    Raises:
        FarsightError: An option is wrong, or a server lists no model.
    """
    check_options(options)
    cases = make_cases(options)
    targets = make_targets(options)
    bench = Bench(options, targets, say)
    cases = fit_cases(cases, options, targets, bench.salt, say)
    head = {**provenance(program), "config": _config(options), "salt": bench.salt, **(facts or {})}
    record = {**head, "cases": [bench.run(case) for case in cases]}
    write_json(options.json, record)
    return record


def make_targets(options: BenchOptions) -> list[BenchTarget]:
    """The servers of the options; a server without a model name is asked for one.

    Raises:
        FarsightError: A server does not answer, or a process does not exist.
    """
    targets = []
    for i, url in enumerate(options.url):
        label = options.label[i] if options.label else _default_label(url, i, len(options.url))
        pid = options.server_pid[i] if options.server_pid else None
        if pid is not None and not psutil.pid_exists(pid):
            raise ConfigError("--server-pid", pid, "the id of a process on this machine")
        name = options.model[i if len(options.model) > 1 else 0] if options.model else ""
        target = BenchTarget(label, url, name, pid, options.api_key)
        model = run_async(find_model(target))
        targets.append(replace(target, model=model.name, max_model_len=model.max_model_len))
    return targets


def _default_label(url: str, i: int, num_urls: int) -> str:
    return url if num_urls == 1 else "ABCDEFGH"[i] if num_urls <= 8 else f"server {i}"


def _config(options: BenchOptions) -> dict[str, Any]:
    """The options as JSON values, without the API key."""
    fields = asdict(options)
    fields["api_key"] = None if options.api_key is None else "..."
    return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}


def num_errors(record: dict[str, Any]) -> int:
    """The number of failed requests in all runs."""
    runs = (run for case in record["cases"] for target in case["targets"] for run in target["runs"])
    return sum(sum(run["errors"].values()) for run in runs)


SIZE_INCHES = (13.0, 7.0)
NUM_BINS = 60

TITLES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "mtpot_ms": "Longest pause of a request",
    "jct_ms": "Time of a request",
}


def plot_case(path: Path, title: str, runs: Mapping[str, Sequence[RunResult]]) -> None:
    """Writes a PNG: the distribution of every latency and the throughput over time, a line for each server.

    Latencies are pooled over all rounds; the throughput is the mean of the rounds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    figure.suptitle(title)
    for panel, (name, heading) in zip(axes, TITLES.items(), strict=False):
        _plot_distribution(panel, name, heading, runs)
    _plot_throughput(axes[len(TITLES)], runs)
    axes[-1].axis("off")
    handles, labels = axes[len(TITLES)].get_legend_handles_labels()
    axes[-1].legend(handles, labels, loc="center", fontsize="large")
    figure.savefig(path, dpi=110)


def _plot_distribution(panel: Any, name: str, heading: str, runs: Mapping[str, Sequence[RunResult]]) -> None:
    for label, of_target in runs.items():
        values = sorted(value for run in of_target for value in latencies(run.answers)[name])
        shares = [100 * (i + 1) / len(values) for i in range(len(values))]
        panel.step(values, shares, where="post", label=label)
    panel.set(title=heading, xlabel="ms", ylabel="% of requests at most", ylim=(0, 100), xlim=(0, None))
    panel.grid(alpha=0.3)


def _plot_throughput(panel: Any, runs: Mapping[str, Sequence[RunResult]]) -> None:
    for label, of_target in runs.items():
        panel.plot(*token_rate(of_target, NUM_BINS), label=label)
    panel.set(title="Throughput", xlabel="s from the beginning", ylabel="output tokens/s", ylim=(0, None))
    panel.set_xlim(0, None)
    panel.grid(alpha=0.3)
