"""Several expositions become one that a scraper can read."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from core.exposition import exposition
from services.api.pages.metrics_page import merge_expositions

TTFT = "vllm:time_to_first_token_seconds"


class _Process:
    """One process with a few metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Counter("vllm:generation_tokens", "Tokens.", ["model_name"], registry=self.registry)
        self.ttft = Histogram(TTFT, "TTFT.", ["model_name"], registry=self.registry, buckets=(0.1, 1.0))
        self.steps = Histogram("vllm:iteration_tokens_total", "Steps.", registry=self.registry, buckets=(8, 16))
        self.running = Gauge("vllm:num_requests_running", "Running.", ["engine"], registry=self.registry)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()

    @property
    def open_metrics(self) -> str:
        return exposition(self.registry, open_metrics=True)


def read(text: str) -> dict[str, Metric]:
    """The families by name; no family may come twice."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert helps == types
    assert len(set(types)) == len(types)
    return {family.name: family for family in families}


def values(family: Metric) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in family.samples}
    assert len(found) == len(family.samples)
    return found


@pytest.fixture
def one() -> _Process:
    return _Process()


@pytest.fixture
def two() -> _Process:
    return _Process()


def test_nothing_gives_nothing() -> None:
    assert merge_expositions({}) == ""
    assert merge_expositions({"router": ""}) == ""


def test_counters_are_summed(one: _Process, two: _Process) -> None:
    one.tokens.labels("tiny").inc(3)
    two.tokens.labels("tiny").inc(4)
    two.tokens.labels("large").inc(5)
    family = read(merge_expositions({"ingress-a": one.text, "ingress-b": two.text}))["vllm:generation_tokens"]
    assert family.type == "counter"
    name = "vllm:generation_tokens_total"
    assert values(family) == {(name, (("model_name", "tiny"),)): 7, (name, (("model_name", "large"),)): 5}


def test_histograms_are_summed(one: _Process, two: _Process) -> None:
    for process, seconds in ((one, 0.05), (one, 0.5), (two, 0.5), (two, 9.0)):
        process.ttft.labels("tiny").observe(seconds)
        process.steps.observe(10)
    merged = read(merge_expositions({"ingress-a": one.text, "ingress-b": two.text}))
    ttft = [(sample.name, sample.labels.get("le"), sample.value) for sample in merged[TTFT].samples]
    assert ttft == [
        (f"{TTFT}_bucket", "0.1", 1),
        (f"{TTFT}_bucket", "1.0", 3),
        (f"{TTFT}_bucket", "+Inf", 4),
        (f"{TTFT}_count", None, 4),
        (f"{TTFT}_sum", None, 10.05),
    ]
    assert merged["vllm:iteration_tokens_total"].type == "histogram"
    assert values(merged["vllm:iteration_tokens_total"])["vllm:iteration_tokens_total_count", ()] == 4


def test_the_latest_exemplar_of_a_bucket_stays(one: _Process, two: _Process) -> None:
    """And a page is the same whether its processes speak OpenMetrics or not."""
    for process, name in ((one, "first"), (two, "second")):
        process.ttft.labels("tiny").observe(0.5, {"response_id": name})
        process.tokens.labels("tiny").inc(2)
        process.running.labels("0").set(3)
    one.ttft.labels("tiny").observe(5, {"response_id": "slow"})
    texts = {"ingress-a": one.open_metrics, "ingress-b": two.open_metrics}
    page = merge_expositions(texts, open_metrics=True)
    families = {family.name: family for family in open_metrics_families(page)}
    found = {
        sample.labels["le"]: sample.exemplar and sample.exemplar.labels
        for sample in families[TTFT].samples
        if sample.name.endswith("_bucket")
    }
    assert found == {"0.1": None, "1.0": {"response_id": "second"}, "+Inf": {"response_id": "slow"}}
    assert read(merge_expositions(texts)) == read(merge_expositions({"ingress-a": one.text, "ingress-b": two.text}))
    assert merge_expositions({"again": page}, open_metrics=True) == page


def test_gauges_get_a_label_only_where_they_collide(one: _Process, two: _Process) -> None:
    one.running.labels("0").set(1)
    two.running.labels("0").set(2)
    two.running.labels("1").set(3)
    family = read(merge_expositions({"worker-0": one.text, "worker-1": two.text}))["vllm:num_requests_running"]
    name = "vllm:num_requests_running"
    assert values(family) == {
        (name, (("engine", "0"), ("piece_host", "worker-0"))): 1,
        (name, (("engine", "0"), ("piece_host", "worker-1"))): 2,
        (name, (("engine", "1"),)): 3,
    }


def test_one_process_comes_back_as_it_is(one: _Process) -> None:
    one.tokens.labels('a "quoted"\\ name\nin two lines').inc(2.5)
    one.ttft.labels("tiny").observe(0.2)
    one.running.labels("0").set(float("inf"))
    merged = read(merge_expositions({"control": one.text}))
    original = {name: family for name, family in read(one.text).items() if not name.endswith("_created")}
    assert merged == original
    assert read(merge_expositions({"again": merge_expositions({"control": one.text})})) == original


def test_what_is_left_out(one: _Process) -> None:
    Gauge("process_resident_memory_bytes", "Memory.", registry=one.registry).set(1)
    Gauge("python_info", "Python.", registry=one.registry).set(1)
    Gauge("farsight:log_created", "No beginning of a sum.", registry=one.registry).set(1)
    one.tokens.labels("tiny").inc()
    merged = read(merge_expositions({"control": one.text}))
    hidden = ("python_", "process_")
    assert not [name for name in merged if name.startswith(hidden)]
    assert [name for name in merged if name.endswith("_created")] == ["farsight:log_created"]


def test_a_text_that_cannot_be_read_is_named(one: _Process) -> None:
    with pytest.raises(ValueError, match="the metrics of worker-7 cannot be read"):
        merge_expositions({"control": one.text, "worker-7": 'x{y="1} nonsense'})


def test_two_types_of_one_name_are_refused(one: _Process) -> None:
    other = "# TYPE vllm:num_requests_running histogram\n"
    with pytest.raises(ValueError, match=r"worker-7 have vllm:num_requests_running as histogram, others as gauge"):
        merge_expositions({"control": one.text, "worker-7": other})
