"""The prefix cache: what is shared, what stays, what goes first; against a model that remembers everything."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from farsight.core.errors import IntegrityError
from farsight.core.messages.plans import Plan, Slot
from farsight.core.request import Request, SamplingParams
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor
from farsight.kvcache.block_manager import NO_PARENT, are_hashes_of, extend_hashes, hash_blocks, root_of, salted_root
from tests.volumes import at_volume

SIZE = 4
Tokens = tuple[int, ...]


def test_hashes_cover_everything_before_them_and_the_salt() -> None:
    first, second = hash_blocks([1, 2, 3, 4, 5, 6, 7, 8, 9], SIZE)
    assert hash_blocks([1, 2, 3, 4, 9, 9, 9, 9], SIZE)[0] == first
    assert hash_blocks([9, 2, 3, 4, 5, 6, 7, 8], SIZE)[1] != second
    grown = [first]
    extend_hashes(grown, [1, 2, 3, 4, 5, 6, 7, 8, 9], SIZE, 2)
    assert grown == [first, second]
    code = "from farsight.kvcache.block_manager import hash_blocks; print(hash_blocks(list(range(64)), 32))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(hash_blocks(list(range(64)), 32)), "also in another process"
    roots = [NO_PARENT, salted_root("a"), salted_root("b"), root_of("a", b"request"), root_of("a")]
    assert len(set(roots)) == 5 and salted_root("") == NO_PARENT
    assert not set(hash_blocks(range(8), SIZE, salted_root("a"))) & set(hash_blocks(range(8), SIZE))


def fill(blocks: BlockManager, name: str, tokens: Tokens) -> int:
    """A sequence takes what is cached, computes the rest and registers it; returns the cached blocks."""
    hashes = hash_blocks(tokens, SIZE)
    cached = blocks.match(hashes, len(hashes))
    blocks.share(name, cached)
    assert blocks.grow(name, len(tokens)) is not None
    blocks.register(name, len(cached), hashes, len(hashes))
    blocks.check_integrity()
    return len(cached)


def test_released_blocks_stay_cached_and_count_as_free() -> None:
    blocks = BlockManager(4, SIZE)
    assert fill(blocks, "a", (1,) * 10) == 0
    blocks.release("a")
    assert blocks.num_free == 4
    assert fill(blocks, "b", (1,) * 10) == 2
    assert fill(blocks, "c", (1,) * 8) == 2, "held blocks are shared"
    assert (blocks.num_free, blocks.num_shared) == (1, 2)
    blocks._ref_counts[0] += 1
    with pytest.raises(IntegrityError, match="reference counts"):
        blocks.check_integrity()
    blocks, hashes = BlockManager(4, SIZE), hash_blocks((1,) * 8, SIZE)
    for name in "ab":
        blocks.grow(name, 8)
    for name in "ab":
        blocks.register(name, 0, hashes, 2)
        blocks.check_integrity()
    assert (blocks.table("a"), blocks.num_free) == (blocks.table("b"), 2), "of two equal blocks one is kept"


def test_the_least_recently_used_goes_first_and_of_a_chain_its_end() -> None:
    blocks = BlockManager(4, SIZE)
    fill(blocks, "a", (1,) * 8)
    fill(blocks, "b", (2,) * 8)
    blocks.release("b")
    blocks.release("a")
    blocks.grow("c", SIZE)
    assert [len(blocks.match(hash_blocks(tokens, SIZE), 2)) for tokens in [(1,) * 8, (2,) * 8]] == [2, 1]


@at_volume(60, 1000)
def test_it_finds_what_a_naive_model_says(volume: int) -> None:
    for seed in range(volume):
        compare_with_naive_model(random.Random(seed), 3 + seed % 18)


def compare_with_naive_model(rng: random.Random, num_blocks: int) -> None:
    """The model knows prefixes by their tokens, who holds them and when they were last let go."""
    blocks = BlockManager(num_blocks, SIZE)
    held: dict[str, Tokens] = {}
    cached: dict[Tokens, None] = {}  # prefixes of full blocks in order of eviction where no sequence holds them
    for i in range(80):
        if held and rng.random() < 0.5:
            name = rng.choice(sorted(held))
            tokens = held.pop(name)
            blocks.release(name)
            for end in range(len(tokens) // SIZE * SIZE, 0, -SIZE):
                if not any(other[:end] == tokens[:end] for other in held.values()):
                    del cached[tokens[:end]]
                    cached[tokens[:end]] = None
        else:
            tokens = (*(t for _ in range(rng.randint(1, 4)) for t in (rng.randint(1, 2),) * SIZE), 3)
            prefixes = [tokens[:end] for end in range(SIZE, len(tokens), SIZE)]
            known = next((n for n, prefix in enumerate(prefixes) if prefix not in cached), len(prefixes))
            used = {prefix for other in held.values() for prefix in cached if other[: len(prefix)] == prefix}
            new = len(prefixes) + 1 - known
            room = num_blocks - len(used | set(prefixes[:known])) - len(held)
            if new > room:
                continue
            assert fill(blocks, f"s{i}", tokens) == known
            idle = [prefix for prefix in cached if prefix not in used and prefix not in prefixes[:known]]
            for prefix in idle[: max(0, new - (room - len(idle)))]:
                del cached[prefix]
            cached |= dict.fromkeys(prefixes)
            held[f"s{i}"] = tokens
        blocks.check_integrity()
        for prefix in cached:
            assert len(blocks.match(hash_blocks(prefix, SIZE), len(prefix) // SIZE)) == len(prefix) // SIZE


class Loop:
    """An executor whose sequences have known prompts and outputs of ones."""

    def __init__(self, num_blocks: int = 32, max_batch_tokens: int = 64) -> None:
        blocks = BlockManager(num_blocks, SIZE)
        self.executor = LeaseExecutor(blocks, BatchLimits(8, max_batch_tokens), "w")
        self.executor.share_prefixes(lambda name, count: hash_blocks(self.tokens[name], SIZE)[:count])
        self.tokens: dict[str, Tokens] = {}
        self.plan_seq = 0
        self.computed: dict[str, int] = {}

    def plan(self, prompts: dict[str, Tokens], preempted: tuple[str, ...] = (), prefill_to: int = 99) -> None:
        self.plan_seq += 1
        slots = []
        for name, prompt in prompts.items():
            self.tokens[name] = prompt + (1,) * 20
            request = Request(name, 0, "i", prompt, SamplingParams(20))
            slots.append(Slot(name, 0, prefill_to, 99, False, int(name in preempted), request))
        self.executor.apply_plan(Plan("w", 0, self.plan_seq, 0, 0, tuple(slots)))

    def step(self) -> dict[str, tuple[int, int]]:
        batch = self.executor.next_batch()
        self.executor.check_integrity()
        if batch is None:
            return {}
        self.executor.commit(batch)
        self.executor.check_integrity()
        for item in batch.items:
            self.computed[item.request_id] = self.computed.get(item.request_id, 0) + item.num_tokens
        return {item.request_id: (item.start, item.num_tokens) for item in batch.items}


PROMPT = tuple(range(10, 21))  # two blocks and three tokens


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    loop = Loop()
    loop.plan({"a": PROMPT, "b": PROMPT, "c": PROMPT})
    assert loop.step() == {"a": (0, 11)}
    assert loop.step() == {"a": (11, 1), "b": (8, 3), "c": (8, 3)}
    progress = loop.executor.report().progress
    assert [each.cached_len for each in progress] == [0, 8, 8]
    assert (loop.executor.prefix_queries, loop.executor.prefix_hits) == (33, 16)


def test_a_long_prefix_is_waited_for_chunk_by_chunk_and_nobody_else_waits() -> None:
    loop = Loop(max_batch_tokens=6)
    loop.plan({"a": PROMPT, "b": PROMPT, "z": (9, 9)})
    assert loop.step() == {"a": (0, 6)}
    assert loop.step() == {"a": (6, 5), "z": (0, 1)}
    assert loop.step() == {"a": (11, 1), "b": (8, 3), "z": (1, 1)}
    loop = Loop(max_batch_tokens=6)
    loop.plan({"a": PROMPT, "b": PROMPT})
    loop.step()
    loop.executor.stall(frozenset({"a"}))
    assert loop.step() == {"b": (4, 6)}, "who rests is not waited for"
    loop.executor.stall(frozenset())
    while loop.computed.get("b", 0) < 10:
        loop.step()


def test_the_last_known_token_and_the_last_granted_one_are_always_computed() -> None:
    loop = Loop()
    prompt = PROMPT[:8]
    loop.plan({"a": prompt})
    loop.step()
    loop.plan({"a": prompt, "b": prompt})
    assert loop.step()["b"] == (4, 4)
    loop.plan({"a": prompt, "b": prompt, "c": prompt}, prefill_to=5)
    assert loop.step()["c"] == (4, 1)


def test_a_preempted_sequence_finds_its_own_blocks_and_its_outputs() -> None:
    loop = Loop()
    loop.plan({"a": PROMPT})
    for _ in range(4):
        loop.step()
    loop.plan({"a": PROMPT}, preempted=("a",))
    assert loop.step() == {"a": (12, 3)}
    assert loop.executor.report().progress[0].cached_len == 0, "it is the first start that counts"


def test_hashes_are_known_by_their_number_and_their_ends() -> None:
    tokens, root = tuple(range(11)), salted_root("a")
    hashes = hash_blocks(tokens, SIZE, root)
    assert are_hashes_of(hashes, tokens, SIZE, root)
    assert are_hashes_of((), (1, 2), SIZE)
    assert not are_hashes_of(hashes, tokens, SIZE), "another salt"
    assert not are_hashes_of(hashes[:1], tokens, SIZE, root)
    assert not are_hashes_of((hashes[0], 5), tokens, SIZE, root)
    assert not are_hashes_of(hash_blocks(tokens, 2, root)[:2], tokens, SIZE, root), "another block size"


def test_a_sequence_has_whole_blocks_until_all_are_released() -> None:
    blocks = BlockManager(num_blocks=4, block_size=8)
    assert blocks.grow("a", 8) == [0]
    blocks.grow("a", 9)
    assert (len(blocks.table("a")), blocks.num_free) == (2, 2)
    blocks.grow("a", 3)
    assert len(blocks.table("a")) == 2, "growing never shrinks"
    assert blocks.grow("a", 33) is None, "what cannot grow keeps what it has"
    assert (len(blocks.table("a")), blocks.num_free) == (2, 2)
    blocks.check_integrity()
    assert (blocks.release("a"), blocks.release("a"), blocks.num_free) == (2, 0, 4)
    blocks.check_integrity()


def test_integrity_sees_a_block_lost_or_in_two_hands() -> None:
    for wrong in ([], [1]):
        blocks = BlockManager(num_blocks=3, block_size=8)
        blocks.grow("a", 8)
        blocks.grow("b", 8)
        blocks.table("a")[:] = wrong
        with pytest.raises(IntegrityError):
            blocks.check_integrity()
