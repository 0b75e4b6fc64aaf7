"""Wasted memory accesses and Algorithm 1 of Magnus."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import IntegrityError, InvalidValueError
from policies.batching.base import FormedBatch, first_arrived
from policies.batching.wma import WmaBatcher, memory_tokens, wasted_memory_accesses
from tests.unit.policies.batch_jobs import drain, exercise, make_job, names

Lens = tuple[int, int]


def equations_2_to_4(batch: list[Lens]) -> int:
    """WMA(B) as the paper writes it: sums over iterations, the largest over requests."""
    prompt, output = max(each[0] for each in batch), max(each[1] for each in batch)
    return max(g * (prompt - length) + sum(prompt + t for t in range(g, output)) for length, g in batch)


def algorithm_1(arrivals: list[Lens], memory: float, threshold: float, cap: float = math.inf) -> list[list[int]]:
    """Batches of indices, by trying every batch in full."""
    batches: list[list[int]] = []
    for index, lens in enumerate(arrivals):
        best, least = None, math.inf
        for batch in batches:
            joined = [arrivals[member] for member in batch] + [lens]
            padded = max(each[0] for each in joined) + max(each[1] for each in joined)
            if len(joined) * padded > memory or len(joined) > cap:
                continue
            waste = equations_2_to_4(joined)
            if waste < least:
                best, least = batch, waste
        if best is not None and least < threshold:
            best.append(index)
        else:
            batches.append([index])
    return batches


def formed(lens: list[Lens]) -> FormedBatch:
    batch = FormedBatch(0, 0.0)
    for index, (prompt_len, output_len) in enumerate(lens):
        batch.insert(make_job(str(index), prompt_len, output_len))
    return batch


def batches_of(batcher: WmaBatcher, arrivals: list[Lens]) -> list[list[int]]:
    """Arrivals one second apart, numbered from 0, and what is pulled at the end."""
    for index, (prompt_len, output_len) in enumerate(arrivals):
        batcher.add(make_job(str(index), prompt_len, output_len, arrived_at=index), index)
        batcher.check_integrity()
    return [[int(name) for name in batch] for batch in drain(batcher, len(arrivals))]


def test_wma_and_memory_of_the_small_batch() -> None:
    """Section 1.3 example 1: (gen, wait) = (4, 34), (0, 19), (18, 0); section 1.4: 3 x 11."""
    batch = formed([(3, 2), (5, 4), (2, 6)])
    assert (batch.prompt_len, batch.predicted_len) == (5, 6)
    assert wasted_memory_accesses(batch) == 38
    assert memory_tokens(batch) == 33


@pytest.mark.parametrize(("output_len", "waste", "merged"), [(274, 49_851, True), (275, 50_225, False)])
def test_the_default_threshold_between_274_and_275_tokens(output_len: int, waste: int, merged: bool) -> None:
    """Section 1.3 example 3: prompts of 100, outputs of 100 and g."""
    arrivals = [(100, 100), (100, output_len)]
    assert wasted_memory_accesses(formed(arrivals)) == waste
    assert batches_of(WmaBatcher(1e9, first_arrived), arrivals) == ([[0, 1]] if merged else [[0], [1]])


ARRIVALS = [(10, 10), (12, 11), (100, 100), (11, 10), (95, 105)]


def test_algorithm_1_without_a_memory_bound() -> None:
    """Section 1.5 example 1: the third and the fifth would waste 1010."""
    assert wasted_memory_accesses(formed([(100, 100), (95, 105)])) == 1010
    assert batches_of(WmaBatcher(math.inf, first_arrived, 500), ARRIVALS) == [[0, 1, 3], [2], [4]]
    assert batches_of(WmaBatcher(math.inf, first_arrived, 1010), ARRIVALS) == [[0, 1, 3], [2], [4]]
    assert batches_of(WmaBatcher(math.inf, first_arrived, 1011), ARRIVALS) == [[0, 1, 3], [2, 4]]


def test_pulled_and_split_batches_take_no_more_jobs() -> None:
    batcher = WmaBatcher(1e9, first_arrived)
    for index in range(3):
        batcher.add(make_job(f"a{index}", 5, 5, arrived_at=index), index)
    batch = batcher.pull(3)
    assert names(batch) == ["a0", "a1", "a2"]
    batcher.add(make_job("b", 5, 5, arrived_at=3), 3)
    assert batch is not None
    assert batcher.split(batch, 4) is None
    batcher.add(make_job("c", 5, 5, arrived_at=4), 4)
    batcher.check_integrity()
    assert drain(batcher, 5) == [["a0", "a1"], ["a2"], ["b", "c"]]
    single = FormedBatch(99, 0.0)
    single.insert(make_job("alone", 5, 5))
    assert batcher.split(single, 6) is single.jobs[0]
    assert batcher.num_waiting == 0


def test_an_aborted_job_no_longer_stretches_its_batch() -> None:
    batcher = WmaBatcher(memory_tokens=60, choose=first_arrived)
    batcher.add(make_job("long", 20, 10), 0)
    batcher.add(make_job("short", 10, 10), 0)
    batcher.remove("long")
    batcher.check_integrity()
    batcher.add(make_job("other", 10, 10), 0)
    batcher.add(make_job("third", 10, 10), 0)  # 3 x 20 fit now; 3 x 30 would not have
    assert drain(batcher, 1) == [["short", "other", "third"]]
    batcher.add(make_job("last", 10, 10), 2)
    batcher.remove("last")
    batcher.remove("last")
    assert batcher.pull(3) is None
    batcher.check_integrity()


def test_a_job_that_comes_back_is_priced_by_what_it_computes_anew() -> None:
    """5 of prompt and 20 of 30 foreseen tokens: 25 to prefill, 10 to come."""
    batcher = WmaBatcher(1e9, first_arrived, 1)
    batcher.add(make_job("like its start", 5, 30), 0)
    batcher.add(make_job("like what is left", 25, 10), 0)
    batcher.add(make_job("back", 5, 30, output_len=20), 0)
    batcher.check_integrity()
    assert drain(batcher, 1) == [["like its start"], ["like what is left", "back"]]


def test_a_batch_is_as_urgent_as_its_most_urgent_job() -> None:
    batcher = WmaBatcher(1e9, first_arrived, 100)
    batcher.add(make_job("old", 50, 50, arrived_at=0), 0)
    batcher.add(make_job("plain", 5, 5, arrived_at=1), 1)
    batcher.add(make_job("urgent", 5, 5, arrived_at=2, priority=-1), 2)
    batcher.add(make_job("due", 90, 90, arrived_at=3, deadline_at=9), 3)
    assert drain(batcher, 4) == [["plain", "urgent"], ["due"], ["old"]]


LENS = st.tuples(st.integers(1, 60), st.integers(1, 60))


@settings(max_examples=150, deadline=None)
@given(st.lists(LENS, min_size=1, max_size=12))
def test_closed_form_equals_the_sums_of_the_paper(lens: list[Lens]) -> None:
    assert wasted_memory_accesses(formed(lens)) == equations_2_to_4(lens)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(LENS, max_size=40),
    st.sampled_from([100.0, 400.0, math.inf]),
    st.sampled_from([0.0, 50.0, 300.0, 5000.0, math.inf]),
    st.sampled_from([None, 2, 5]),
)
def test_batches_equal_those_of_trying_every_batch(
    arrivals: list[Lens], memory: float, threshold: float, cap: int | None
) -> None:
    batcher = WmaBatcher(memory, first_arrived, threshold, cap)
    assert batches_of(batcher, arrivals) == algorithm_1(arrivals, memory, threshold, math.inf if cap is None else cap)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_or_doubled(seed: int) -> None:
    exercise(WmaBatcher(150, first_arrived, 300, [None, 4][seed % 2]), seed)


def test_more_open_batches_than_the_first_columns_hold() -> None:
    batcher = WmaBatcher(1, first_arrived)
    assert batches_of(batcher, [(2, 2)] * 150) == [[index] for index in range(150)]


def test_integrity_notices_a_batch_over_its_bounds() -> None:
    batcher = WmaBatcher(1e9, first_arrived)
    batcher.add(make_job("a", 5, 5), 0)
    batcher.add(make_job("b", 5, 9), 0)
    batcher.wma_threshold = 10
    with pytest.raises(IntegrityError, match="bounds"):
        batcher.check_integrity()


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("memory_tokens", {"memory_tokens": 0}),
        ("memory_tokens", {"memory_tokens": math.nan}),
        ("wma_threshold", {"memory_tokens": 1, "wma_threshold": -1}),
        ("max_batch_size", {"memory_tokens": 1, "max_batch_size": 0}),
    ],
)
def test_bad_parameters(field: str, arguments: dict[str, float]) -> None:
    with pytest.raises(InvalidValueError) as raised:
        WmaBatcher(choose=first_arrived, **arguments)  # type: ignore[arg-type]
    assert raised.value.field == field
