"""What a counterfactual costs and how far off it is: ``python -m benchmarks.counterfactuals``.

A simulated service handles ``--requests`` requests under one preset; that run stands for the log. Questions about
requests spread over it ask for another preset. The truth is the whole run under the other preset, to its end. Prints
processor time a question, requests simulated, the median error, and how often the direction of the change is right
among requests whose time differs by more than a tenth.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np

from simulator.counterfactual import Change, Life, what_if
from simulator.experiment import Experiment, make_arrivals
from simulator.run import run
from simulator.traffic.workload import Workload

DIFFERENT = 0.1


def lives(experiment: Experiment, arrivals: Workload) -> list[Life]:
    """How each request went, in order of arrival."""
    done = run(experiment, arrivals).recorder.done
    found = {each.arrival.request_id: Life(each.ttft_s, each.jct_s) for each in done}
    return [found[each.request_id] for each in arrivals]


def measure(experiment: Experiment, other: str, num_questions: int) -> str:
    """One line about questions of one cell."""
    arrivals = make_arrivals(experiment)
    logged = lives(experiment, arrivals)
    truth = [each.jct_s for each in lives(dataclasses.replace(experiment, preset=other), arrivals)]
    seconds, nums, errors, whole, right = [], [], [], [], []
    for index in np.linspace(0.1 * len(arrivals), len(arrivals) - 1, num_questions).astype(int).tolist():
        began = time.process_time()
        found = what_if(experiment, arrivals, logged, index, Change(preset=other))
        seconds.append(time.process_time() - began)
        nums.append(found.num_requests)
        whole.append(found.is_whole)
        errors.append(abs(found.jct_s / truth[index] - 1))
        was_s = logged[index].jct_s
        if abs(truth[index] / was_s - 1) > DIFFERENT:
            right.append((found.jct_s > was_s) == (truth[index] > was_s))
    sign = f"{100 * float(np.mean(right)):.0f} % of {len(right)}" if right else "none differs"
    return (
        f"{experiment.preset} to {other}, {len(arrivals)} requests, {experiment.rate:g} a second: CPU median "
        f"{float(np.median(seconds)):.2f} s, largest {max(seconds):.2f} s; {float(np.median(nums)):.0f} requests "
        f"simulated, {100 * float(np.mean(whole)):.0f} % whole; median error {100 * float(np.median(errors)):.1f} %; "
        f"right direction {sign}"
    )


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
    args = parser.parse_args()
    experiment = Experiment(
        preset=args.preset,
        num_requests=args.requests,
        rate=args.rate,
        kv_tokens=args.kv_tokens,
        max_num_seqs=args.places,
        seed=args.seed,
    )
    print(measure(experiment, args.other, args.questions))


if __name__ == "__main__":
    main()
