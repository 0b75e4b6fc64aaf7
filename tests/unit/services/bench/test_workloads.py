"""Seeded workloads and the prompts of their requests."""

from __future__ import annotations

import random
import statistics
from collections import Counter

import pytest

from services.bench.requests import FIRST_ID, BenchRequest, PromptPart, clipped
from services.bench.workloads import (
    LONG_LENS,
    LONG_PERIOD,
    OUTPUT_LENS,
    PROMPT_LENS,
    SHORT_LENS,
    WORKLOADS,
    ZIPF_OUTPUT_LENS,
    ZIPF_PROMPT_LENS,
    ZipfRanks,
    make_workload,
)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_one_workload(name: str) -> None:
    requests = make_workload(name, 50, seed=7)
    assert requests == make_workload(name, 50, seed=7)
    assert requests != make_workload(name, 50, seed=8)
    assert [request.id for request in requests] == list(range(50))


def test_uniform_lengths() -> None:
    requests = make_workload("uniform", 2000, seed=1)
    lens = [request.output_tokens for request in requests]
    assert (min(lens), max(lens)) == OUTPUT_LENS
    assert statistics.fmean(lens) == pytest.approx(sum(OUTPUT_LENS) / 2, rel=0.05)
    assert all(PROMPT_LENS[0] <= request.prompt_tokens <= PROMPT_LENS[1] for request in requests)


def test_skewed_lengths() -> None:
    lens = [request.output_tokens for request in make_workload("skewed", 2000, seed=1)]
    assert OUTPUT_LENS[0] <= min(lens) and max(lens) <= OUTPUT_LENS[1]
    assert statistics.median(lens) == pytest.approx(28, abs=2)
    assert statistics.fmean(lens) > 1.3 * statistics.median(lens)


def test_hol_has_one_long_output_in_every_period() -> None:
    requests = make_workload("hol", 10 * LONG_PERIOD, seed=3)
    for start in range(0, len(requests), LONG_PERIOD):
        kinds = Counter(request.kind for request in requests[start : start + LONG_PERIOD])
        assert kinds == {"long": 1, "short": LONG_PERIOD - 1}
    for request in requests:
        low, high = LONG_LENS if request.kind == "long" else SHORT_LENS
        assert low <= request.output_tokens <= high


def test_hol_burst_is_hol_with_the_long_ones_first() -> None:
    burst, spread = make_workload("hol-burst", 60, seed=3), make_workload("hol", 60, seed=3)
    assert [request.kind for request in burst] == ["long"] * 5 + ["short"] * 55
    assert sorted(request.parts[0].seed for request in burst) == sorted(request.parts[0].seed for request in spread)


def test_zipf_lengths_are_bounded_and_mostly_short() -> None:
    requests = make_workload("zipf", 2000, seed=1)
    outputs = [request.output_tokens for request in requests]
    assert min(outputs) == ZIPF_OUTPUT_LENS[0] and max(outputs) <= ZIPF_OUTPUT_LENS[1]
    assert all(ZIPF_PROMPT_LENS[0] <= request.prompt_tokens <= ZIPF_PROMPT_LENS[1] for request in requests)
    assert statistics.median(outputs) < statistics.fmean(outputs) / 1.5


def test_zipf_weights() -> None:
    zipf, rng = ZipfRanks(3, 1.0), random.Random(0)
    counts = Counter(zipf.draw(rng) for _ in range(11_000))
    assert counts[0] == pytest.approx(6000, rel=0.05)
    assert counts[1] == pytest.approx(3000, rel=0.05)
    assert counts[2] == pytest.approx(2000, rel=0.1)


def test_prefix_groups_share_the_first_tokens() -> None:
    requests = make_workload("prefix", 200, seed=1, num_groups=4, prefix_tokens=32)
    groups: dict[tuple[int, ...], int] = Counter(tuple(request.prompt_ids(1000, salt=5)[:32]) for request in requests)
    assert len(groups) == 4
    assert max(groups.values()) > 2 * min(groups.values())
    assert len({tuple(request.prompt_ids(1000, salt=5)) for request in requests}) == 200


def test_salt_gives_other_prompts_of_the_same_length() -> None:
    request = BenchRequest(0, 8, (PromptPart(1, 20), PromptPart(2, 30)))
    ids = request.prompt_ids(4096, salt=1)
    assert ids == request.prompt_ids(4096, salt=1)
    assert ids != request.prompt_ids(4096, salt=2)
    assert len(ids) == request.prompt_tokens == 50
    assert all(FIRST_ID <= token < 4096 for token in ids)
    assert len(request.prompt_text(salt=1).split()) == 50
    assert request.prompt_text(salt=1) != request.prompt_text(salt=2)


def test_salt_marks_a_given_text_at_its_beginning() -> None:
    request = BenchRequest(0, 8, text="Say hello.")
    assert request.prompt_text(salt=0) == "Say hello."
    assert request.prompt_text(salt=255) == "(ff) Say hello."


def test_clipped_keeps_what_is_shared() -> None:
    shared = PromptPart(1, 100)
    long, short = BenchRequest(0, 500, (shared, PromptPart(2, 100))), BenchRequest(1, 5, (shared, PromptPart(3, 10)))
    cut, kept = clipped([long, short], max_prompt_tokens=120, max_output_tokens=50)
    assert cut == BenchRequest(0, 50, (shared, PromptPart(2, 20)))
    assert kept == short
    assert clipped([long], None, None) == [long]
