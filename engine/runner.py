"""What a worker asks of the device that computes its steps and moves its KV; how the device's memory is shared out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import psutil

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError
from farsight.core.request import Request, SamplingParams
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import StepFault
from farsight.kvcache import KVCopy, StepBatch, StepItem

logger = logging.getLogger(__name__)


class Launch(Enum):
    """What became of a step that was to be launched."""

    NOT = "not"
    """``execute`` computes it from its beginning."""

    NOW = "now"
    BEFORE = "before"
    """By ``Runner.launch_after``."""


class Runner:
    """Computes steps: the model runner, or a device emulated from a profile. Here is what most devices do.

    Attributes:
        reads_states: Whether steps that end prompts bring ``LoggedTokens.states``, where the device can tell them.
    """

    reads_states = False

    @property
    def num_ooms(self) -> int:
        """How often the device has run out of memory and computed a step in parts."""
        return 0

    def begin(self, batch: StepBatch, sequences: dict[str, Sequence]) -> None:
        """Announces a step that will be executed after those that have begun before it."""

    def execute(self, batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        """Computes a step; returns the new token of each item, None where the item does not sample."""
        raise NotImplementedError

    def look_ahead(self, batch: StepBatch, sequences: dict[str, Sequence]) -> bool:
        """Gets a step ready that is likely to follow the one that computes; in another thread, meanwhile.

        Returns:
            Whether it could also be executed before that one is booked, after ``go_on``.
        """
        return False

    def go_on(self, batch: StepBatch, token_ids: list[int]) -> None:
        """Says the last known token of each item of a step that was got ready: its sequences lack them."""

    def launch(self, batch: StepBatch, sequences: dict[str, Sequence]) -> Launch:
        """Launches a step that ``execute`` will then wait for, unless it was launched by ``launch_after``."""
        return Launch.NOT

    def launch_after(self, batch: StepBatch, sequences: dict[str, Sequence]) -> bool:
        """Launches a step whose last known tokens the step launched before it yields; False if it cannot."""
        return False

    def forget_launched(self) -> None:
        """Drops the step that ``launch_after`` has launched: nothing of it is wanted."""

    def fault(self, error: Exception) -> StepFault:
        """Returns what the error of a failed ``execute`` says about the device."""
        return StepFault.UNKNOWN

    def rest(self) -> None:
        """Announces that no step can run for now."""


class Copier(Protocol):
    """Moves KV between the device and the host while steps run."""

    def when_done(self, callback: Callable[[], object]) -> None: ...
    def begin(self, copy: KVCopy) -> None: ...
    def take_done(self) -> list[tuple[int, bool]]: ...
    def wait(self) -> None: ...
    def look(self, names: SequenceOf[int], tenant: str) -> None: ...


class Copies:
    """Copies that have begun and whose ends have not been collected. All but the callback belongs to one thread."""

    def __init__(self) -> None:
        self._in_flight: dict[int, Future[None]] = {}
        self._on_done: Callable[[], object] = lambda: None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Sets what is called from the copying thread after each copy."""
        self._on_done = callback

    def submit(self, copy_id: int, thread: Executor, work: Callable[[], None]) -> None:
        """Starts a copy in a thread."""
        future = self._in_flight[copy_id] = thread.submit(work)
        future.add_done_callback(lambda _: self._on_done())

    def take_done(self) -> list[tuple[int, bool]]:
        """Returns (copy id, whether it failed) of the copies that have ended since the last call."""
        done = [(copy_id, future) for copy_id, future in self._in_flight.items() if future.done()]
        for copy_id, future in done:
            del self._in_flight[copy_id]
            if future.exception() is not None:
                logger.error("copy %d failed", copy_id, exc_info=future.exception())
        return [(copy_id, future.exception() is not None) for copy_id, future in done]

    def wait(self) -> None:
        """Returns when one of the copies in flight has ended; at once if there are none."""
        if self._in_flight:
            wait(self._in_flight.values(), return_when=FIRST_COMPLETED)

    def look(self, names: SequenceOf[int], tenant: str) -> None:
        """Looks, in any thread, what other processes have kept of a chain of blocks; most copiers have none to ask."""


@dataclass(frozen=True, slots=True)
class Device:
    """The parts of a worker that depend on the device, and the sizes of its pools.

    Attributes:
        context_len: Tokens a sequence may reach if the KV pool holds them.
        token_bytes: Bytes of the KV of one token.
        num_blocks: KV blocks of the pool.
        num_host_blocks: KV blocks of the host pool; 0 if there is none.
        copier: Copies between the two pools; None if there is no host pool.
        num_states: Sequences that may have a state beside their keys and values at once; 0: the model has none.
        num_checkpoints: States that may be kept beside these, for sequences that begin alike.
        exact: Whether a token's logits depend on nothing else in its step, bit by bit (ADR 27).
    """

    runner: Runner
    context_len: int
    token_bytes: int
    num_blocks: int
    num_host_blocks: int
    copier: Copier | None
    exact: bool = False
    num_states: int = 0
    num_checkpoints: int = 0


def num_pool_blocks(engine: EngineConfig, token_bytes: int, context_len: int, free_bytes: int | None) -> int:
    """Returns the number of blocks of the KV pool.

    Args:
        token_bytes: Bytes of the KV of one token.
        free_bytes: Bytes that ``auto`` takes at most; None for no bound.

    Raises:
        ConfigError: there is room for none.
    """
    block_bytes = token_bytes * engine.kv_block_size
    asked = engine.kv_bytes()
    full = -(-context_len // engine.kv_block_size) * engine.max_num_seqs  # more would never be held
    if asked is not None:
        blocks = asked // block_bytes
    else:
        blocks = full if free_bytes is None else min(free_bytes // block_bytes, full)
    if blocks < 1:
        raise ConfigError("engine.kv_memory", engine.kv_memory, f"room for at least one block of {block_bytes} bytes")
    return blocks


def num_host_pool_blocks(engine: EngineConfig, token_bytes: int, auto_blocks: int, free_bytes: int | None) -> int:
    """Returns the number of blocks of the host pool; 0 for none.

    Args:
        auto_blocks: Blocks that ``auto`` takes, if they fit ``free_bytes``.
        free_bytes: Bytes that ``auto`` may take at most; None for no bound.

    Raises:
        ConfigError: there is room for none where one is asked for.
    """
    block_bytes = token_bytes * engine.kv_block_size
    asked = engine.host_kv_bytes()
    if asked is None:
        return auto_blocks if free_bytes is None else min(auto_blocks, free_bytes // block_bytes)
    if asked and asked < block_bytes:
        expected = f"auto, 0, or room for a block of {block_bytes} bytes"
        raise ConfigError("engine.host_kv_memory", engine.host_kv_memory, expected)
    return asked // block_bytes


_CONTAINER = Path("/sys/fs/cgroup")


def available_bytes(container: Path = _CONTAINER) -> int:
    """Returns the bytes that can be had without swapping: those of files that were read and can be dropped included.

    Args:
        container: Where the kernel shows the limit of this process's container (cgroup v2).
    """
    return max(0, min(int(psutil.virtual_memory().available), _within(container)))


def _within(container: Path) -> int:
    """Returns what a container's limit leaves; without a limit, more than any machine has."""
    try:
        limit, used = ((container / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
        lines = (container / "memory.stat").read_text("ascii").splitlines()
    except OSError:
        return 1 << 62
    if limit == "max":
        return 1 << 62
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return int(limit) - int(used) + cached


_NAME = "\0largest"
_SAMPLING = SamplingParams(1, temperature=1.0, top_k=2, top_p=0.9, seed=0)
"""Sampling parameters with the most memory that a draw can take."""


def largest_step(engine: EngineConfig) -> tuple[StepBatch, dict[str, Sequence], int]:
    """Returns the largest step: as many tokens as a step may compute, in as many prompts as it may hold; each samples.

    Returns:
        The step, its sequences, and how many blocks it is computed in: 0 and up.
    """
    num_seqs = min(engine.max_num_seqs, engine.step_tokens)
    each, more = divmod(engine.step_tokens, num_seqs)
    items, sequences, num_blocks = [], {}, 0
    for i in range(num_seqs):
        name, num_tokens = f"{_NAME}{i}", each + (i < more)
        used = -(-num_tokens // engine.kv_block_size)
        items.append(StepItem(name, 0, num_tokens, True, list(range(num_blocks, num_blocks + used))))
        sequences[name] = Sequence.of(Request(name, 0, "", (0,) * num_tokens, _SAMPLING))
        num_blocks += used
    return StepBatch(tuple(items)), sequences, num_blocks
