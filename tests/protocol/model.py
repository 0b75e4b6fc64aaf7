"""A model whose tokens tell where they belong, on a device that remembers what is in its KV blocks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Values
from dataclasses import dataclass, field

from farsight.core.messages.plans import Slot
from farsight.core.messages.requests import Key
from farsight.core.request import Request, SamplingParams
from farsight.engine.runner import Runner
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import StepFault
from farsight.kvcache import BatchLimits, BlockManager, StepBatch, StepItem
from farsight.kvcache.block_manager import hash_blocks

BLOCK = 4
EOS = 0


@dataclass(slots=True)
class Client:
    """One request as its client sees it, and what it ought to get."""

    request: Request
    stops_after: int | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: str | None = None
    gone: bool = False
    slow: bool = False
    may_fail: bool = False  # one of its steps broke
    fits: bool = True

    @property
    def waits(self) -> bool:
        return self.end is None and not self.gone

    @property
    def expected_end(self) -> str:
        return "length" if self.stops_after is None else "stop"

    def expected(self, index: int) -> int:
        """The output token at this index."""
        if self.stops_after is not None and index == self.stops_after - 1:
            return EOS
        return 1 + zlib.crc32(f"{self.request.request_id}@{index}".encode()) % 999


def prompt_of(request_id: str, length: int) -> tuple[int, ...]:
    """Prompts of a family begin alike; half of them are equal as far as both go."""
    number = zlib.crc32(request_id.encode())
    family, own_from = number % 3, length if number % 2 else length // 2
    names = (f"{family}" if i < own_from else request_id for i in range(length))
    return tuple(1 + zlib.crc32(f"{name}#{i}".encode()) % 999 for i, name in enumerate(names))


def text_of(tokens: Values[int]) -> str:
    """What the client should have read when the output has ended."""
    return "".join(f"{token} " for token in tokens if token != EOS)


class LaggingText:
    """Text that trails the tokens by one, as a stop string that may yet complete makes it."""

    stopped = False

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: int) -> str:
        shown, self._held = self._held, text_of([token])
        return shown

    def flush(self) -> str:
        shown, self._held = self._held, ""
        return shown


class LaggingDetokenizer:
    def start(self, stop: Values[str] = (), prompt_ids: Values[int] = (), shown_ids: Values[int] = ()) -> LaggingText:
        return LaggingText()


PAD = -2
"""What padding leaves behind; no sequence may read it."""


class Device(Runner):
    """Runs steps and checks that they may be run: limits, grants, places, whose tokens the blocks hold.

    Attributes:
        slots: What the plan in force holds.
        kv: Token ids by block and place in it.
        places: Who may start by the plan in force, without waiting for another one's end.
        ended: Attempts that have ended here.
        resting: Those whose clients do not read.
    """

    def __init__(self, limits: BatchLimits, blocks: BlockManager, clients: dict[str, Client]) -> None:
        self._limits = limits
        self._blocks = blocks
        self._clients = clients
        self.kv: list[list[int]] = [[-1] * BLOCK for _ in range(blocks.num_blocks)]
        self.slots: dict[str, Slot] = {}
        self.places: tuple[Key, ...] = ()
        self.ended: set[Key] = set()
        self.resting: frozenset[str] = frozenset()
        self.num_beyond_grants = 0
        self.num_cached_starts = 0
        self._reached: dict[str, tuple[int, int]] = {}  # position, in which life of its KV
        self._returned: dict[str, int] = {}  # whose blocks have come back, in which life of its KV

    def fault(self, error: Exception) -> StepFault:
        """No step may fail: what one raises ends the test."""
        raise error

    def execute(self, batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        assert len(batch.items) <= self._limits.max_num_seqs, f"{len(batch.items)} sequences in a step"
        assert batch.num_tokens <= self._limits.max_batch_tokens, f"{batch.num_tokens} tokens in a step"
        self._check_grants(batch, sequences)
        self._check_places(batch, sequences)
        self._check_shared(batch)
        self.num_cached_starts += sum(item.start > 0 and self._starts(item) for item in batch.items)
        for item in batch.items:
            self._reached[item.request_id] = item.start + item.num_tokens, self._life(item)
            self._fill(item, sequences[item.request_id].token_ids)
        for item in batch.padding.items:
            self._fill(item, [PAD] * (item.start + item.num_tokens))
        return [self._sample(item, sequences[item.request_id]) if item.samples else None for item in batch.items]

    def _check_grants(self, batch: StepBatch, sequences: dict[str, Sequence]) -> None:
        granted = {item.request_id: self._granted(item.request_id, sequences) for item in batch.items}
        beyond = [item.request_id for item in batch.items if item.start + item.num_tokens > granted[item.request_id]]
        self.num_beyond_grants += bool(beyond)
        for item in batch.items:
            assert item.request_id not in self.resting, f"{item.request_id} runs, but its client does not read"
            if beyond and not self._starts(item):
                left = granted[item.request_id] - item.start
                assert left <= 0, f"{beyond} ran beyond their grants, but {item.request_id} had {left} tokens left"

    def _starts(self, item: StepItem) -> bool:
        """Whether it does not go on where it was; what it finds in the cache it need not compute."""
        return (item.start, self._life(item)) != self._reached.get(item.request_id)

    def _life(self, item: StepItem) -> int:
        return self.slots[item.request_id].num_preemptions

    def _check_shared(self, batch: StepBatch) -> None:
        """No sequence writes into a block that another one reads."""
        for item in batch.items:
            written = item.blocks[item.start // BLOCK :]
            others = {block for other in batch.items if other is not item for block in other.blocks}
            assert not others.intersection(written), f"{item.request_id} writes into a shared block"

    def _check_places(self, batch: StepBatch, sequences: dict[str, Sequence]) -> None:
        starting = [item.request_id for item in batch.items if self._starts(item)]
        for request_id in starting:
            key = request_id, sequences[request_id].request.attempt
            assert key not in self.ended, f"{key} runs again after its end"
        self._check_standbys(
            [each for each in starting if self._returned.get(each) != self.slots[each].num_preemptions]
        )

    def blocks_return(self, block: int) -> None:
        """Notes that a sequence has started which computes nothing yet: its blocks come back, and plans may come first.

        The executor gave it its place when it ordered the copy, perhaps under an earlier plan than the one in force.
        """
        owner = next((rid for rid in self.slots if block in self._blocks.table(rid)), None)
        if owner is not None:
            self._returned[owner] = self.slots[owner].num_preemptions

    def _check_standbys(self, starting: list[str]) -> None:
        if any(self.slots[request_id].standby for request_id in starting):
            standbys = [rid for rid, slot in self.slots.items() if slot.standby and self._blocks.table(rid)]
            free = sum(key in self.ended for key in self.places)
            assert len(standbys) <= free, f"standbys {standbys} run in {free} places"

    def _granted(self, request_id: str, sequences: dict[str, Sequence]) -> int:
        """Known tokens that may be computed."""
        slot, known = self.slots[request_id], len(sequences[request_id].token_ids)
        assert slot.attempt == sequences[request_id].request.attempt, f"{request_id}: attempt without a grant"
        reach = min(known, slot.prefill_to)
        return reach - 1 if reach == known >= slot.length_to else reach

    def _fill(self, item: StepItem, token_ids: list[int]) -> None:
        for position in range(item.start, item.start + item.num_tokens):
            self.kv[item.blocks[position // BLOCK]][position % BLOCK] = token_ids[position]

    def _sample(self, item: StepItem, sequence: Sequence) -> int:
        known = len(sequence.token_ids)
        assert item.start + item.num_tokens == known, f"{item.request_id}: samples before its last known token"
        seen = [token for block in item.blocks for token in self.kv[block]][:known]
        assert seen == sequence.token_ids, f"{item.request_id}: wrong KV: {seen} for {sequence.token_ids}"
        return self._clients[item.request_id].expected(sequence.output_len)


def make_client(request_id: str, ingress_id: str, prompt_len: int, output_len: int, stops_after: int | None) -> Client:
    sampling = SamplingParams(output_len)
    prompt = prompt_of(request_id, prompt_len)
    hashes = tuple(hash_blocks(prompt, BLOCK))
    tenant = "abc"[prompt_len % 3]
    request = Request(request_id, 0, ingress_id, prompt, sampling, prefix_hashes=hashes, tenant=tenant)
    return Client(request, stops_after)
