"""The figures of the demo: over requests that have ended whole at both services."""

from __future__ import annotations

import tomllib

import pytest

from core.config.load import make_config
from core.errors import ConfigError, InvalidValueError
from services.bench.answers import Answer, Failure
from services.demo.race import Race, percentile
from services.demo.sending import request_body
from services.demo.settings import DemoSettings, to_toml
from services.demo.simulated import simulated_ratio
from simulator.traffic.workload import SimRequest

BEGAN_AT = 100.0


def arrivals(num: int) -> list[SimRequest]:
    return [SimRequest(f"chat-{i}", float(i), 8, 5, 64, app="chat") for i in range(num)]


def race(num: int) -> Race:
    made = Race(("fcfs", "farsight"), arrivals(num))
    made.began_at = BEGAN_AT
    return made


def end(race: Race, side: int, lane: int, jct_s: float, failure: Failure | None = None) -> None:
    """The answer of a request, whose tokens come every 0.1 s until its end."""
    due = BEGAN_AT + race.arrivals[lane].arrived_at
    chunks = [due + jct_s - 0.1 * left for left in (4, 3, 2, 1, 0)]
    answer = Answer(lane, "chat", due, ended_at=due + jct_s, chunks_at=chunks, num_tokens=5, failure=failure)
    race.sides[side].lanes[lane].answer = answer


def test_means_are_over_requests_that_ended_at_both() -> None:
    run = race(3)
    end(run, 0, 0, 4.0)
    end(run, 0, 1, 6.0)
    end(run, 1, 1, 3.0)
    assert run.paired() == [[6.0], [3.0]] and run.ratio() == 0.5 and not run.is_over
    view = run.view(now=BEGAN_AT + 9.0)
    assert (view["paired"], view["ratio"], view["elapsed_s"]) == (1, 0.5, 9.0)
    assert [side["ended"] for side in view["sides"]] == [2, 1]


def test_a_broken_stream_counts_as_ended_and_in_no_mean() -> None:
    run = race(1)
    end(run, 0, 0, 4.0)
    end(run, 1, 0, 1.0, Failure("stream cut", "the peer closed the connection"))
    assert run.is_over and run.ratio() is None
    assert [side["broken"] for side in run.view(BEGAN_AT + 5.0)["sides"]] == [0, 1]
    assert run.result()["sides"][1]["mean_s"] is None


def test_a_lane_shows_its_pauses() -> None:
    run = race(1)
    chunks = [BEGAN_AT + at for at in (1.0, 1.1, 2.0, 2.1)]
    run.sides[0].lanes[0].answer = Answer(0, "chat", BEGAN_AT, chunks_at=chunks)
    assert run.sides[0].lanes[0].row(BEGAN_AT) == [0.0, 1.0, 2.1, False, [(1.1, 2.0)]]
    assert run.sides[1].lanes[0].row(BEGAN_AT) == [0.0, None, None, False, []]


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentile([], 0.99) is None
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(i) for i in range(1, 101)], 0.99) == 99.0


def test_the_service_gets_the_devices_of_the_simulated_run() -> None:
    settings = DemoSettings(num_requests=20)
    requests = settings.arrivals()
    tables = tomllib.loads(to_toml(settings.config("farsight", requests)))
    config, experiment = make_config(tables), settings.experiment("farsight")
    assert config.scheduler.preset == "farsight" and not config.predictor.from_traffic
    assert config.engine.max_num_seqs == experiment.max_num_seqs
    assert config.engine.max_batch_tokens == experiment.max_batch_tokens
    assert config.engine.max_model_len == max(each.prompt_len + each.max_new_tokens for each in requests)


def test_prompts_share_no_prefix_and_hide_their_lengths() -> None:
    one, two = (request_body(each, "model") for each in arrivals(2))
    assert one["prompt"] != two["prompt"] and len(one["prompt"]) == 8
    assert (one["max_tokens"], one["benchmark_len"]) == (64, 5)


def test_the_default_arrivals_show_a_difference() -> None:
    settings = DemoSettings()
    assert simulated_ratio(settings, settings.arrivals()) < 0.7


def test_settings_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="--requests"):
        DemoSettings(num_requests=1)
    with pytest.raises(InvalidValueError, match="kv_tokens"):
        DemoSettings(kv_tokens=64).arrivals()
    with pytest.raises(InvalidValueError, match="workload"):
        DemoSettings(trace="no-such-trace").arrivals()
