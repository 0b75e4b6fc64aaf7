"""One run from its experiment to its files: the same seed, the same bytes."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.costs import FREE_IMAGES
from farsight.core.errors import ConfigError, IntegrityError, InvalidValueError
from farsight.policies.presets import PRESETS
from farsight.simulator.cluster.latency import GPUS, MODELS, LinearLatency, ModelShape, Roofline, VisionShape
from farsight.simulator.cluster.records import Timeline
from farsight.simulator.experiment import DEFAULT_RATE, PREDICTORS, Experiment, free_kv_tokens, make_arrivals
from farsight.simulator.results import config_of, read_config, request_row, to_json, write_results
from farsight.simulator.run import RunOutcome, run
from farsight.simulator.traffic.workload import SimRequest

SMALL = Experiment(scheduler=SchedulerConfig(preset="fcfs"), num_requests=60, kv_tokens=4000, rate=20.0, seed=7)


def written(directory: Path, experiment: Experiment = SMALL) -> tuple[RunOutcome, dict[str, bytes]]:
    outcome = run(experiment, make_arrivals(experiment))
    paths = write_results(directory, experiment, outcome.summary, outcome.recorder.done)
    return outcome, {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path, preset: str) -> None:
    """Nothing of a run is left over for the next one in the process, whatever ran in between."""
    experiment = replace(SMALL.under(preset), num_replicas=2, predictor="noisy", num_requests=10, workload="gsm8k-like")
    _, first = written(tmp_path / "first", experiment)
    _, between = written(tmp_path / "between", replace(experiment, seed=8, kv_tokens=2000))
    _, second = written(tmp_path / "second", experiment)
    assert first == second and all(first[name] != between[name] for name in first)


def test_a_line_for_each_request(tmp_path: Path) -> None:
    outcome, files = written(tmp_path)
    assert sorted(files) == ["config.json", "requests.jsonl", "summary.json"]
    rows = [json.loads(line) for line in files["requests.jsonl"].decode().splitlines()]
    assert len(rows) == 60
    keys = "app arrived_at cached_len finished_at first_token_at image_tokens jct_s mtpot_s num_evictions num_swaps "
    keys += "output_len predicted_len prompt_len replica request_id tpot_s ttft_s"
    assert sorted(rows[0]) == sorted(request_row(outcome.recorder.done[0])) == keys.split()
    assert [row["finished_at"] for row in rows] == [record.finished_at for record in outcome.recorder.done]
    assert json.loads(files["summary.json"]) == outcome.summary.to_dict()
    for row in rows:
        assert row["jct_s"] == pytest.approx(row["finished_at"] - row["arrived_at"])
    paths = write_results(tmp_path / "new" / "deep", SMALL, outcome.summary)
    assert [path.name for path in paths] == ["config.json", "summary.json"], "requests only where they are given"
    told: list[int] = []
    watched = run(SMALL, make_arrivals(SMALL), timeline=Timeline(), progress=told.append)
    assert told == sorted(told) and told[-1] == 60
    assert watched.summary == outcome.summary, "a timeline changes nothing"
    assert list(map(request_row, watched.recorder.done)) == list(map(request_row, outcome.recorder.done))
    assert to_json({"b": math.nan, "a": [math.inf, 0.1], "c": {"d": -math.inf}}) == (
        '{"a": [null, 0.1], "b": null, "c": {"d": null}}'
    )


def test_a_config_of_a_version_without_pictures_is_read(tmp_path: Path) -> None:
    tower = ModelShape("sees", 32, 4096, 7e9, vision=VisionShape(304e6))
    for latency in (SMALL.latency, Roofline(GPUS["h100"], MODELS["opt-13b"]), Roofline(GPUS["h100"], tower)):
        experiment, path = replace(SMALL, latency=latency), tmp_path / "config.json"
        config = config_of(experiment)
        path.write_text(to_json(config))
        assert read_config(path) == experiment
        if isinstance(latency, Roofline):
            del config["latency"]["model"]["vision"]
            known: LinearLatency | Roofline = replace(latency, model=replace(latency.model, vision=None))
        else:
            del config["latency"]["image_cost"]
            known = replace(latency, image_cost=FREE_IMAGES)
        path.write_text(to_json(config))
        assert read_config(path) == replace(experiment, latency=known)


def test_what_never_fits_is_refused_and_counted() -> None:
    """Also in a closed loop whose every client has one: the next ones come all the same."""
    arrivals = [SimRequest(f"r{i}", 0.0, 5000 if i < 3 else 10, 2, 2) for i in range(5)]
    for clients in (None, 1, 2):
        outcome = run(replace(SMALL, rate=None, clients=clients), arrivals)
        assert outcome.failed == ("r0", "r1", "r2")
        assert (outcome.summary.num_requests, outcome.summary.num_failed) == (2, 3)


def test_requests_that_never_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farsight.policies.admission.watermark.Aggressive.admits", lambda *_: False)
    with pytest.raises(IntegrityError, match="preset fcfs: 60 of 60 requests never ended"):
        run(SMALL, make_arrivals(SMALL))


def write_trace(path: Path, num_requests: int) -> Path:
    lines = [
        {"timestamp": 500 * i, "input_length": 600 + i, "output_length": 5 + i, "hash_ids": [1, 100 + i]}
        for i in range(num_requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_is_read_at_its_pace_or_at_another(tmp_path: Path) -> None:
    trace = Experiment(workload=str(write_trace(tmp_path / "trace.jsonl", 12)))
    arrivals = make_arrivals(trace)
    assert [arrival.arrived_at for arrival in arrivals] == pytest.approx([0.5 * i for i in range(12)])
    assert [arrival.output_len for arrival in arrivals] == list(range(5, 17))
    assert arrivals[0].prefix[:32] == arrivals[1].prefix[:32] and len(arrivals[0].prefix) == 600 // 16
    faster = make_arrivals(replace(trace, rate=4.0))
    assert [arrival.arrived_at for arrival in faster] == pytest.approx([0.25 * i for i in range(12)])
    assert {arrival.arrived_at for arrival in make_arrivals(replace(trace, rate=math.inf))} == {0.0}
    assert run(trace, arrivals).summary.prefix_hit_rate > 0.5


def test_each_seed_has_its_window_of_a_trace(tmp_path: Path) -> None:
    """Twelve requests have two windows of five; the third seed has the first one again."""
    trace = Experiment(workload=str(write_trace(tmp_path / "trace.jsonl", 12)), num_requests=5)
    lengths = [[each.output_len for each in make_arrivals(replace(trace, seed=seed))] for seed in range(3)]
    assert lengths == [list(range(5, 10)), list(range(10, 15)), list(range(5, 10))]
    assert make_arrivals(replace(trace, seed=1))[0].arrived_at == 0
    with pytest.raises(InvalidValueError, match=r"^num_requests: got 13, expected at most the 12 of trace\.jsonl"):
        make_arrivals(replace(trace, num_requests=13))


def test_a_drawn_workload_has_a_pace_of_so_many_a_replica() -> None:
    for rate, expected in ((None, 3 * DEFAULT_RATE), (2.0, 2.0)):
        last = make_arrivals(Experiment(num_requests=2000, num_replicas=3, rate=rate))[-1]
        assert 2000 / last.arrived_at == pytest.approx(expected, rel=0.1)
    at_once = replace(SMALL, rate=math.inf)
    assert {arrival.arrived_at for arrival in make_arrivals(at_once)} == {0.0}
    assert config_of(at_once)["rate"] == "inf"


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_every_predictor_foresees(predictor: str) -> None:
    """One seed, one forecast; only the history has none: policies look at theirs."""
    experiment = replace(SMALL, predictor=predictor)
    forecasts = [arrival.forecast for arrival in make_arrivals(experiment)]
    assert forecasts == [arrival.forecast for arrival in make_arrivals(experiment)]
    assert all((forecast is None) == (predictor == "history") for forecast in forecasts)


def test_unknown_names() -> None:
    with pytest.raises(InvalidValueError, match=r"^workload: got 'zpif', expected an existing file, or one of "):
        make_arrivals(replace(SMALL, workload="zpif"))
    with pytest.raises(InvalidValueError, match=r"\(did you mean 'zipf'\?\)"):
        make_arrivals(replace(SMALL, workload="zpif"))
    with pytest.raises(InvalidValueError, match=r"^predictor: got 'x', expected one of none, history"):
        make_arrivals(replace(SMALL, predictor="x"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_replicas", 0),
        ("max_num_seqs", 0),
        ("kv_tokens", 15),
        ("num_requests", 0),
        ("clients", 0),
        ("rate", 0.0),
        ("rate", math.nan),
        ("seed", -1),
    ],
)
def test_bad_values(name: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=f"^{name}: got "):
        Experiment(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"^rate: got 2\.0, expected none beside clients"):
        Experiment(rate=2.0, clients=3)
    with pytest.raises(ConfigError, match="did you mean 'fcfs'"):
        Experiment(scheduler=SchedulerConfig(preset="fcsf"))


def test_kv_tokens_of_a_gpu() -> None:
    """90 % of 80 GB less 13.4 GB of weights, 512 KiB a token; two GPUs hold the weights once."""
    one = Roofline(GPUS["a100-80g"], MODELS["llama-2-7b"])
    assert free_kv_tokens(one) == int((72e9 - 13.4e9) / (512 * 1024))
    assert free_kv_tokens(replace(one, tensor_parallel=2)) == int((144e9 - 13.4e9) / (512 * 1024))
    with pytest.raises(
        InvalidValueError,
        match=r"^model: got 'opt-66b', expected weights below the 72 GB that 1 x a100-80g have for them, not 132 GB",
    ):
        free_kv_tokens(replace(one, model=MODELS["opt-66b"]))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_serves_a_model_with_states(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more sequences than there are states hold keys and values; none is moved."""
    model = MODELS["qwen3.5-9b"]
    assert model.kv_bytes == 32 * 1024 and round(model.state_bytes / 2**20, 1) == 50.2
    latency = Roofline(GPUS["a100-80g"], model)
    assert free_kv_tokens(latency) == int((72e9 - 18e9 - (512 + 128) * model.state_bytes) / (32 * 1024))
    monkeypatch.setattr("farsight.simulator.experiment.NUM_STATES", 3)
    experiment = replace(SMALL.under(preset), latency=latency, num_requests=30)
    done = run(experiment, make_arrivals(experiment)).recorder.done
    assert len(done) == 30 and not any(record.num_swaps for record in done)


def test_prefixes_are_found_where_a_state_is_kept() -> None:
    """A model with states finds a little less than one without: what lies behind the latest state is computed again."""
    found = {}
    for name in ("qwen3.5-9b", "mistral-7b"):
        latency = Roofline(GPUS["a100-80g"], MODELS[name])
        experiment = replace(SMALL, latency=latency, workload="tool", kv_tokens=200_000)
        done = run(experiment, make_arrivals(experiment)).recorder.done
        found[name] = sum(record.cached_len for record in done) / sum(record.arrival.prompt_len for record in done)
    assert 0.5 * found["mistral-7b"] < found["qwen3.5-9b"] < found["mistral-7b"]


@pytest.mark.parametrize(
    "experiment",
    [
        SMALL,
        replace(SMALL, rate=math.inf, latency=Roofline(GPUS["h100"], MODELS["opt-13b"], 2)),
        replace(SMALL, rate=None, clients=3, num_requests=None),
        replace(SMALL.under("multi-bin"), batch=BatchConfig(batch_size=4, num_bins=2, max_wait_s=30.0)),
    ],
)
def test_a_saved_config_is_the_same_experiment(tmp_path: Path, experiment: Experiment) -> None:
    path = tmp_path / "config.json"
    path.write_text(to_json(config_of(experiment)))
    assert read_config(path) == experiment
    config = config_of(experiment)
    assert config["farsight_version"] and config["seed"] == 7
    assert config.keys() - {"farsight_version", "preset", "watermark"} == set(Experiment.__dataclass_fields__)
    for name in ("batch", "scheduler", "placement"):  # as an earlier version wrote it
        del config[name]
    path.write_text(to_json(config | {"preset": "aggressive", "watermark": 0.9}))
    earlier = SchedulerConfig(preset="aggressive", watermark=0.9)
    assert read_config(path) == replace(experiment, scheduler=earlier, batch=BatchConfig())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": "x"}, "config.seed: got 'x', expected a value of type int"),
        ({"sed": 0}, "config.sed: got 0, expected no such field, but workload"),
        ({"rate": []}, "config.rate: got [], expected a value of type float or null"),
        ({"latency": None}, "config.latency: got None, expected a JSON object"),
        ({"sla": {"ttft_s": 1.0}}, "config.sla.mtpot_s: got None, expected a value"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(tmp_path: Path, change: dict[str, object], told: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(SMALL) | change))
    with pytest.raises(InvalidValueError, match=r"config|max_num_seqs") as caught:
        read_config(path)
    assert told in str(caught.value)
    (tmp_path / "list.json").write_text("[]")
    for name in ("none.json", "list.json"):
        with pytest.raises(ConfigError, match=name):
            read_config(tmp_path / name)


def test_settings_of_batches_are_those_of_a_server() -> None:
    """All at once on one replica: the size of the largest batch that ran is the one that was set."""
    arrivals = make_arrivals(replace(SMALL, rate=math.inf))
    for size in (2, 5):
        scheduler = SchedulerConfig(preset="magnus-vs", execution="static")
        experiment = replace(SMALL, scheduler=scheduler, batch=BatchConfig(batch_size=size))
        ends = Counter(record.finished_at for record in run(experiment, arrivals).recorder.done)
        assert max(ends.values()) == size
