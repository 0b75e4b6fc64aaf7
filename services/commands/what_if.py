"""What a request would have taken under another preset, number of replicas or priority, from a log."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from services.words import counted

SHARE = 0.1
"""Times that differ by less are called about the same."""


@dataclass(frozen=True, slots=True)
class Question:
    """A counterfactual, and how the service was run.

    Attributes:
        change: As ``simulator.counterfactual.parse_change`` reads it.
        log: As for ``read_traffic``.
        config: TOML file of the server; None: its defaults.
        preset, replicas, max_num_seqs: As the request was served, where that is not as in ``config``.
        profile: Step times of a replica, a file of `farsight profile`; None for a 7B model on an A100.
    """

    change: str
    log: str
    config: Path | None
    preset: str | None
    replicas: int | None
    profile: Path | None
    kv_tokens: int | None
    max_num_seqs: int | None


def answer(question: Question, request_id: str) -> dict[str, Any]:
    """What would have been, of this request alone; seconds.

    Raises:
        FarsightError: The change, the log or the request is not as expected.
    """
    from services.commands.logged_traffic import read_traffic
    from services.commands.simulate import experiment_of, hardware
    from simulator.counterfactual import as_life, parse_change, what_if

    change = parse_change(question.change)
    latency, kv_tokens = hardware(None, None, None, question.profile)
    experiment = dataclasses.replace(
        experiment_of(question.config, question.replicas, question.max_num_seqs),
        latency=latency,
        kv_tokens=kv_tokens if question.kv_tokens is None else question.kv_tokens,
    )
    if question.preset is not None:
        experiment = experiment.under(question.preset)
    traffic = read_traffic(question.log)
    places = [place for place, each in enumerate(traffic.logged) if each.request.request_id == request_id]
    if not places:
        raise ConfigError("--log", question.log, f"a log that holds request {request_id} with an output")
    lives = [as_life(each.request) for each in traffic.logged]
    found = what_if(experiment, traffic.arrivals(), lives, places[0], change)
    return {"if": question.change, "logged_jct_s": lives[places[0]].jct_s, **dataclasses.asdict(found)}


def sentence(found: dict[str, Any]) -> str:
    """The answer in one sentence."""
    logged_s, jct_s = found["logged_jct_s"], found["jct_s"]
    ratio = jct_s / logged_s
    left_out = "" if found["is_whole"] else ", the nearest; others were left out to bound the work"
    word = "about the same" if abs(ratio - 1) < SHARE else f"{ratio:.2f} times that"
    return (
        f"With {found['if']} it would have taken {jct_s:.2f} s instead of {logged_s:.2f} s, {word} "
        f"(simulated: {found['changed']['jct_s']:.2f} s instead of {found['as_simulated']['jct_s']:.2f} s, "
        f"{counted(found['num_requests'], 'request')}{left_out})."
    )
