"""Requests of a log as arrivals, and what would have become of one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from core.config.load import make_config
from core.errors import InvalidValueError
from core.forecast import Forecast
from core.messages.log import FinishedRequest, ServedAs, WhatIfAnswer, WhatIfQuestion
from simulator.cluster.latency import LinearLatency
from simulator.counterfactual import Change, Life, what_if
from simulator.experiment import Experiment
from simulator.traffic.workload import SimRequest

ENDS = ("stop", "length", "abort")
"""Finish reasons of requests with a known output; a disconnected client's output ends at the disconnect."""


def is_known(record: FinishedRequest) -> bool:
    """Whether the length of its output is known."""
    return record.finish_reason in ENDS and record.output_len > 0


def as_arrival(record: FinishedRequest, begin: float, forecast: Forecast | None = None) -> SimRequest:
    """The request as it came, in seconds since ``begin``. A forecast counts as known on arrival."""
    return SimRequest(
        record.request_id,
        record.received_at - begin,
        record.prompt_len,
        record.output_len,
        max(record.max_new_tokens, record.output_len),
        priority=record.priority,
        tenant=record.tenant,
        forecast=forecast,
    )


def as_life(record: FinishedRequest) -> Life:
    """How it went. A record without a first token counts as answered at its end."""
    return Life(record.jct_s if record.ttft_s is None else record.ttft_s, record.jct_s)


def answer(question: WhatIfQuestion) -> WhatIfAnswer:
    """What would have become of the request.

    Raises:
        InvalidValueError: It is not among the records, or fits no replica.
    """
    window = question.window
    records = sorted(filter(is_known, window.records), key=lambda each: each.received_at)
    places = [place for place, each in enumerate(records) if each.request_id == window.request_id]
    if not places:
        raise InvalidValueError("id", window.request_id, "a request with an output")
    change = Change(question.preset or None, question.replicas, question.priority)
    lives = [as_life(each) for each in records]
    found = what_if(experiment_as(window.served), _arrivals(records), lives, places[0], change)
    before, after = found.as_simulated, found.changed
    return WhatIfAnswer(
        lives[places[0]].jct_s,
        found.jct_s,
        before.ttft_s,
        before.jct_s,
        after.ttft_s,
        after.jct_s,
        is_whole=found.is_whole,
    )


def _arrivals(records: Sequence[FinishedRequest]) -> list[SimRequest]:
    return [as_arrival(each, records[0].received_at) for each in records]


def experiment_as(served: ServedAs) -> Experiment:
    """Returns the experiment that decides as a server did."""
    server = make_config(json.loads(served.settings))
    return Experiment(
        scheduler=server.scheduler,
        placement=server.placement,
        batch=server.batch,
        num_replicas=served.num_replicas,
        latency=LinearLatency(served.cost),
        kv_tokens=served.kv_tokens,
        max_num_seqs=served.max_num_seqs,
    )
