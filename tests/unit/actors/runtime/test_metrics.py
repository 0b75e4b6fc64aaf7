"""The names, labels and buckets that scrapers of vLLM know, and what each call writes."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from farsight.actors.runtime.metrics import ComponentRestarts, EngineMetrics, RefusedMessages, RequestMetrics
from farsight.core.messages.kv import KVTraffic, KVUsage

ENGINE = {"model_name": "tiny", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def engine(registry: CollectorRegistry) -> EngineMetrics:
    return EngineMetrics(registry, "tiny", "0")


@pytest.fixture
def requests(registry: CollectorRegistry) -> RequestMetrics:
    return RequestMetrics(registry, "tiny")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {**ENGINE, **labels})


def bounds(registry: CollectorRegistry, name: str) -> list[str]:
    """The upper bounds of a histogram, without infinity, as a scraper reads them."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    (family,) = (family for family in families if family.name == name)
    return [sample.labels["le"] for sample in family.samples if "le" in sample.labels][:-1]


def test_engine_gauges(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    engine.set_queues(running=3, waiting=5)
    engine.set_kv(KVUsage(8, 6, 1, 0, num_host_blocks=4, free_host_blocks=1, flying_blocks=2))
    engine.set_cache_config(block_size=16, num_gpu_blocks=100)
    assert value(registry, "vllm:num_requests_running") == 3
    assert value(registry, "vllm:num_requests_waiting") == 5
    assert value(registry, "vllm:kv_cache_usage_perc") == 0.25
    assert value(registry, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_where_kv_is_and_what_has_moved(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    engine.set_kv(KVUsage(8, 6, 1, 0, num_host_blocks=4, free_host_blocks=1, flying_blocks=2))
    used = {place: value(registry, "farsight:kv_blocks", place=place) for place in ("device", "host", "in_flight")}
    assert used == {"device": 2, "host": 3, "in_flight": 2}
    pools = {place: value(registry, "farsight:kv_pool_blocks", place=place) for place in ("device", "host")}
    assert pools == {"device": 8, "host": 4}
    engine.kv_moved(KVTraffic(2, 1, 200, 100, 3, 40))
    engine.kv_moved(KVTraffic(1, 0, 50, 0, 0, 2))
    assert value(registry, "farsight:kv_moves_total", way="offload") == 3
    assert value(registry, "farsight:kv_moves_total", way="upload") == 1
    assert value(registry, "farsight:kv_moved_bytes_total", way="offload") == 250
    assert value(registry, "farsight:kv_moved_bytes_total", way="upload") == 100
    assert value(registry, "farsight:kv_refused_offloads_total") == 3
    assert value(registry, "farsight:recomputed_tokens_total") == 42
    engine.remove()
    assert value(registry, "farsight:kv_blocks", place="host") is None


def test_engine_counts(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    engine.preempted(0)
    assert value(registry, "vllm:num_preemptions_total") == 0
    engine.preempted()
    engine.preempted(2)
    engine.step(8)
    engine.step(9)
    engine.scheduled(0.25)
    engine.scheduled(0.5)
    engine.drafted(0, 0, 0)
    assert value(registry, "vllm:spec_decode_num_drafts_total") == 0
    engine.drafted(2, 9, 5)
    assert value(registry, "vllm:spec_decode_num_drafts_total") == 2
    assert value(registry, "vllm:spec_decode_num_draft_tokens_total") == 9
    assert value(registry, "vllm:spec_decode_num_accepted_tokens_total") == 5
    assert value(registry, "farsight:scheduling_cpu_seconds_total") == 0.75
    assert value(registry, "vllm:num_preemptions_total") == 3
    assert value(registry, "vllm:iteration_tokens_total_sum") == 17
    assert value(registry, "vllm:iteration_tokens_total_bucket", le="8.0") == 1
    assert [float(bound) for bound in bounds(registry, "vllm:iteration_tokens_total")] == [
        *(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    ]


def test_a_process_shows_only_what_it_writes(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    engine.step(1)
    assert value(registry, "vllm:num_requests_running") is None
    assert value(registry, "vllm:num_preemptions_total") is None


def test_a_new_life_has_one_cache_config(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    engine.set_cache_config(16, 100)
    EngineMetrics(registry, "tiny", "0").set_cache_config(16, 80)
    assert value(registry, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") is None
    assert value(registry, "vllm:cache_config_info", block_size="16", num_gpu_blocks="80") == 1


def test_replicas_share_a_registry_and_leave_it(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    other = EngineMetrics(registry, "tiny", "1")
    engine.set_queues(1, 2)
    other.set_queues(3, 4)
    assert value(registry, "vllm:num_requests_running") == 1
    assert value(registry, "vllm:num_requests_running", engine="1") == 3
    other.remove()
    assert value(registry, "vllm:num_requests_running") == 1
    assert value(registry, "vllm:num_requests_running", engine="1") is None


def test_a_request_from_its_first_token_to_its_end(registry: CollectorRegistry, requests: RequestMetrics) -> None:
    requests.prompt(10, outside=False)
    requests.first_token(0.05)
    requests.tokens(0.02, 1)
    requests.tokens(0.12, 4)
    requests.finished("stop", jct_s=0.9, prompt_len=10, output_len=6, max_new_tokens=32, ttft_s=0.05)
    assert value(registry, "vllm:request_decode_time_seconds_sum") == pytest.approx(0.85)
    assert value(registry, "vllm:time_to_first_token_seconds_sum") == 0.05
    assert value(registry, "vllm:inter_token_latency_seconds_count") == 5
    assert value(registry, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.14)
    assert value(registry, "vllm:inter_token_latency_seconds_bucket", le="0.05") == 5
    assert value(registry, "vllm:e2e_request_latency_seconds_sum") == 0.9
    assert value(registry, "vllm:request_prompt_tokens_sum") == 10
    assert value(registry, "vllm:request_generation_tokens_sum") == 6
    assert value(registry, "vllm:request_params_max_tokens_sum") == 32
    assert value(registry, "vllm:prompt_tokens_total") == 10
    assert value(registry, "vllm:generation_tokens_total") == 6
    assert value(registry, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(registry, "vllm:request_success_total", finished_reason="error") == 0


def test_clients_that_leave_are_counted_by_whether_they_had_a_token(
    registry: CollectorRegistry, requests: RequestMetrics
) -> None:
    def abandoned(when: str) -> float | None:
        return value(registry, "farsight:abandoned_requests_total", when=when)

    assert (abandoned("before_first_token"), abandoned("after_first_token")) == (0, 0)
    requests.finished("abort", 200.0, 10, 0, 32)
    requests.finished("abort", 3.0, 10, 2, 32, ttft_s=1.0)
    requests.finished("stop", 3.0, 10, 2, 32, ttft_s=1.0)
    requests.finished("abort", 400.0, 10, 0, 32)
    assert (abandoned("before_first_token"), abandoned("after_first_token")) == (2, 1)


def test_rejections(registry: CollectorRegistry, requests: RequestMetrics) -> None:
    requests.rejected("max_num_queued_reqs")
    assert value(registry, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
    with pytest.raises(KeyError):
        requests.finished("bored", 0.0, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("time_to_first_token", ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"),
        ("inter_token_latency", ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"),
        ("e2e_request_latency", ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"),
    ],
)
@pytest.mark.usefixtures("requests")
def test_the_buckets_are_those_of_vllm(registry: CollectorRegistry, name: str, expected: str) -> None:
    shown = [float(bound) for bound in bounds(registry, f"vllm:{name}_seconds")]
    assert shown == [float(bound) for bound in expected.split()]


def test_each_series_has_one_owner(engine: EngineMetrics) -> None:
    """Every counter and histogram is either the engine's or the ingress's."""
    ingress = CollectorRegistry()
    RequestMetrics(ingress, "tiny")
    engines = CollectorRegistry()
    EngineMetrics(engines, "tiny", "0")
    assert not {family.name for family in ingress.collect()} & {family.name for family in engines.collect()}


def test_farsights_own(registry: CollectorRegistry) -> None:
    RefusedMessages(registry).count("router", "submit", "Submit.requests[3].prompt_ids")
    RefusedMessages(registry).count("router", "submit", "Submit.requests[17].prompt_ids")
    labels = {"component": "router", "piece": "router", "method": "submit", "field": "Submit.requests[].prompt_ids"}
    assert registry.get_sample_value("farsight:refused_messages_total", labels) == 2
    restarts = ComponentRestarts(registry)
    restarts.set("worker-0", 2)
    assert registry.get_sample_value("farsight:component_restarts", {"component": "worker-0"}) == 2
    restarts.remove("worker-0")
    for name, label in (("component_restarts", "component"), ("piece_restarts", "piece")):
        assert registry.get_sample_value(f"farsight:{name}", {label: "worker-0"}) is None


def test_queue_times_have_the_buckets_of_vllm(registry: CollectorRegistry, engine: EngineMetrics) -> None:
    engine.started(0.4)
    engine.started(3.0)
    assert value(registry, "vllm:request_queue_time_seconds_sum") == pytest.approx(3.4)
    assert value(registry, "vllm:request_queue_time_seconds_bucket", le="0.5") == 1
    engine.remove()
    assert value(registry, "vllm:request_queue_time_seconds_sum") is None


VLLM_DASHBOARD = {
    "vllm:e2e_request_latency_seconds",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_success",
    "vllm:request_queue_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_max_num_generation_tokens",
    "vllm:inter_token_latency_seconds",
    "vllm:kv_cache_usage_perc",
}
"""Metrics of the panels of vLLM's dashboard (examples/observability/prometheus_grafana/grafana.json at 4b5c627c)."""

NOT_HERE = {"vllm:request_prefill_time_seconds"}
"""The one series that Farsight does not have: different processes know the first step and the first token."""


def test_panels_of_vllms_own_dashboard_have_data(
    registry: CollectorRegistry, engine: EngineMetrics, requests: RequestMetrics
) -> None:
    engine.set_queues(running=1, waiting=0)
    engine.started(0.1)
    engine.set_kv(KVUsage(8, 5, 2, 0))
    families = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert families >= VLLM_DASHBOARD and not families & NOT_HERE
