"""What Farsight measures for Prometheus, under the names and buckets of vLLM where vLLM has one.

Every counter has one owner: no worker counts again what the ingress counts. A family is made once per registry,
since several components of one process may write to it.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from farsight.core.messages.kv import KVTraffic, KVUsage
from farsight.core.messages.status import Degraded
from farsight.core.series.tally import TrafficTally
from farsight.policies.external.circuit_breaker import BreakerState
from farsight.policies.external.events import FAILURE_KINDS
from farsight.policies.fleet.sessions import SessionTable

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
JCT_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
"""1, 2, 5 … 500,000. vLLM ends at the model's context; here all processes have equal buckets, which can be summed."""

STEP_TOKEN_BUCKETS = (1.0, *(float(2**power) for power in range(3, 15)))
"""1, 8, 16 … 16,384."""

BATCH_SIZE_BUCKETS = tuple(float(2**power) for power in range(9))
"""1, 2, 4 … 256."""

FINISH_REASONS = ("stop", "length", "abort", "error")

_LABELS = ("model_name", "engine")
_INDEX = re.compile(r"\[\d+\]")

_Family = TypeVar("_Family", bound=MetricWrapperBase)

_families: WeakKeyDictionary[CollectorRegistry, dict[str, MetricWrapperBase]] = WeakKeyDictionary()


def family(
    registry: CollectorRegistry, kind: type[_Family], name: str, text: str, labels: tuple[str, ...] = (), **options: Any
) -> _Family:
    """Returns the family of that name, made once for each registry: several components may share a process, and a
    process may stop a component and start another."""
    known = _families.setdefault(registry, {})
    if name not in known:
        known[name] = kind(name, text, labels, registry=registry, **options)
    return cast(_Family, known[name])


class _DegradedMetrics:
    """One series for each cause that a component of this process ever had: 1 while it holds."""

    def __init__(self, found: Callable[[], Iterable[tuple[str, Degraded]]]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        text = "1 while a component works less well than it should, by cause; /status has the reason."
        shown = GaugeMetricFamily("farsight:degraded", text, labels=("component", "cause"))
        now = time.monotonic()
        for component, degraded in self._found():
            for cause, holds in degraded.causes(now):
                shown.add_metric((component, cause), float(holds))
        yield shown


def show_degraded(registry: CollectorRegistry, found: Callable[[], Iterable[tuple[str, Degraded]]]) -> None:
    """Shows ``farsight:degraded`` among a process's metrics.

    Args:
        found: Returns the present components of the process: (name, degraded).
    """
    registry.register(cast(Any, _DegradedMetrics(found)))


_SESSION_TOKENS = ("new", "computed", "restored", "output")


class _SessionMetrics:
    """Sums over the sessions of each application; an application is what clients say, and there are few at most."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        """Makes the series again for each scrape, so that the table alone holds the sums."""
        yield GaugeMetricFamily("farsight:sessions", "Conversations that are remembered.", len(self._table))
        text = "Turns of conversations that have begun."
        turns = CounterMetricFamily("farsight:session_turns", text, labels=("application",))
        text = "Tokens of answered turns: prompts' new, computed and restored ones, and outputs."
        tokens = CounterMetricFamily("farsight:session_tokens", text, labels=("application", "kind"))
        text = "Seconds of conversations with a request in the model, and away: in tools or with people."
        seconds = CounterMetricFamily("farsight:session_seconds", text, labels=("application", "state"))
        for row in self._table.applications():
            name, counts = row.application, row.counts
            turns.add_metric((name,), counts.turns)
            for kind in _SESSION_TOKENS:
                tokens.add_metric((name, kind), getattr(counts, f"{kind}_tokens"))
            seconds.add_metric((name, "model"), counts.in_model_s)
            seconds.add_metric((name, "away"), counts.away_s)
        yield from (turns, tokens, seconds)


def show_sessions(registry: CollectorRegistry, table: SessionTable) -> None:
    """Shows the sums over conversations among a process's metrics."""
    registry.register(cast(Any, _SessionMetrics(table)))


class _ReplicaMetrics:
    """Series of one replica. A series appears with the first call that writes it, so a process shows only its own.

    Args:
        model_name: Name of the model for clients.
        engine: The replica.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": engine}
        self._families: list[MetricWrapperBase] = []

    def _of(self, kind: type[_Family], name: str, text: str, *more: str, **options: Any) -> Callable[..., _Family]:
        """Returns a function that finds the replica's series by the values of the labels ``more``."""
        found = family(self._registry, kind, name, text, (*_LABELS, *more), **options)
        self._families.append(found)
        return partial(found.labels, **self._labels)

    def remove(self) -> None:
        """Removes all series of this replica, which is not served any more: its gauges would keep their last values."""
        for each in self._families:
            each.remove_by_labels(dict(self._labels))


class EngineMetrics(_ReplicaMetrics):
    """What one replica's scheduler and worker measure, each through an object of its own."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        super().__init__(registry, model_name, engine)
        self._running = self._of(Gauge, "vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = self._of(Gauge, "vllm:num_requests_waiting", "Requests that wait to be started.")
        text = "From a request's arrival at its replica to its first step."
        self._queue_time = self._of(Histogram, "vllm:request_queue_time_seconds", text, buckets=JCT_BUCKETS_S)
        text = "Share of the KV blocks in use; 1 is all of them."
        self._kv_usage = self._of(Gauge, "vllm:kv_cache_usage_perc", text)
        sizes = "block_size", "num_gpu_blocks"
        self._cache_config = self._of(Gauge, "vllm:cache_config_info", "The KV pool; always 1.", *sizes)
        text = "KV blocks in use; in_flight: of copies under way."
        self._kv_blocks = self._of(Gauge, "farsight:kv_blocks", text, "place")
        text = "KV blocks in all, used and free; of the host 0: none."
        self._kv_pool_blocks = self._of(Gauge, "farsight:kv_pool_blocks", text, "place")
        text = "Copies of sequences' KV between device and host."
        self._kv_moves = self._of(Counter, "farsight:kv_moves", text, "way")
        self._kv_moved_bytes = self._of(Counter, "farsight:kv_moved_bytes", "What they held.", "way")
        text = "Offloads that found no room on the host."
        self._refused_offloads = self._of(Counter, "farsight:kv_refused_offloads", text)
        text = "Tokens computed again after a preemption."
        self._recomputed_tokens = self._of(Counter, "farsight:recomputed_tokens", text)
        text = "CPU time of a replica's scheduler: decisions, reports read, plans written."
        self._scheduling_cpu = self._of(Counter, "farsight:scheduling_cpu_seconds", text)
        text = "Sequences taken out of the running batch."
        self._preemptions = self._of(Counter, "vllm:num_preemptions", text)
        text = "Sequences that the price of a step lets run at once."
        self._places = self._of(Gauge, "farsight:places", text)
        text = "Requests that ended later than 99 of 100 would have in order of arrival."
        self._guard_violations = self._of(Counter, "farsight:guard_violations", text)
        text = "By how much requests ended earlier, and later, than in order of arrival on as many places."
        self._beside_arrival = self._of(Counter, "farsight:seconds_beside_arrival_order", text, "way")
        text = "Prompt tokens looked for in the prefix cache."
        self._prefix_queries = self._of(Counter, "vllm:prefix_cache_queries", text)
        self._prefix_hits = self._of(Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        text = "Times that tokens of a request were guessed."
        self._drafts = self._of(Counter, "vllm:spec_decode_num_drafts", text)
        text = "Tokens that were guessed and verified."
        self._draft_tokens = self._of(Counter, "vllm:spec_decode_num_draft_tokens", text)
        text = "Guessed tokens that were right."
        self._accepted_tokens = self._of(Counter, "vllm:spec_decode_num_accepted_tokens", text)
        text = "Tokens computed in a step."
        self._step_tokens = self._of(Histogram, "vllm:iteration_tokens_total", text, buckets=STEP_TOKEN_BUCKETS)

    def set_queues(self, running: int, waiting: int) -> None:
        """Sets the numbers of requests that run and that wait."""
        self._running().set(running)
        self._waiting().set(waiting)

    def set_places(self, num: int) -> None:
        """Sets how many sequences may run at once."""
        self._places().set(num)

    def beside_arrival_order(self, violations: int, earlier_s: float, later_s: float) -> None:
        """Adds what ended since the last call; the seconds are sums over requests."""
        self._guard_violations().inc(violations)
        for way, seconds in (("earlier", earlier_s), ("later", later_s)):
            self._beside_arrival(way=way).inc(seconds)

    def set_kv(self, usage: KVUsage) -> None:
        """Sets the KV blocks in use on device and host and in flight, and the sizes of the pools."""
        used = usage.num_blocks - usage.free_blocks
        self._kv_usage().set(used / usage.num_blocks if usage.num_blocks else 0.0)
        on_host = usage.num_host_blocks - usage.free_host_blocks
        for place, num_blocks in (("device", used), ("host", on_host), ("in_flight", usage.flying_blocks)):
            self._kv_blocks(place=place).set(num_blocks)
        for place, num_blocks in (("device", usage.num_blocks), ("host", usage.num_host_blocks)):
            self._kv_pool_blocks(place=place).set(num_blocks)

    def kv_moved(self, moved: KVTraffic) -> None:
        """Adds KV traffic since the last call; zeros at the start show the series."""
        for way, num, num_bytes in (
            ("offload", moved.offloads, moved.offloaded_bytes),
            ("upload", moved.uploads, moved.uploaded_bytes),
        ):
            self._kv_moves(way=way).inc(num)
            self._kv_moved_bytes(way=way).inc(num_bytes)
        self._refused_offloads().inc(moved.refused_offloads)
        self._recomputed_tokens().inc(moved.recomputed_tokens)

    def set_cache_config(self, block_size: int, num_gpu_blocks: int) -> None:
        """Sets the size of the KV pool, in place of that of the worker's earlier life."""
        known = _families[self._registry]["vllm:cache_config_info"]
        known.remove_by_labels(dict(self._labels))
        self._cache_config(block_size=str(block_size), num_gpu_blocks=str(num_gpu_blocks)).set(1)

    def step(self, num_tokens: int) -> None:
        """Counts one step that computed ``num_tokens``."""
        self._step_tokens().observe(num_tokens)

    def scheduled(self, cpu_s: float) -> None:
        """Adds CPU seconds of the scheduler."""
        self._scheduling_cpu().inc(cpu_s)

    def started(self, queue_s: float) -> None:
        """Records a request's first step, ``queue_s`` seconds after its arrival at the replica."""
        self._queue_time().observe(queue_s)

    def prefix_cache(self, queries: int, hits: int) -> None:
        """Adds prompt tokens looked up and found in the prefix cache; zeros at the start show the series."""
        self._prefix_queries().inc(queries)
        self._prefix_hits().inc(hits)

    def drafted(self, drafts: int, tokens: int, accepted: int) -> None:
        """Adds drafts, their tokens and the accepted tokens since the last call; zeros at the start show the series."""
        self._drafts().inc(drafts)
        self._draft_tokens().inc(tokens)
        self._accepted_tokens().inc(accepted)

    def preempted(self, n: int = 1) -> None:
        """Adds ``n`` preempted sequences; 0 at the start makes the first one visible to ``increase()``."""
        self._preemptions().inc(n)


class OffloadMetrics(_ReplicaMetrics):
    """Decisions about the KV of a replica by deciding component, and the idle target of its KVOffloadManager."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        super().__init__(registry, model_name, engine)
        text = "Scheduling points at which KV may have had to move, by the component that decided."
        self._decisions = self._of(Counter, "farsight:offload_decisions", text, "by")
        text = "Questions that the KV offload manager did not answer by the deadline."
        self._late = self._of(Counter, "farsight:late_offload_answers", text)
        text = "Orders of the KV offload manager that did not fit any more when they came."
        self._refused = self._of(Counter, "farsight:refused_offload_orders", text)
        text = "KV tokens that the KV offload manager keeps free for newcomers."
        self._idle_target = self._of(Gauge, "farsight:idle_target_tokens", text)

    def decided(self, manager: int, scheduler: int, late: int, refused: int) -> None:
        """Adds decisions of manager and Scheduler, late answers and refused orders since the last call."""
        self._decisions(by="manager").inc(manager)
        self._decisions(by="scheduler").inc(scheduler)
        self._late().inc(late)
        self._refused().inc(refused)

    def set_idle_target(self, num_tokens: int) -> None:
        self._idle_target().set(num_tokens)


class BackendMetrics(_ReplicaMetrics):
    """What is measured of a replica that is an external server, beside its queues (``EngineMetrics.set_queues``)."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        super().__init__(registry, model_name, engine)
        text = "State of another server's circuit breaker: 1 for the present one. Requests go there while it is closed."
        self._state = self._of(Gauge, "farsight:backend_state", text, "state")
        self._failures = self._of(Counter, "farsight:backend_failures", "What another server did wrong.", "kind")
        for kind in FAILURE_KINDS:
            self._failures(kind=kind)

    def set_state(self, state: BreakerState) -> None:
        for each in BreakerState:
            self._state(state=each.value).set(each is state)

    def failed(self, kind: str) -> None:
        """Counts one failure of a kind (``FAILURE_KINDS``)."""
        self._failures(kind=kind).inc()


class BatchMetrics:
    """What is measured of batches that idle workers pull; one object per registry and model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def of(kind: type[_Family], name: str, text: str, **options: Any) -> _Family:
            return family(registry, kind, name, text, ("model_name",), **options).labels(model_name)

        self._waiting = of(Gauge, "farsight:batch_queue_requests", "Requests that no worker has pulled.")
        text = "Requests of a batch when it was pulled."
        self._size = of(Histogram, "farsight:batch_size", text, buckets=BATCH_SIZE_BUCKETS)
        text = "From pull to last end of a batch."
        self._serving = of(Histogram, "farsight:batch_serving_seconds", text, buckets=JCT_BUCKETS_S)
        self._splits = of(Counter, "farsight:batch_splits", "Batches that ran out of memory and were halved.")

    def set_queue(self, num_requests: int) -> None:
        self._waiting.set(num_requests)

    def started(self, num_requests: int) -> None:
        """Records that a worker has pulled a batch of ``num_requests``."""
        self._size.observe(num_requests)

    def ended(self, serving_time_s: float) -> None:
        """Records the duration of a batch that has ended."""
        self._serving.observe(serving_time_s)

    def split(self, n: int) -> None:
        """Adds ``n`` batches that ran out of memory; 0 at the start makes the first one visible to ``increase()``."""
        self._splits.inc(n)


class RequestMetrics:
    """What one ingress process measures of its clients' requests; one object per registry and model.

    Attributes:
        tally: The same counts for the history of the service.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.tally = TrafficTally()
        # Users of vLLM expect the label; requests may move between replicas, so it is the same for all.
        labels = {"model_name": model_name, "engine": "0"}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return family(registry, Histogram, name, text, _LABELS, buckets=buckets).labels(**labels)

        def counter(name: str, text: str) -> Counter:
            return family(registry, Counter, name, text, _LABELS).labels(**labels)

        text = "From receipt of a request to its first token."
        self._ttft = histogram("vllm:time_to_first_token_seconds", text, TTFT_BUCKETS_S)
        text = "Between one token of a request and the next."
        self._itl = histogram("vllm:inter_token_latency_seconds", text, ITL_BUCKETS_S)
        text = "From receipt of a request to its end."
        self._jct = histogram("vllm:e2e_request_latency_seconds", text, JCT_BUCKETS_S)
        self._prompt_len = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._output_len = histogram("vllm:request_generation_tokens", "Output tokens of a request.", TOKEN_BUCKETS)
        text = "Output tokens that a request allowed."
        self._max_new_tokens = histogram("vllm:request_params_max_tokens", text, TOKEN_BUCKETS)
        text = "Output tokens of a choice; each counts alone."
        self._max_output_len = histogram("vllm:request_max_num_generation_tokens", text, TOKEN_BUCKETS)
        text = "From a request's first token to its end."
        self._decode = histogram("vllm:request_decode_time_seconds", text, JCT_BUCKETS_S)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests whose first token came.")
        self._generation_tokens = counter("vllm:generation_tokens", "Output tokens sent to clients.")
        more = (*_LABELS, "finished_reason")
        success = family(registry, Counter, "vllm:request_success", "Requests that ended.", more)
        # All reasons from the start: a series that begins at 1 shows no increase.
        self._ended = {reason: success.labels(**labels, finished_reason=reason) for reason in FINISH_REASONS}
        about = "Requests whose clients left before the end, before or after the first token."
        abandoned = family(registry, Counter, "farsight:abandoned_requests", about, (*_LABELS, "when"))
        self._abandoned = [abandoned.labels(**labels, when=f"{when}_first_token") for when in ("before", "after")]
        text, more = "Requests refused unstarted.", (*_LABELS, "reason")
        self._rejections = family(registry, Counter, "vllm:admission_rejections", text, more)
        self._labels = labels

    def first_token(self, ttft_s: float, n: int = 1, exemplar: dict[str, str] | None = None) -> None:
        """Records the first output of a request, of ``n`` tokens; called once per request, whatever its attempts.

        Args:
            exemplar: Labels by which the request is found again, at most 128 characters.
        """
        self._ttft.observe(ttft_s, exemplar)
        self.tally.first_token(ttft_s, n)
        self._generation_tokens.inc(n)

    def prompt(self, n: int, *, outside: bool) -> None:
        """Counts a computed prompt of ``n`` tokens; ``outside``: computed by an external server."""
        self._prompt_tokens.inc(n)
        self.tally.prompt(n, outside=outside)

    def tokens(self, gap_s: float, n: int) -> None:
        """Records ``n`` further tokens that came together, ``gap_s`` seconds after the tokens before.

        Counted as ``n`` gaps of equal length: workers send several tokens in one message when they are fast, and
        the mean must not depend on that.
        """
        for _ in range(n):
            self._itl.observe(gap_s / n)
        self.tally.tokens(gap_s, n)
        self._generation_tokens.inc(n)

    def finished(
        self,
        reason: str,
        jct_s: float,
        prompt_len: int,
        output_len: int,
        max_new_tokens: int,
        *,
        ttft_s: float | None = None,
        exemplar: dict[str, str] | None = None,
    ) -> None:
        """Records the end of a request, also of a failed or abandoned one; lengths in tokens.

        Args:
            ttft_s: Seconds to the first token; None if no token came.
            exemplar: As for ``first_token``.

        Raises:
            KeyError: ``reason`` is not one of ``FINISH_REASONS``.
        """
        self._ended[reason].inc()
        if reason == "abort":
            self._abandoned[ttft_s is not None].inc()
        self._jct.observe(jct_s, exemplar)
        self._prompt_len.observe(prompt_len)
        self._output_len.observe(output_len)
        self._max_output_len.observe(output_len)
        if ttft_s is not None:
            self._decode.observe(jct_s - ttft_s)
        self._max_new_tokens.observe(max_new_tokens)
        self.tally.finished(reason, jct_s)

    def rejected(self, reason: str) -> None:
        """Counts a request refused by a full service; vLLM: ``max_num_queued_reqs`` or ``max_num_queued_tokens``."""
        self._rejections.labels(**self._labels, reason=reason).inc()
        self.tally.rejected += 1


class QueueDelay:
    """The wait of a new request that the Router predicts; one object per registry and model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        text = "Predicted wait of a request that came now; NaN as long as that cannot be said."
        found = family(registry, Gauge, "farsight:predicted_queue_delay_seconds", text, ("model_name",))
        self._gauge = found.labels(model_name)

    def set(self, delay_s: float | None) -> None:
        self._gauge.set(math.nan if delay_s is None else delay_s)


class RefusedMessages:
    """Messages between components that were malformed, of another version or otherwise refused."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("component", "piece", "method", "field")  # `piece` is the old name of `component`, until version 0.3
        self._refused = family(registry, Counter, "farsight:refused_messages", "Messages refused unread.", labels)

    def count(self, component: str, method: str, field: str) -> None:
        """Counts a message to ``method`` that ``component`` refused because of ``field``, without its list indices."""
        self._refused.labels(component, component, method, _INDEX.sub("[]", field)).inc()


class ComponentRestarts:
    """The number of restarts of each component."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "How often a component was started again."
        self._restarts = family(registry, Gauge, "farsight:component_restarts", text, ("component",))
        old = "The old name of farsight:component_restarts, until version 0.3."
        self._alias = family(registry, Gauge, "farsight:piece_restarts", old, ("piece",))

    def set(self, component: str, restarts: int) -> None:
        """Sets the restarts of a component, as in ``ComponentStatus.restarts``."""
        self._restarts.labels(component).set(restarts)
        self._alias.labels(component).set(restarts)

    def remove(self, component: str) -> None:
        """Removes the series of a component that is not wanted any more."""
        self._restarts.remove_by_labels({"component": component})
        self._alias.remove_by_labels({"piece": component})
