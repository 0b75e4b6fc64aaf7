"""What is still to be done on each replica, kept request by request: what faster accounts are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from farsight.core.costs import StepCost
from farsight.policies.lengths.law import MIN_REMAINING


@dataclass
class PlainRequest:
    """One on the replica with index ``slot``."""

    slot: int
    prompt_len: int
    own_len: int
    length: float
    prefill_s: float
    produced: float = 0.0
    started: bool = False

    @property
    def left(self) -> float:
        left = self.length - self.produced
        return left if left > 0 else max(self.produced / 4, MIN_REMAINING)


@dataclass
class PlainWork:
    """Tokens are added up event by event, and every answer is worked out from all requests."""

    cost: StepCost
    now: float = 0.0
    requests: dict[str, PlainRequest] = field(default_factory=dict)

    def on(self, slot: int) -> list[PlainRequest]:
        return [each for each in self.requests.values() if each.slot == slot]

    def step_s(self, slot: int) -> float:
        running = [each for each in self.on(slot) if each.started]
        return self.cost.step_s(0, max(1, len(running)), sum(each.prompt_len for each in running))

    def advance(self, now: float) -> None:
        step_s = {slot: self.step_s(slot) for slot in {each.slot for each in self.requests.values()}}
        for each in self.requests.values():
            each.produced += (now - self.now) / step_s[each.slot] if each.started else 0.0
        self.now = now

    def meetings(self, length: float, num_replicas: int) -> list[tuple[float, float]]:
        found = []
        for slot in range(num_replicas):
            shared = [(min(each.left, length), each.prompt_len) for each in self.on(slot)]
            found.append((sum(steps for steps, _ in shared), sum(steps * context for steps, context in shared)))
        return found

    def memory_wait_s(self, slot: int, own_len: int, length: float, capacity: int) -> float:
        """The batch run forward to each end in turn: who is still there has grown by as many tokens."""
        others = sorted(self.on(slot), key=lambda each: each.left)
        entries = [(int(each.own_len + each.produced), math.ceil(each.left)) for each in others]
        entries.append((own_len, math.ceil(length)))
        peak = max(sum(base + end for base, left in entries if left >= end) for _, end in entries)
        excess, wait = float(peak - capacity), 0.0
        for each in others:
            if excess > 0:
                excess -= each.own_len + each.produced + math.ceil(each.left)
                wait = math.ceil(each.left) * self.step_s(slot)
        return wait
