"""What a counterfactual costs and how far off it is: ``python -m benchmarks.counterfactuals``.

A simulated service handles ``--requests`` requests under one preset; that run stands for the log. Questions about
requests spread over it ask for another preset. The truth is the whole run under the other preset, to its end. Prints
processor time a question, requests simulated, the median error, and how often the direction of the change is right
among requests whose time differs by more than a tenth.

``--live`` asks about live runs: the components that serve, in this process, on an emulated device, handle the same
arrivals once under ``--preset``, which is the log, and twice under ``--other``, of which the first is the truth. The
error is printed beside the spread of these two: no prediction can be nearer than that.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.live_presets.live import Hardware, run_live
from farsight.core.config.scheduling import SchedulerConfig
from farsight.estimator.profile_file import A100_7B
from farsight.simulator.cluster.records import Record
from farsight.simulator.counterfactual import Change, Life, what_if
from farsight.simulator.experiment import Experiment, make_arrivals
from farsight.simulator.run import run
from farsight.simulator.traffic.workload import Workload

DIFFERENT = 0.1

Serve = Callable[[Experiment, Workload], list[Life]]


@dataclass(frozen=True, slots=True)
class Answers:
    """Counterfactuals of some requests, beside the truth; times in seconds, an entry for each question.

    Attributes:
        cpu_s: Processor time of each.
        num_requests: How many requests were simulated for each.
        is_whole: As in ``Counterfactual``.
    """

    was_s: np.ndarray
    found_s: np.ndarray
    truth_s: np.ndarray
    cpu_s: np.ndarray
    num_requests: np.ndarray
    is_whole: np.ndarray

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.found_s / self.truth_s - 1)))

    def right_direction(self) -> tuple[float, int]:
        """The share of answers that change in the direction of the truth, and how many there are that differ."""
        differs = np.abs(self.truth_s / self.was_s - 1) > DIFFERENT
        right = (self.found_s > self.was_s) == (self.truth_s > self.was_s)
        return (float(right[differs].mean()) if differs.any() else math.nan), int(differs.sum())

    def sentence(self) -> str:
        share, count = self.right_direction()
        sign = f"{100 * share:.0f} % of {count}" if count else "none differs"
        return (
            f"CPU median {float(np.median(self.cpu_s)):.2f} s, largest {self.cpu_s.max():.2f} s; "
            f"{float(np.median(self.num_requests)):.0f} requests simulated, {100 * self.is_whole.mean():.0f} % whole; "
            f"median error {100 * self.median_error:.1f} %; right direction {sign}"
        )


def simulated(experiment: Experiment, arrivals: Workload) -> list[Life]:
    """How each request goes in the simulator, in order of arrival."""
    return _lives(run(experiment, arrivals).recorder.done, arrivals)


def live(experiment: Experiment, arrivals: Workload) -> list[Life]:
    """The same on live components."""
    hardware = Hardware(
        A100_7B, experiment.kv_tokens, experiment.host_kv_tokens, experiment.max_num_seqs, experiment.max_batch_tokens
    )
    served = run_live(arrivals, hardware, {"scheduler": {"preset": experiment.preset}})
    print(f"{experiment.preset}: timers {1000 * served.lag_s:.1f} ms late", flush=True)
    return _lives(served.records, arrivals)


def _lives(records: Sequence[Record], arrivals: Workload) -> list[Life]:
    found = {each.arrival.request_id: Life(each.ttft_s, each.jct_s) for each in records}
    return [found[each.request_id] for each in arrivals]


def ask(
    experiment: Experiment, other: str, arrivals: Workload, logged: list[Life], truth: list[Life], places: list[int]
) -> Answers:
    """Questions about the requests at these places.

    Args:
        logged: How the requests went.
        truth: How they went under the other preset.
    """
    rows = []
    for place in places:
        began = time.process_time()
        found = what_if(experiment, arrivals, logged, place, Change(preset=other))
        cpu_s = time.process_time() - began
        rows.append((logged[place].jct_s, found.jct_s, truth[place].jct_s, cpu_s, found.num_requests, found.is_whole))
    return Answers(*map(np.array, zip(*rows, strict=True)))


def measure(experiment: Experiment, other: str, num_questions: int, is_live: bool) -> str:
    """One line about questions of one cell."""
    arrivals = make_arrivals(experiment)
    changed = experiment.under(other)
    places = np.linspace(0.1 * len(arrivals), len(arrivals) - 1, num_questions).astype(int).tolist()
    serve: Serve = live if is_live else simulated
    logged, truth = serve(experiment, arrivals), serve(changed, arrivals)
    answers = ask(experiment, other, arrivals, logged, truth, places)
    text = f"{experiment.preset} to {other}, {len(arrivals)} requests, {experiment.rate:g} a second: "
    if is_live:
        again = np.array([each.jct_s for each in serve(changed, arrivals)])[places]
        spread = float(np.median(np.abs(again / answers.truth_s - 1)))
        text += f"spread of two live runs {100 * spread:.1f} %; "
    return text + answers.sentence()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counterfactuals", description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="fcfs", help="as the requests were served (default: fcfs)")
    parser.add_argument("--other", default="farsight", help="what is asked for (default: farsight)")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second (default: 2)")
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--live", action="store_true", help="of live runs, beside the spread of two")
    args = parser.parse_args()
    experiment = Experiment(
        scheduler=SchedulerConfig(preset=args.preset),
        num_requests=args.requests,
        rate=args.rate,
        kv_tokens=args.kv_tokens,
        max_num_seqs=args.places,
        seed=args.seed,
    )
    print(measure(experiment, args.other, args.questions, args.live))


if __name__ == "__main__":
    main()
