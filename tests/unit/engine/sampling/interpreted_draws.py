"""The kernel that draws tokens, in Triton's interpreter, against the compiled sampler and the law.

``test_device_draws.py`` runs them by night, ``test_triton_attention.py`` the small ones by day.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.gpu_models import model_config, random_weights
from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.kv_pool import KVPool
from farsight.engine.native.sampler import NativeSampler
from farsight.engine.sampling.device_draws import DeviceDraws, DeviceSampler
from farsight.engine.sampling.sampler import NO_TOKEN
from farsight.engine.steps.backends import GraphBackend, TorchBackend
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver
from tests.unit.engine.sampling.samplers import History, params

CPU = torch.device("cpu")
EOS = (2,)
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.1},
]


def sampler(vocab_size: int, max_rows: int = 64) -> DeviceSampler:
    return DeviceSampler(EOS, DeviceDraws(max_rows, vocab_size, CPU))


def test_small_draws_are_those_of_the_compiled_sampler() -> None:
    """Tied logits, of several tiles; and a row that has no token."""
    vocab_size = 4500
    logits = (3 * torch.randn(len(OPTIONS) + 1, vocab_size, generator=torch.Generator().manual_seed(1))).round()
    logits[-1, 7] = math.nan
    chosen = [params(**{"temperature": 0.8, "seed": 2**63 + 5} | options) for options in [*OPTIONS, {}]]
    found = sampler(vocab_size).sample(logits, chosen, range(len(chosen)))
    assert found == NativeSampler(EOS).sample(logits, chosen, range(len(chosen)))
    assert found[-1] == NO_TOKEN


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [61, 1000, 9000])
def test_random_rows(vocab_size: int, tied: bool) -> None:
    """All kinds of parameters, masks and histories; the interpreter rounds where a GPU has a fused multiply-add."""
    from tests.unit.engine.native.test_native_sampler import Rows  # imports transformers, which takes seconds

    rows = Rows(vocab_size, 40, tied=tied)
    ours, theirs = rows.sample(sampler(vocab_size)), rows.sample(NativeSampler(EOS))
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) == 0


def test_rows_at_the_reach_of_float32() -> None:
    largest = 3.4028234e38
    rows = torch.full((6, 300), -math.inf)
    rows[0, 7] = -largest  # the only token
    rows[1, 7], rows[1, 8] = largest, -largest
    rows[2] = -largest
    rows[3] = largest
    rows[4, 299] = 1e-45
    rows[5, 7] = math.inf
    for options in ({}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.5}, {"top_k": 200, "top_p": 1 - 2**-53}):
        for temperature in (5e-324, 1.0, 1e308):
            chosen = [params(temperature=temperature, seed=4, **options)] * 6
            tokens = sampler(300).sample(rows, chosen, range(6))
            assert tokens[:2] == [7, 7] and tokens[4:] == [299, NO_TOKEN]
            assert 0 <= tokens[2] < 300 and 0 <= tokens[3] < 300


def test_ties_at_the_border_of_the_nucleus() -> None:
    """Where logits are equal, the lowest ids go; at the border of top-k all stay."""
    for options in ({"top_p": 0.5}, {"top_p": 0.47}, {"top_k": 3}, {"top_k": 3, "top_p": 0.5}, {"min_p": 1.0}):
        chosen = [params(temperature=1.0, seed=seed, **options) for seed in range(12)]
        found = sampler(64).sample(torch.zeros(12, 64), chosen, range(12))
        assert found == NativeSampler(EOS).sample(torch.zeros(12, 64), chosen, range(12))


LIMITS: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 6, "min_p": 0.02}]


@pytest.mark.parametrize("number", range(len(LIMITS)))
def test_the_law_is_that_of_transformers(number: int) -> None:
    """Chi-square of 200 draws; one failure of all settings would be by chance once in a thousand runs."""
    from scipy.stats import chi2

    from tests.unit.engine.native.test_native_sampler import probabilities_and_scores

    num_draws, vocab_size = 200, 40
    row = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(number))
    chosen = [params(seed=number, temperature=0.9, **LIMITS[number])] * num_draws
    tokens = sampler(vocab_size, num_draws).sample(row.expand(num_draws, -1).contiguous(), chosen, range(num_draws))
    law = probabilities_and_scores(row, chosen[0], History([0], 1))[0]
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab_size).double()
    assert counts[law == 0].sum() == 0
    expected, found, statistic, degrees = 0.0, 0.0, 0.0, -1
    for token in law.argsort().tolist():  # rare ones together, as the statistic asks for
        expected += num_draws * float(law[token])
        found += float(counts[token])
        if expected >= 10:
            statistic += (found - expected) ** 2 / expected
            degrees += 1
            expected = found = 0.0
    assert statistic < chi2.ppf(1 - 0.001 / len(LIMITS), max(degrees, 1)), (statistic, degrees)


def test_recorded_steps_draw_what_computed_ones_draw(tmp_path: Path) -> None:
    """Steps replayed with tokens drawn in them, got ready or not, against a step whose logits the processor draws from;
    with rows that are adjusted behind the step."""
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 200}
    config = model_config("tiny", tmp_path, num_attention_heads=2, num_key_value_heads=1, head_dim=16, **shape)
    weights = random_weights(config, torch.float32, CPU.type)
    drivers, replayed = [], []
    for graphs in (True, False):
        pool = KVPool(config, num_blocks=40, block_size=16, dtype=torch.float32)
        attention = TorchAttention(config.sliding_windows)
        if graphs:
            sizes, draws = StepSizes(8, 8), DeviceDraws(8, config.vocab_size, CPU)

            def capture(run: Any) -> Any:
                return lambda: replayed.append(run())

            backend: TorchBackend = GraphBackend(
                config, weights, pool, 128, attention, sizes, capture, lambda: None, draws=draws
            )
        else:
            backend = TorchBackend(config, weights, pool, 128, attention)
        own = None if graphs else NativeSampler(config.eos_token_ids)
        drivers.append(Driver(ModelRunner(config, pool, backend, 128, own)))
    assert isinstance(drivers[0].runner.sampler, DeviceSampler)
    rng = random.Random(0)
    kinds = [*OPTIONS, {"repetition_penalty": 1.3}, {"top_p": 0.9, "logprobs": 2}]
    for driver in drivers:
        for number, options in enumerate(kinds):
            driver.add(f"s{number}", [3 + number, 4, 5], **{"temperature": 0.8, "seed": number} | options)
            driver.step(**{f"s{number}": 3})
    for _ in range(6):
        names = rng.sample([f"s{number}" for number in range(len(kinds))], rng.randint(1, 8))
        found, expected = (driver.step(**dict.fromkeys(names, 1)) for driver in drivers)
        assert list(found) == list(expected)
    assert len(replayed) == 6
