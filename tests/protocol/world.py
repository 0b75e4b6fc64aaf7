"""One world of a seed: components that live and die, clients that come and go, and what must hold all the while."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.messages.kv import BlockName
from farsight.core.messages.plans import Slot, StepReport
from farsight.core.messages.requests import Refusal
from farsight.core.messages.tokens import TokenDelta
from farsight.kvcache import BatchLimits, PlanExecutor, StepBatch
from farsight.kvcache.tiers import TierLimits
from farsight.policies.compose import (
    build_batch_runner,
    build_batch_scheduler,
    build_offload,
    build_scheduler,
)
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.interfaces import ReplicaPolicies, ScheduledRequest
from farsight.policies.kv.split_batch import SplitBatch
from farsight.policies.moves.recall import RecallRule
from farsight.policies.order.offload_orders import OffloadDecider
from farsight.policies.placement.base import PLACEMENTS
from farsight.policies.presets import PRESETS
from farsight.policies.replica.events import CostLearned
from farsight.policies.replica.planner import ReplicaPlans
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.policies.settings import BatchSettings, MlfqRules, PolicySettings
from tests.protocol.ingress import IngressComponent
from tests.protocol.model import BLOCK, Client, make_client, text_of
from tests.protocol.network import Clock, Faults, Network
from tests.protocol.schedulers import RouterComponent, SchedulerComponent
from tests.protocol.worker import STEP_S, ManagerComponent, WorkerComponent

BUSY_S = 1.5
"""Requests come so long."""

AGREE_S = 20.0
"""Virtual, from the last fault: then the Router knows what workers cache, whatever was lost."""

LOOK_S = 0.25
"""How often it is asked whether all is over."""

MAX_DRAIN_S = 60.0
"""Virtual, from the last fault: many times what any of these worlds needs, with an ingress that died (10 s) or not."""

PATIENT_S = 20.0
"""Virtual, from the last fault: no component waits longer for a client that does not read."""

MAX_OUTPUT = 16

RECALL_AFTER_S = 0.05
"""Ten times sooner than on a server: requests of these worlds are short."""

PARTS = [("fcfs", "recompute-newest"), ("fcfs", "swap-newest"), ("hrrn", "swap-newest")]
PARTS += [("skip-join-mlfq", f"enst-{kind}") for kind in ("proactive", "reactive", "defer", "recompute")]
PARTS += [("gittins", "cheapest-victim"), ("gittins", "recompute-newest"), ("hit-groups", "recompute-newest")]
"""(order, KV policy)"""

BATCH_PRESETS = [name for name, preset in PRESETS.items() if preset.mode == "batch"]

ADMISSIONS = ["watermark", "conservative", "past-future"]


class _ShortPlans(ReplicaPlans):
    """Grants a few tokens at a time, as an order with time slices does; FCFS grants everything at once."""

    quantum = 4

    def _slot(self, scheduled: ScheduledRequest, decode_s: float | None, *, standby: bool) -> Slot:
        slot = super()._slot(scheduled, decode_s, standby=standby)
        prefill_to = max(scheduled.computed_len, scheduled.host_len) + 2 * self.quantum
        length_to = scheduled.known_len + self.quantum
        return replace(slot, prefill_to=min(slot.prefill_to, prefill_to), length_to=min(slot.length_to, length_to))


class ShortGrants(ReplicaScheduler):
    """Renews its short grants after every report."""

    def __init__(self, policies: ReplicaPolicies, limits: SchedulerLimits) -> None:
        super().__init__(policies, limits)
        self._planner = _ShortPlans(policies.order, limits.budget, limits.grant_lead_s, self._mirror, self.places)

    def _book_report(self, report: StepReport, now: float) -> Iterator[Any]:
        yield from super()._book_report(report, now)
        self._mirror.stale |= bool(self._mirror.admitted)


class World:
    """All components on one clock, built from a seed.

    Args:
        recording: Whether the story is written down.
    """

    def __init__(self, seed: int, *, recording: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        self.clients: dict[str, Client] = {}
        self.counts: Counter[str] = Counter()
        self.story: list[tuple[float, str, str, tuple[Any, ...]]] = []
        self.calm = True  # no component dies, hangs or breaks a connection
        self._recording = recording
        self._lives: Counter[str] = Counter()
        self.faults_until = 2 * BUSY_S
        self.offload_rng = random.Random(seed + 2)
        self._draw(rng)
        self.copy_rng = random.Random(seed)
        self.ingress_rng = random.Random(seed + 3)
        self.tier_rng = random.Random(seed + 4)
        self.recall_rng = random.Random(seed + 5)
        self.disk: dict[BlockName, list[int]] = {}  # of all workers, whatever dies
        host_blocks = self.tier_rng.choice([0, self.tier_rng.randint(1, 8)])
        limits = TierLimits(host_blocks, self.tier_rng.randint(4, 40))
        self.tier_limits = limits if self.tier_rng.random() < 0.5 else None
        self.num_host_blocks = self.copy_rng.choice([0, self.copy_rng.randint(1, 16)])
        policy_rng = random.Random(seed + 1)
        self.parts = policy_rng.choice(PARTS)
        self.admission = policy_rng.choice(ADMISSIONS)
        self.in_batches = policy_rng.random() < 0.25
        self.batch_preset = policy_rng.choice(BATCH_PRESETS)
        self.batch_settings = self._draw_batches(policy_rng)
        self.forecast_wait_s = policy_rng.choice([0.0, 0.05])
        self.is_static = self.in_batches and policy_rng.random() < 0.5
        if policy_rng.random() < 0.4:
            self.placement = "e2"
        self._draw_recalls()
        self.network = Network(self.clock, rng, self.faults, thorough=rng.random() < 0.1)
        self._build()

    def _draw_recalls(self) -> None:
        self.recalls = not self.in_batches and self.recall_rng.random() < 0.5
        if self.recalls:  # what waits on one replica, not named by a plan, while there is room on another
            num_seqs = self.recall_rng.choice([1, 1, self.limits.max_num_seqs])
            standby_slots = self.recall_rng.choice([0, 0, self.limits.standby_slots])
            self.limits = replace(self.limits, max_num_seqs=num_seqs, standby_slots=standby_slots)
            self.num_blocks.setdefault("1", self.num_blocks["0"])

    def _draw(self, rng: random.Random) -> None:
        """What kind of world this is."""
        loss = rng.choice([(0.0, 0.0), (0.05, 0.1), (0.3, 0.2)])
        self.faults = Faults(*loss, rng.choice([0.001, 0.02, 0.1]), rng.choice([0.001, 0.02, 0.1]))
        deadline_s = self.offload_rng.choice([0.0, 0.004, 0.05, 0.5])
        self.limits = SchedulerLimits(rng.randint(1, 5), rng.randint(0, 3), offload_deadline_s=deadline_s)
        self.batch_limits = BatchLimits(self.limits.max_num_seqs, rng.choice([6, 12, 24]))
        self.watermark = rng.choice([0.6, 0.8, 1.0])
        self.placement = rng.choice(["round-robin", "least-work"])
        self.short_grants = rng.random() < 0.25
        num_blocks, mixed = rng.randint(3, 16), rng.random() < 0.2
        self.num_blocks = {str(i): rng.randint(3, 16) if mixed else num_blocks for i in range(rng.randint(1, 3))}
        self.max_len = min(self.num_blocks.values()) * BLOCK  # the ingress admits what fits everywhere
        self.ingress_names = ["ingress-a", "ingress-b"][: rng.randint(1, 2)]
        self._break_rate = rng.choice([0, 0, 0, 0.01])

    def _draw_batches(self, rng: random.Random) -> BatchSettings:
        return BatchSettings(
            memory_tokens=math.inf,
            serving_time_s=lambda size, prompt_len, output_len: STEP_S * output_len,
            batch=BatchConfig(
                wma_threshold=rng.choice([0.0, 100.0, math.inf]),
                num_bins=rng.randint(1, 3),
                max_wait_s=rng.choice([0.0, 0.2]),
                batch_size=rng.choice([0, 2, 4]),
            ),
            max_num_seqs=self.limits.max_num_seqs,
        )

    def _build(self) -> None:
        self.tell("world", "%s, %s, blocks %s, %s", self.faults, self.limits, self.num_blocks, self.batch_limits)
        for name in ("router", *self._replica_components()):
            self.start(name)
        self.follows_all = self.rng.random() < 0.5
        known = self.num_blocks if self.follows_all else {}
        for name in self.ingress_names:
            self.network.living[name] = IngressComponent(self, name, known)

    def _replica_components(self) -> list[str]:
        kinds = ("scheduler", "worker", "manager")
        return [f"{kind}-{replica}" for replica in self.num_blocks for kind in kinds]

    def start(self, name: str) -> None:
        """Begins a life of anything but an ingress."""
        kind, _, replica = name.partition("-")
        self._lives[name] += 1
        self.network.living[name] = getattr(self, f"_make_{kind}")(replica)

    def _make_router(self, _: str) -> RouterComponent:
        if self.in_batches:
            return RouterComponent(
                self, build_batch_scheduler(self.batch_preset, self.batch_settings, self.forecast_wait_s)
            )
        placement = PLACEMENTS.find(self.placement).build(PolicySettings(block_size=BLOCK))
        rule = RecallRule(self.limits.max_num_seqs, RECALL_AFTER_S) if self.recalls else None
        return RouterComponent(self, GlobalScheduler(placement, rule))

    def _make_scheduler(self, replica: str) -> SchedulerComponent:
        if self.in_batches:
            runner = build_batch_runner(self.limits.max_num_seqs, self.limits.offload_deadline_s)
            return SchedulerComponent(self, replica, runner)
        order, kv = self.parts
        settings = self._settings()
        machine = build_scheduler("fcfs", self.limits, settings, order=order, admission=self.admission, kv=kv)
        if self.short_grants:
            parts = ReplicaPolicies(machine.order, machine.admission, machine.selector.kv)
            machine = ShortGrants(parts, self.limits)
        machine.handle(CostLearned(StepCost(STEP_S, 0.0, 0.0, 0.0)), self.clock.now)
        return SchedulerComponent(self, replica, machine)

    def _settings(self) -> PolicySettings:
        return PolicySettings(
            SchedulerConfig(watermark=self.watermark, quantum_s=STEP_S, starve_limit_s=1.0, max_gap_ms=0.0),
            mlfq=MlfqRules(follows_cost=False),
        )

    def _make_manager(self, replica: str) -> ManagerComponent:
        order, kv = self.parts
        decider: OffloadDecider | None = OffloadDecider(SplitBatch(), None)
        if not self.in_batches:
            decider = build_offload("fcfs", self.limits.max_num_seqs, self._settings(), order=order, kv=kv)
        assert decider is not None
        return ManagerComponent(self, replica, decider)

    def _make_worker(self, replica: str) -> WorkerComponent:
        name = f"worker-{replica}"
        incarnation = f"{name}.{self._lives[name]}"
        return WorkerComponent(self, name, incarnation, self.num_blocks[replica], self.batch_limits)

    def kill(self, name: str, restart_after_s: float) -> None:
        """Ends a life; the supervisor begins another one in a while, but not of an ingress."""
        component = self.network.living.get(name)
        if component is None:
            return
        self.count(f"kills of a {name.partition('-')[0]}", True)
        self.tell(name, "killed")
        self.network.kill(name)
        if isinstance(component, IngressComponent):
            for client in self.clients.values():
                client.gone |= client.request.ingress_id == name
            return
        self.faults_until = max(self.faults_until, self.clock.now + restart_after_s)
        self.clock.after(restart_after_s, lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        self.tell(name, "restarted")
        self.start(name)

    def hang(self, name: str, duration_s: float) -> None:
        """A component does nothing for a while."""
        component = self.network.living.get(name)
        if component is not None:
            self.tell(name, "hangs for %.2f s", duration_s)
            component.life.hangs_until = self.clock.now + duration_s
            self.faults_until = max(self.faults_until, component.life.hangs_until)

    def disturb_recall(self, replica: str) -> None:
        """Now and then something dies while a replica is asked for what waits there, or what came back is placed."""
        rng = self.recall_rng
        if not self.calm and rng.random() < 0.1 and self.clock.now < 2 * BUSY_S:
            others = [f"{kind}-{other}" for kind in ("scheduler", "worker") for other in self.num_blocks]
            name = rng.choice(["router", f"scheduler-{replica}", f"worker-{replica}", *others])
            away_s = rng.uniform(0.05, 1.0)
            self.clock.after(rng.uniform(0, 0.1), lambda: self.kill(name, away_s))

    def drain(self, replica: str, duration_s: float) -> None:
        """A replica is given up for a while, if there is a Router to hear it and another replica."""
        self.tell("supervisor", "drains replica %s for %.2f s", replica, duration_s)
        self.faults_until = max(self.faults_until, self.clock.now + duration_s)
        self._say_drain(replica, ends=False)
        self.clock.after(duration_s, lambda: self._say_drain(replica, ends=True))

    def _say_drain(self, replica: str, *, ends: bool) -> None:
        router = self.network.living.get("router")
        if router is not None:
            router.life.run(lambda: router.drain(replica, ends=ends))

    def check_one_worker(self, name: str, executor: PlanExecutor) -> None:
        """An attempt is on one worker at any instant, wherever its request was before."""
        own = {(each.request_id, each.attempt) for each in executor.sequences.values()}
        for other, component in self.network.living.items():
            if isinstance(component, WorkerComponent) and other != name:
                held = {(each.request_id, each.attempt) for each in component.executor.sequences.values()}
                assert not own & held, f"{own & held} are on {name} and on {other}"

    def break_connection(self, name: str, replica: str) -> None:
        """A component takes a living worker for dead."""
        match self.network.living.get(name):
            case IngressComponent() as ingress:
                ingress.life.run(lambda: ingress.lose_worker(replica))
            case SchedulerComponent() as scheduler:
                scheduler.life.run(scheduler.lose_worker)

    def open(self, ingress_name: str) -> None:
        """A client comes."""
        ingress, rng = self.network.living.get(ingress_name), self.rng
        if ingress is None:
            return
        request_id = f"{ingress_name}-{len(self.clients)}"
        fits = rng.random() > 0.03
        prompt_len = rng.randint(1, max(1, self.max_len // 3)) if fits else max(self.num_blocks.values()) * BLOCK
        output_len = rng.randint(1, min(MAX_OUTPUT, self.max_len - prompt_len)) if fits else 1
        stops_after = rng.randint(1, output_len) if rng.random() < 0.3 else None
        client = make_client(request_id, ingress_name, prompt_len, output_len, stops_after)
        client.fits = fits
        self.clients[request_id] = client
        self.tell("client", "%s comes: %s + %s tokens, stops after %s", request_id, prompt_len, output_len, stops_after)
        ingress.life.run(lambda: ingress.open(client.request))

    def leave(self) -> None:
        """A client goes."""
        waiting = [request_id for request_id, client in self.clients.items() if client.waits]
        if not waiting:
            return
        request_id = self.rng.choice(waiting)
        client = self.clients[request_id]
        client.gone = True
        self.tell("client", "%s leaves", request_id)
        ingress = self.network.living[client.request.ingress_id]
        ingress.life.run(lambda: ingress.close(request_id))

    def slow_down(self, duration_s: float) -> None:
        """A client stops reading for a while."""
        waiting = [client for client in self.clients.values() if client.waits]
        if not waiting:
            return
        client = self.rng.choice(waiting)
        client.slow = True
        self.tell("client", "%s does not read for %.2f s", client.request.request_id, duration_s)
        disturbed_until = self.faults_until
        self.faults_until = max(self.faults_until, self.clock.now + duration_s)
        self.clock.after(duration_s, lambda: self._read_again(client, disturbed_until))

    def _read_again(self, client: Client, disturbed_until: float) -> None:
        client.slow = False
        if self.clock.now < disturbed_until + PATIENT_S:
            return
        self.count("others outlived a slow client", client.waits)
        waiting = [other for other in self.clients.values() if other.waits and not other.slow and other is not client]
        starved = [other.request.request_id for other in waiting]
        assert not starved, f"{starved} wait for a client that does not read"

    def slow_clients(self, ingress_name: str) -> tuple[str, ...]:
        clients = self.clients.items()
        return tuple(rid for rid, client in clients if client.slow and client.request.ingress_id == ingress_name)

    def patience_s(self, *, busy: bool) -> float:
        """How long an unanswered poll is waited for."""
        return 0.25 if busy and self.faults.drop else 1.2

    def breaks_step(self, batch: StepBatch) -> bool:
        """Whether this step raises; its requests then end with an error."""
        if not self._break_rate or self.rng.random() >= self._break_rate:
            return False
        for item in batch.items + batch.padding.items:
            self.clients[item.request_id].may_fail = True
        return True

    def show(self, delta: TokenDelta) -> None:
        """A client gets something; it must be the next thing that is due to it."""
        name = delta.request_id
        client = self.clients[name]
        if client.gone:
            return
        assert client.end is None, f"{name}: a reply after its end ({client.end})"
        assert delta.start == len(client.tokens), f"{name}: token {delta.start} after {len(client.tokens)} tokens"
        for token in delta.token_ids:
            due = client.expected(len(client.tokens))
            assert token == due, f"{name}: token {token} instead of {due} at {len(client.tokens)}"
            client.tokens.append(token)
        client.text += delta.text
        if delta.finish_reason is not None:
            self._end(client, delta.finish_reason)

    def _end(self, client: Client, reason: str) -> None:
        name = client.request.request_id
        client.end = reason
        self.tell("client", "%s ends: %s after %s tokens", name, reason, len(client.tokens))
        if reason == "error" and client.may_fail:
            return
        assert reason == client.expected_end, f"{name}: ended by {reason} instead of {client.expected_end}"
        due = client.request.sampling.max_new_tokens if client.stops_after is None else client.stops_after
        assert len(client.tokens) == due, f"{name}: ended after {len(client.tokens)} of {due} tokens"
        assert client.text == text_of(client.tokens), f"{name}: text {client.text!r} for {client.tokens}"

    def refuse(self, refusal: Refusal) -> None:
        """A client is told that its request will never run."""
        client = self.clients[refusal.request_id]
        if client.gone:
            return
        self.tell("client", "%s refused: %s", refusal.request_id, refusal.message)
        assert client.end is None, f"{refusal.request_id}: refused after its end ({client.end})"
        assert not client.fits, f"{refusal.request_id}: refused, but it fits"
        client.end = "refused"
        self.count("refusals", True)

    def give_up(self, request_id: str) -> None:
        """A client is told that its request was lost too often; no world is that bad."""
        assert self.clients[request_id].gone, f"{request_id}: given up"

    def run(self) -> None:
        """From the first request until nothing is left of the last."""
        while not self._over():
            until = self.clock.now + LOOK_S
            while self.clock.now < until:
                self.clock.step()
            assert self.clock.now < self.faults_until + MAX_DRAIN_S, f"it does not drain: {self._leftovers()}"
        self._check_caches()
        self.counts["virtual seconds"] += round(self.clock.now)
        self.counts["slowest drain"] = round(self.clock.now - self.faults_until)
        for component in self.network.living.values():
            if isinstance(component, IngressComponent):
                self.counts["resumes"] += component.ledger.num_resumed
            elif isinstance(component, WorkerComponent):
                self.counts["steps beyond grants"] += component.device.num_beyond_grants
                self.counts["starts from the cache"] += component.device.num_cached_starts
        assert not self._nothing_lost or not self.counts["resumes"], "something was resumed, but nothing was lost"

    def _check_caches(self) -> None:
        """In the end the prefix tree says of every worker what that caches."""
        if self.in_batches or self.placement != "e2":
            return
        drained_at = self.clock.now
        while self.clock.now < max(self.faults_until, drained_at) + AGREE_S and self._disagreement():
            self.clock.step()
        assert not self._disagreement(), self._disagreement()
        self.count("prefix trees that agree", True)

    def _disagreement(self) -> str:
        router = self.network.living.get("router")
        if router is None:
            return "there is no Router"
        prefixes = router.machine._placement.prefixes
        for replica in self.num_blocks:
            slot = prefixes.slots.find(replica)
            if slot is None or f"worker-{replica}" not in self.network.living:
                return f"replica {replica} is not up"
            cached = set(self.network.living[f"worker-{replica}"].executor.blocks._cached)
            believed = {name for name in prefixes.tree._places if prefixes.tree.caches(name, slot)}
            if cached != believed:
                return f"replica {replica} caches {len(cached)} blocks; {len(cached ^ believed)} are not as believed"
        return ""

    @property
    def _nothing_lost(self) -> bool:
        """Whether no request had a reason to be resumed.

        One has if it ends before its ingress knows where it runs: it cannot be told then that its tokens are on their
        way. So calls must be quick and every worker followed from the start.
        """
        quick = self.faults.call_delay_s < STEP_S / 4 and self.follows_all
        if self.in_batches:
            return False  # what waits is placed unbeknown to its ingress, and batches that break come back
        return self.calm and quick

    def _over(self) -> bool:
        return self.clock.now >= self.faults_until and not self._leftovers()

    def _leftovers(self) -> list[str]:
        """Whatever is not as it was in the beginning."""
        left = [f"{rid} waits, has {len(client.tokens)} tokens" for rid, client in self.clients.items() if client.waits]
        for name, component in self.network.living.items():
            num = 0
            match component:
                case IngressComponent():
                    num = len(component.ledger) + component.ledger.has_outgoing
                case RouterComponent():
                    num = component.machine.num_in_flight
                case SchedulerComponent():
                    num = component.machine.num_waiting + component.machine.num_admitted
                case WorkerComponent():
                    blocks = component.executor.blocks
                    num = component.executor.num_held + blocks.num_blocks - blocks.num_free
                    host = component.executor.host
                    num += 0 if host is None else host.num_blocks - host.num_free
            if num:
                left.append(f"{name} holds {num}")
        return left

    def count(self, what: str, happened: bool) -> None:
        if happened:
            self.counts[what] += 1

    def tell(self, who: str, what: str, *details: Any) -> None:
        if self._recording:
            self.story.append((self.clock.now, who, what, details))

    def tale(self) -> str:
        """The story, to be read."""
        return "\n".join(f"{at:8.3f} {who:<12} {what % details}" for at, who, what, details in self.story)
