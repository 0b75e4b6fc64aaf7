"""Virtual time, lives of components and what happens to the messages between them.

Two kinds, harsher than Ray's one. *Calls* are actor calls: in order for each pair of lives, never lost while both
live, answered or failed. *Letters* (plans, polls and what answers them) may also be lost, doubled and overtaken.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from farsight.core.codec import decode, encode
from farsight.core.request import Request

if TYPE_CHECKING:
    from tests.protocol.world import World

DETECT_S = 0.015
"""From a death until those who speak to the dead see it; up to twice as long."""

Action = Callable[[], Any]


class Clock:
    """Runs what is due, in order of time and then of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Action]] = []

    def at(self, time: float, action: Action) -> None:
        heapq.heappush(self._due, (time, next(self._order), action))

    def after(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), action))

    def step(self) -> None:
        """Does the next thing."""
        self.now, _, action = heapq.heappop(self._due)
        action()


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the network is; delays in seconds."""

    drop: float
    duplicate: float
    max_delay_s: float
    call_delay_s: float


@dataclass(eq=False, slots=True)
class _Call:
    """A call under way; the answer or the news of the death settles it, the earlier of the two."""

    caller: Life
    on_lost: Action
    settled: bool = False


@dataclass(eq=False, slots=True)
class Life:
    """One life of a component: what is sent to it dies with it. While it hangs, everything waits."""

    name: str
    clock: Clock
    alive: bool = True
    hangs_until: float = 0.0
    calls: dict[_Call, None] = field(default_factory=dict)  # to this life, not settled
    arrivals: dict[Life, float] = field(default_factory=dict)  # by callee: of the last call sent there

    def run(self, action: Action) -> None:
        """Lets the component do something now, or when it wakes up, or never."""
        if not self.alive:
            return
        if self.hangs_until > self.clock.now:
            self.clock.at(self.hangs_until, lambda: self.run(action))
        else:
            action()


class Component:
    """One life of something that acts, in a shell of virtual time."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.life = world, Life(name, world.clock)

    def later(self, delay_s: float, action: Action) -> None:
        self.world.clock.after(delay_s, lambda: self.life.run(action))


class Network:
    """Carries messages between lives.

    Args:
        thorough: Whether every message goes through the codec.
    """

    def __init__(self, clock: Clock, rng: random.Random, faults: Faults, *, thorough: bool) -> None:
        self.clock, self.faults = clock, faults
        self._random = rng.random
        self._thorough = thorough
        self.living: dict[str, Any] = {}  # components by name

    def letter(self, to: Life, message: Any, deliver: Callable[[Any], None]) -> None:
        """Sends a message that may be lost, doubled, late and overtaken."""
        faults, message = self.faults, self._wire(message)
        copies = (self._random() >= faults.drop) + (self._random() < faults.duplicate)
        for _ in range(copies):
            delay_s = self._random() * faults.max_delay_s
            self.clock.after(delay_s, lambda: to.run(lambda: deliver(message)))

    def call(
        self,
        caller: Life,
        callee_name: str,
        method: str,
        message: Any,
        on_reply: Callable[[Any], None],
        on_lost: Action,
    ) -> None:
        """Calls ``method(message, reply)`` of a component; ``on_lost`` if it is dead, or dies before it has
        answered."""
        component = self.living.get(callee_name)
        if component is None:
            self.clock.after(0.0, lambda: caller.run(on_lost))
            return
        callee: Life = component.life
        call = _Call(caller, on_lost)
        callee.calls[call] = None

        def reply(answer: Any = None) -> None:
            answer = self._wire(answer)
            settle = partial(self._answer, callee, call, on_reply, answer)
            self.clock.after(self._call_delay_s(), partial(caller.run, settle))

        message = self._wire(message)
        arrival = max(caller.arrivals.get(callee, 0.0), self.clock.now + self._call_delay_s())
        caller.arrivals[callee] = arrival
        self.clock.at(arrival, lambda: callee.run(lambda: getattr(component, method)(message, reply)))

    def watch(self, caller: Life, callee: Life, on_lost: Action) -> None:
        """Says when a life ends; what a pending long poll does in Ray."""
        call = _Call(caller, on_lost)
        if callee.alive:
            callee.calls[call] = None
        else:
            self.clock.after(0.0, lambda: caller.run(lambda: self._fail(call)))

    def kill(self, name: str) -> None:
        """Ends a life; those who wait for it learn of it in a moment."""
        life: Life = self.living.pop(name).life
        life.alive = False
        for call in life.calls:
            delay_s = DETECT_S * (1 + self._random())
            self.clock.after(delay_s, lambda call=call: call.caller.run(lambda: self._fail(call)))  # type: ignore[misc]

    @staticmethod
    def _answer(callee: Life, call: _Call, on_reply: Callable[[Any], None], answer: Any) -> None:
        if not call.settled:
            call.settled = True
            callee.calls.pop(call)
            on_reply(answer)

    @staticmethod
    def _fail(call: _Call) -> None:
        if not call.settled:
            call.settled = True
            call.on_lost()

    def _call_delay_s(self) -> float:
        return self._random() * self.faults.call_delay_s

    def _wire(self, message: Any) -> Any:
        if message is None or not self._thorough:
            return message
        return decode(encode(message), type(message))


def attempts(requests: Iterable[Request]) -> str:
    """Requests as stories name them: id/attempt after the tokens their clients have."""
    named = [f"{request.request_id}/{request.attempt} after {len(request.output_ids)}" for request in requests]
    return ", ".join(named) or "nothing"
