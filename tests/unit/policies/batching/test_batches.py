"""Formed batches: vanilla ones, those of Magnus by wasted memory accesses, and the highest response ratio."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core.costs import StepCost
from farsight.core.errors import IntegrityError
from farsight.policies.batching.base import BatchQueue, FormedBatch, first_arrived, first_sealed, predicted_len
from farsight.policies.batching.fcfs import FcfsBatches, vanilla_batch_size
from farsight.policies.batching.hrrn import HighestResponseRatio, remaining_service_s, response_ratio
from farsight.policies.batching.wma import WmaBatcher, memory_tokens, wasted_memory_accesses
from tests.unit.policies.batch_jobs import drain, exercise, make_job, names

GIB = 2**30


@pytest.mark.parametrize(
    ("mean", "output_len", "expected", "service_s"),
    [
        (10.1, 0, 11, 15 + 10.1 * 150),
        (0.0, 0, 1, 15 + 150),
        (math.inf, 0, 100, 15 + 100 * 150),
        (None, 0, 100, 15 + 100 * 150),
        (10.0, 4, 6, 49 + 6 * 190),
        (10.0, 12, 1, 165 + 270),
    ],
)
def test_predicted_length_and_service(mean: float | None, output_len: int, expected: int, service_s: float) -> None:
    """A limit of 100 tokens; 2 of the 5 of the prompt are cached, and the others pay for the pairs that they attend."""
    job = make_job("a", 5, mean, max_new_tokens=100, output_len=output_len)
    job.cached_len = 2
    assert predicted_len(job) == expected
    assert remaining_service_s(StepCost(0, 1, 100, 10, 1), job) == pytest.approx(service_s)


@pytest.mark.parametrize(("memory_gib", "expected"), [(13.755, 7), (18.375, 10)])
def test_vanilla_batch_size_of_the_paper_counts_the_cache_twice(memory_gib: float, expected: int) -> None:
    """And eq. (1) says 0 where one runs all the same."""
    token_bytes = 2 * 28 * 4096 * 2
    assert vanilla_batch_size(0.8 * GIB, 0.4375 * 2**20, 1024, 1024) == 1
    assert vanilla_batch_size(memory_gib * GIB, token_bytes, 1024, 1024, delta_factor=2) == expected
    assert vanilla_batch_size(memory_gib * GIB, token_bytes, 1024, 1024) > 2 * expected - 1


def test_a_batch_knows_its_lengths_and_keys() -> None:
    batch = FormedBatch(0, created_at=7.0)
    batch.insert(make_job("a", 10, 3, arrived_at=5, priority=1))
    batch.insert(make_job("b", 4, 8, arrived_at=6, priority=0, deadline_at=50))
    batch.insert(make_job("c", 4, 2, arrived_at=1, priority=0, deadline_at=40, output_len=1))
    assert (batch.prompt_len, batch.predicted_len, batch.urgency, batch.arrived_at) == (10, 8, (0, 40), 1)
    assert (batch.prompt_lens, batch.predicted_lens) == ([10, 4, 5], [3, 8, 1])
    assert batch.drop("c")
    assert not batch.drop("c")
    assert (batch.prompt_len, batch.predicted_len, batch.urgency, batch.arrived_at) == (10, 8, (0, 50), 5)
    assert batch.drop("a")
    assert (batch.prompt_len, batch.predicted_len) == (4, 8)
    batch.check_integrity()
    batch.prompt_len = 5
    with pytest.raises(IntegrityError, match="batch 0"):
        batch.check_integrity()


def _put(queue: BatchQueue, *jobs: tuple[str, float, int], sealed_at: float | None = None) -> FormedBatch:
    batch = queue.new_batch(now=0.0, sealed_at=sealed_at)
    for name, arrived_at, priority in jobs:
        batch.insert(make_job(name, 1, 1, arrived_at=arrived_at, priority=priority))
    queue.put(batch)
    return batch


def test_the_queue_gives_the_most_urgent_then_what_is_chosen() -> None:
    queue = BatchQueue(first_arrived)
    _put(queue, ("late", 3, 0))
    _put(queue, ("early", 1, 0))
    _put(queue, ("low", 0, 1))
    _put(queue, ("lifted", 9, 1), ("urgent", 9, -1))
    assert [names(queue.pull(10)) for _ in range(5)] == [["lifted", "urgent"], ["early"], ["late"], ["low"], []]


def test_first_sealed_keeps_the_order_of_sealing_and_gives_halves_the_place_of_the_whole() -> None:
    queue = BatchQueue(first_sealed)
    whole = _put(queue, ("a", 9, 0), ("b", 9, 0), ("c", 9, 0), sealed_at=0.0)
    _put(queue, ("d", 1, 0), sealed_at=5.0)
    _put(queue, ("e", 0, 0), sealed_at=5.0)
    assert queue.pull(6) is whole
    assert queue.split(whole) is None
    assert [names(queue.pull(6)) for _ in range(4)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_split_halves_are_sealed_keep_arrivals_and_one_alone_has_failed() -> None:
    queue = BatchQueue(first_arrived)
    whole = _put(queue, *((name, 10.0 - index, 0) for index, name in enumerate("abcde")))
    assert whole.insertable
    assert queue.pull(20.0) is whole
    assert whole.sealed_at == 20.0
    assert queue.split(whole) is None
    second, first = queue.pull(30.0), queue.pull(30.0)
    assert second is not None and first is not None
    assert (names(first), names(second)) == (["a", "b", "c"], ["d", "e"])
    assert (first.arrived_at, second.arrived_at) == (8.0, 6.0)
    assert (first.sealed_at, first.insertable, second.insertable) == (20.0, False, False)
    single = _put(queue, ("z", 0, 0))
    assert queue.pull(1) is single
    assert queue.split(single) is single.jobs[0]
    assert queue.num_jobs == 0


def test_remove_takes_an_emptied_batch_along() -> None:
    queue = BatchQueue(first_arrived)
    batch = _put(queue, ("a", 0, 0), ("b", 1, 0))
    assert queue.remove("a") is batch
    assert queue.remove("a") is None
    queue.check_integrity()
    queue.remove("b")
    assert (queue.num_jobs, list(queue), queue.pull(0)) == (0, [], None)
    queue.check_integrity()


def test_the_queue_notices_lost_and_unknown_jobs() -> None:
    queue = BatchQueue(first_arrived)
    batch = _put(queue, ("a", 0, 0), ("b", 0, 0))
    batch.insert(make_job("stray", 1, 1))
    with pytest.raises(IntegrityError, match="stray"):
        queue.check_integrity()
    batch.drop("stray")
    batch.drop("b")
    with pytest.raises(IntegrityError, match="2 jobs are known, 1"):
        queue.check_integrity()
    batch.drop("a")
    with pytest.raises(IntegrityError, match="empty"):
        queue.check_integrity()


def test_fcfs_batches_take_the_oldest_and_wait_for_nobody() -> None:
    batcher = FcfsBatches(3)
    for index, name in enumerate("abcde"):
        batcher.add(make_job(name, 1, 1, arrived_at=index), index)
    batcher.add(make_job("early", 1, 1, arrived_at=-1), 9)
    assert batcher.num_waiting == 6
    batcher.remove("b")
    batcher.remove("unknown")
    assert batcher.next_due_at() is None
    assert drain(batcher, 10) == [["early", "a", "c"], ["d", "e"]]


def test_fcfs_batches_order_by_priority_then_deadline_then_arrival() -> None:
    batcher = FcfsBatches(1)
    batcher.add(make_job("old", 1, 1, arrived_at=0), 0)
    batcher.add(make_job("due", 1, 1, arrived_at=2, deadline_at=9), 2)
    batcher.add(make_job("urgent", 1, 1, arrived_at=3, priority=-1), 3)
    assert drain(batcher, 4) == [["urgent"], ["due"], ["old"]]


def test_fcfs_halves_keep_their_place() -> None:
    batcher = FcfsBatches(4)
    for index, name in enumerate("abcd"):
        batcher.add(make_job(name, 1, 1, arrived_at=index), index)
    batch = batcher.pull(5)
    assert batch is not None
    batcher.add(make_job("new", 1, 1, arrived_at=5), 5)
    batcher.add(make_job("between", 1, 1, arrived_at=1), 5)
    batcher.add(make_job("with a", 1, 1, arrived_at=0), 5)
    assert batcher.split(batch, 6) is None
    batcher.remove("d")
    assert batcher.num_waiting == 6
    assert drain(batcher, 7) == [["a", "b"], ["with a", "between", "new"], ["c"]]


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
    exercise(FcfsBatches(3), seed)
    exercise(WmaBatcher(150, first_arrived, 300, [None, 4][seed % 2]), seed)
    exercise(WmaBatcher(150, HighestResponseRatio(tokens_per_second), 300), seed)


def test_more_open_batches_than_the_first_columns_hold() -> None:
    batcher = WmaBatcher(1, first_arrived)
    assert batches_of(batcher, [(2, 2)] * 150) == [[index] for index in range(150)]


@pytest.mark.parametrize(("bound", "least"), [("memory_tokens", 28), ("wma_threshold", 47), ("max_batch_size", 2)])
def test_integrity_notices_a_batch_over_its_bounds(bound: str, least: int) -> None:
    batcher = WmaBatcher(1e9, first_arrived)
    batcher.add(make_job("a", 5, 5), 0)
    batcher.add(make_job("b", 5, 9), 0)
    setattr(batcher, bound, least)
    batcher.check_integrity()
    setattr(batcher, bound, least - 1)
    with pytest.raises(IntegrityError, match="bounds"):
        batcher.check_integrity()


def tokens_per_second(batch_size: int, prompt_len: int, predicted_len: int) -> float:
    return float(predicted_len)


@pytest.mark.parametrize(
    ("waited_s", "service_s", "expected"),
    [(10, 5, 3), (4, 1, 5), (30, 20, 2.5), (0, 7, 1), (3, 0, math.inf), (3, math.inf, 1)],
)
def test_response_ratio(waited_s: float, service_s: float, expected: float) -> None:
    """Section 1.6 example 1, and the ends of the scale."""
    assert response_ratio(waited_s, service_s) == expected


def _waiting_batch(queue: BatchQueue, name: str, waited_s: float, service_s: int, priority: int = 0) -> FormedBatch:
    batch = queue.new_batch(0.0)
    batch.insert(make_job(name, 1, service_s, arrived_at=100 - waited_s, priority=priority))
    queue.put(batch)
    return batch


def test_the_second_of_the_example_goes_first() -> None:
    queue = BatchQueue(HighestResponseRatio(tokens_per_second))
    _waiting_batch(queue, "a", 10, 5)
    _waiting_batch(queue, "b", 4, 1)
    _waiting_batch(queue, "c", 30, 20)
    _waiting_batch(queue, "urgent", 0, 1000, priority=-1)
    order = [queue.pull(100) for _ in range(4)]
    assert [batch.jobs[0].request_id for batch in order if batch] == ["urgent", "b", "a", "c"]


def test_equal_ratios_go_by_arrival_then_by_forming() -> None:
    queue = BatchQueue(HighestResponseRatio(tokens_per_second))
    _waiting_batch(queue, "late", 10, 5)
    _waiting_batch(queue, "early", 20, 10)
    _waiting_batch(queue, "late2", 10, 5)
    order = [queue.pull(100) for _ in range(3)]
    assert [batch.jobs[0].request_id for batch in order if batch] == ["early", "late", "late2"]


def test_the_longest_wait_and_the_shape_of_the_whole_batch_count() -> None:
    asked: list[tuple[int, int, int]] = []

    def estimate(*shape: int) -> float:
        asked.append((shape[0], shape[1], shape[2]))
        return 10.0

    choice = HighestResponseRatio(estimate)
    batch = FormedBatch(0, 0.0)
    batch.insert(make_job("a", 7, 3, arrived_at=40))
    batch.insert(make_job("b", 5, 9, arrived_at=20))
    assert choice.ratio(batch, 100) == 9
    assert asked == [(2, 7, 9)]


def test_a_long_batch_is_not_starved_by_short_ones() -> None:
    batcher = WmaBatcher(1e9, HighestResponseRatio(tokens_per_second), 1)
    batcher.add(make_job("long", 1, 50, arrived_at=0), 0)
    served = []
    for now in range(1, 120):  # a short one comes every second, and one batch a second is pulled
        batcher.add(make_job(f"short{now}", 1, 1, arrived_at=now - 1), now)
        batch = batcher.pull(now)
        assert batch is not None
        served.append(batch.jobs[0].request_id)
    # Short ones are pulled with R = 2; the long one has that ratio at 50 s, and came first.
    assert served.index("long") == 49


def test_the_story_of_a_choice_has_the_rivals_ratios() -> None:
    """R = (T_q + T_s) / T_s: 3 of the chosen one, 2 and 1.5 of the others."""
    queue = BatchQueue(choice := HighestResponseRatio(tokens_per_second))
    chosen = _waiting_batch(queue, "a", waited_s=20, service_s=10)
    _waiting_batch(queue, "b", waited_s=10, service_s=20)
    _waiting_batch(queue, "c", waited_s=10, service_s=10)
    assert queue.pull(100) is chosen
    story = choice.story(chosen, queue, 100)
    assert story == {"queued_s": 20, "service_s": 10, "response_ratio": 3, "rival_ratios": "2.00, 1.50"}
