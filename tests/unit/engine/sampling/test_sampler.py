"""Draws depend on (seed, position) alone and follow the distribution that transformers' warpers define."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from farsight.core.request import SamplingParams
from farsight.engine.sampling.sampler import Sampler, counter_uniform, warp_logits
from tests.unit.engine.sampling.samplers import History, each_sampler


def params(**kwargs) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **({"temperature": 1.0} | kwargs))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


def transformers_scores(logits: torch.Tensor, param: SamplingParams) -> torch.Tensor:
    scores = TemperatureLogitsWarper(param.temperature)(None, logits)
    if param.top_k:
        scores = TopKLogitsWarper(param.top_k)(None, scores)
    if param.top_p < 1:
        scores = TopPLogitsWarper(param.top_p)(None, scores)
    return scores


def test_warpers_are_those_of_transformers():
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    chosen = [
        params(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 5, 40, 500]),
            top_p=rng.choice([1.0, 0.9, 0.5, 0.01]),
        )
        for _ in range(200)
    ]
    logits = 3 * torch.randn(len(chosen), 97, generator=generator)
    logits[::3] = logits[::3].round()  # ties
    ours = warp_logits(logits, chosen)
    for row, param in enumerate(chosen):
        theirs = transformers_scores(logits[row : row + 1], param)[0]
        # Which of equal logits top-p drops is up to the order of a sort: theirs is not stable.
        kept = [logits[row][each.isfinite()].sort().values for each in (ours[row], theirs)]
        assert torch.equal(*kept), param
        torch.testing.assert_close(ours[row].softmax(-1).sort().values, theirs.softmax(-1).sort().values)


@each_sampler
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"temperature": 2.0, "top_k": 8, "top_p": 0.9}]
)
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_frequencies(settings, along, make_sampler):
    num_draws, vocab_size = 20_000, 12
    row = 1.5 * torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(2))
    seeds = [5] * num_draws if along == "positions" else range(num_draws)
    positions = range(num_draws) if along == "positions" else [17] * num_draws
    chosen = [params(seed=seed, **settings) for seed in seeds]
    tokens = make_sampler().sample(row.expand(num_draws, -1), chosen, positions)
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab_size).double()
    probabilities = transformers_scores(row, params(**settings))[0].double().softmax(-1)
    assert chi_square(counts, probabilities) < 31.3  # 99.9 % of the distribution with 11 degrees of freedom


def test_uniforms_of_neighbours_are_independent():
    """Pairs of neighbouring seeds, positions, and seeds one increment of the generator apart fill the square evenly."""
    golden = 0x9E3779B97F4A7C15
    for seed_step, position_step in ((1, 0), (0, 1), (golden, 0), (golden, 1), (golden, -1)):
        counts = torch.zeros(10, 10)
        for i in range(10_000):
            x = counter_uniform(i, 100)
            y = counter_uniform((i + seed_step) % 2**64, 100 + position_step)
            counts[int(10 * x), int(10 * y)] += 1
        assert (
            chi_square(counts.flatten().double(), torch.full((100,), 0.01, dtype=torch.float64)) < 148.2
        )  # 99.9 %, 99 dof


def test_uniform_is_in_range_for_extreme_counters():
    values = [counter_uniform(seed, position) for seed in (0, 1, 2**63, 2**64 - 1) for position in (0, 1, 2**40)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)


@each_sampler
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_low_temperature_is_greedy(temperature, make_sampler):
    logits = 5 * torch.randn(30, 64, generator=torch.Generator().manual_seed(3))
    greedy = make_sampler().sample(logits, [params(temperature=0)] * 30, range(30))
    assert greedy == logits.argmax(-1).tolist()
    assert make_sampler().sample(logits, [params(temperature=temperature, top_p=0.9)] * 30, range(30)) == greedy


def test_greedy_rows_do_not_pay_for_sampling(monkeypatch):
    monkeypatch.setattr(Sampler, "_draw", None)
    assert Sampler().sample(torch.eye(3), [params(temperature=0)] * 3, [1, 2, 3]) == [0, 1, 2]


@each_sampler
def test_logits_are_not_changed(make_sampler):
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    chosen = [params(top_k=3, top_p=0.5, logit_bias=((1, 9.0),))] * 4
    make_sampler().sample(logits, chosen, range(4), [History([], 0)] * 4)
    assert torch.equal(logits, before)
