"""How many requests one Router places in a second of one core: ``python -m benchmarks.router_rate``.

A real Router under a preset, in this process, and for each replica a Scheduler that only answers. Everything goes
through messages: submits of ingress replicas in batches, decoded and encoded again for the replicas; their answers; and
the news of starts, ends and prefix caches that every request causes. Prompts are as long as those of tool use (Preble,
section 5: 1,835 tokens, 85 % of them shared), their tools by a Zipf law. Every replica holds ``--in-flight`` requests
divided by the replicas, and what is more than that ends. Time is CPU time, so that others on the machine disturb it
little, less what the clock itself takes. Numbers of requests are multiples of a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from farsight.actors.runtime.component import ComponentContext
from farsight.actors.runtime.names import scheduler_name
from farsight.actors.runtime.peer import Site
from farsight.actors.scheduling.router import Router
from farsight.core.codec import decode, encode
from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.messages.fleet import ReplicaNews, ReplicaState
from farsight.core.messages.plans import (
    CachedRun,
    CacheReply,
    FinishedSequence,
    KVCacheEvent,
    StartedRequest,
    WorkerReady,
)
from farsight.core.messages.requests import Refusals, Submit
from farsight.core.request import Origin, Request, SamplingParams, SequenceStatus
from farsight.kvcache.block_manager import hash_blocks
from farsight.policies.fleet.scheduler import GlobalScheduler

BLOCK_SIZE = 32
PROMPT_LEN, SHARED, OUTPUT_LEN = 1835, 0.85, 43
NEWS_EVERY = 8
"""Placements of a replica between two of its messages: twenty a second at 160 placements."""

NO_REFUSALS = encode(Refusals(()))


class FakeScheduler:
    """Takes every request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken: deque[bytes] = deque()

    async def answer(self, method: str, data: bytes) -> Any:
        if method == "submit":
            self.taken.append(data)
            return NO_REFUSALS
        if method == "cached":
            return encode(CacheReply("w", KVCacheEvent(1, True)))
        return b""


class Replica:
    """A replica's reports: every request placed there runs at once; when it is full, it evicts the oldest blocks.

    Args:
        num_running: Requests beyond which the oldest end.
    """

    def __init__(self, scheduler: FakeScheduler, num_blocks: int, num_running: int) -> None:
        self.scheduler = scheduler
        self._num_blocks = num_blocks
        self._num_running = num_running
        self._running: deque[FinishedSequence] = deque()
        self._seq = 1
        self._cached: dict[int, None] = {}

    def news(self) -> bytes:
        started, ended, stored = [], [], []
        while self.scheduler.taken:
            for request in decode(self.scheduler.taken.popleft(), Submit).requests:
                hashes = request.prefix_hashes
                num_cached = sum(name in self._cached for name in hashes)
                for name in hashes:
                    self._cached.pop(name, None)
                self._cached.update(dict.fromkeys(reversed(hashes)))
                if num_cached < len(hashes):
                    stored.append(CachedRun(hashes[num_cached - 1] if num_cached else 0, hashes[num_cached:]))
                cached_len = min(num_cached * BLOCK_SIZE, request.prompt_len - 1)
                started.append(StartedRequest(request.request_id, 0, cached_len, 0.01))
                stopped = SequenceStatus.FINISHED_STOPPED
                self._running.append(FinishedSequence(request.request_id, 0, stopped, OUTPUT_LEN, cached_len, 1.0))
        while len(self._running) > self._num_running:
            ended.append(self._running.popleft())
        evicted = []
        while len(self._cached) > self._num_blocks:
            evicted.append(next(iter(self._cached)))
            del self._cached[evicted[-1]]
        self._seq += 1
        notice = KVCacheEvent(self._seq, False, tuple(stored), tuple(evicted))
        return encode(ReplicaNews(self.scheduler.name, "w", tuple(started), tuple(ended), (notice,)))


def requests(num: int, num_tools: int, rng: random.Random) -> Iterator[Request]:
    """Prompts of tool use, hashed as an ingress replica does."""
    shared_len = int(PROMPT_LEN * SHARED)
    tools = [tuple(rng.randrange(50_000) for _ in range(shared_len)) for _ in range(num_tools)]
    weights = [1 / (rank + 1) ** 1.1 for rank in range(num_tools)]
    for index, tool in enumerate(rng.choices(tools, weights, k=num)):
        prompt = tool + tuple(rng.randrange(50_000) for _ in range(rng.randint(1, 2 * (PROMPT_LEN - shared_len))))
        hashes = tuple(hash_blocks(prompt, BLOCK_SIZE))
        origin = Origin(f"cmpl-{index:032x}", owner=bytes(48))
        sampling = SamplingParams(256, temperature=0.7, seed=index)
        yield Request(f"ingress-{index}", 0, "ingress", prompt, sampling, origin=origin, prefix_hashes=hashes)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one run."""
    rng = random.Random(args.seed)
    schedulers = {scheduler_name(str(i)): FakeScheduler(str(i)) for i in range(args.replicas)}
    config = FarsightConfig(scheduler=SchedulerConfig(preset=args.preset))
    site = Site(config, "", "fused")
    router = Router(ComponentContext("router", site, 0, site.peers(schedulers), CollectorRegistry()))
    replicas = [Replica(each, args.blocks, args.in_flight // args.replicas) for each in schedulers.values()]
    ready = WorkerReady("w", args.blocks, BLOCK_SIZE, 32_768, False, 50_000)
    for replica in replicas:
        await router.replica_state(ReplicaState(replica.scheduler.name, ready, ()))
    for _ in range(20):  # the Router also asks what they cache
        await asyncio.sleep(0)
    clock_s = _clock_s()
    source = requests(args.warm_up + args.requests + args.decisions, args.tools, rng)
    spent_s, news_s, num_placed, decisions = 0.0, 0.0, 0, list[float]()
    gc.collect()
    gc.freeze()
    while batch := tuple(next(source, None) for _ in range(args.batch)):
        if batch[-1] is None:
            break
        data = encode(Submit(batch))  # type: ignore[arg-type]
        began_s = time.process_time()
        await router.answer("submit", data)
        submit_s = time.process_time() - began_s
        told = [replica.news() for replica in replicas if len(replica.scheduler.taken) >= args.news_every]
        began_s = time.process_time()
        for news in told:
            await router.answer("replica_news", news)
        if args.warm_up <= num_placed < args.warm_up + args.requests:
            spent_s += submit_s - clock_s
            news_s += time.process_time() - began_s - clock_s
        num_placed += len(batch)
        if num_placed == args.warm_up + args.requests:
            decisions = _timed_decisions(router)  # reading CPU clocks is slow, so not while the rate is measured
    num = args.requests
    return {
        "preset": args.preset,
        "replicas": args.replicas,
        "in_flight": router.queue,
        "batch": args.batch,
        "placements_per_s": num / (spent_s + news_s),
        "submit_us": 1e6 * spent_s / num,
        "news_us": 1e6 * news_s / num,
        "decision_p50_us": float(1e6 * np.percentile(decisions, 50)),
        "decision_p99_us": float(1e6 * np.percentile(decisions, 99)),
    }


def _clock_s() -> float:
    """CPU seconds that one reading of the clock of CPU time takes itself: up to milliseconds in a sandbox."""
    began_s = time.process_time()
    for _ in range(200):
        time.process_time()
    return (time.process_time() - began_s) / 201


def _timed_decisions(router: Router) -> list[float]:
    """Records the CPU seconds of every decision from now on."""
    machine, times = router._machine, list[float]()
    assert isinstance(machine, GlobalScheduler)
    placement = machine._placement
    choose = placement.choose

    def timed(*args: Any) -> Any:
        began_s = time.thread_time()
        choice = choose(*args)
        times.append(time.thread_time() - began_s)
        return choice

    placement.choose = timed  # type: ignore[method-assign, assignment]
    return times


def main() -> None:
    """Prints one JSON object a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="preble")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=0, help="requests that run, on all replicas together")
    parser.add_argument("--blocks", type=int, default=3840, help="of each replica's pool")
    parser.add_argument("--tools", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32, help="requests of a submit")
    parser.add_argument("--news-every", type=int, default=NEWS_EVERY)
    parser.add_argument("--warm-up", type=int, default=8_000)
    parser.add_argument("--requests", type=int, default=12_000, help="for the rate ...")
    parser.add_argument("--decisions", type=int, default=4_000, help="... and for the time of a decision, after them")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
