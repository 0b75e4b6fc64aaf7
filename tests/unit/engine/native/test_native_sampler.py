"""The compiled sampler: its law, its roundings, and that a row knows nothing of other rows, threads and registers."""

from __future__ import annotations

import ctypes
import math
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from farsight.core.request import SamplingParams
from farsight.engine.native import library
from farsight.engine.native.sampler import NativeSampler
from farsight.engine.sampling.sampler import NO_TOKEN, Sampler, counter_uniform
from farsight.engine.sampling.token_masks import MaskedRows
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.native import exact_sampler
from tests.unit.engine.sampling.samplers import History, MakeSampler, each_sampler, params

EOS = (2,)
NUM_DRAWS = 2000
VOCAB = 700


def law(row: torch.Tensor, param: SamplingParams, history: History) -> torch.Tensor:
    """Probabilities by transformers' processors, and presence and frequency from their definition.

    Which of several tokens with the same logit top-p drops is up to torch's sort; how many is not.
    """
    return probabilities_and_scores(row, param, history)[0]


def probabilities_and_scores(
    row: torch.Tensor, param: SamplingParams, history: History
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.LongTensor([history.token_ids])
    scores = RepetitionPenaltyLogitsProcessor(param.repetition_penalty)(ids, row[None].clone())
    output = torch.tensor(history.token_ids[history.prompt_len :], dtype=torch.int64)
    counts = torch.bincount(output, minlength=len(row))
    scores = scores - param.frequency_penalty * counts - param.presence_penalty * (counts > 0)
    if param.logit_bias:
        biases: list[list[list[int] | float]] = [[[token_id], float(bias)] for token_id, bias in param.logit_bias]
        scores = SequenceBiasLogitsProcessor(biases)(ids, scores)
    changed = scores[0]
    scores = TemperatureLogitsWarper(param.temperature)(ids, scores)
    if param.top_k:
        scores = TopKLogitsWarper(param.top_k)(ids, scores)
    if param.top_p < 1:
        scores = TopPLogitsWarper(param.top_p)(ids, scores)
    if param.min_p:
        scores = MinPLogitsWarper(param.min_p)(ids, scores)
    return scores[0].double().softmax(-1), changed


def settings_of_the_law() -> list[dict[str, Any]]:
    """Sixty of them: every combination of three temperatures and five limits, with four kinds of adjustments."""
    limits: list[dict[str, Any]] = [
        {},
        {"top_p": 0.95},
        {"top_k": 20, "top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 100, "top_p": 0.8, "min_p": 0.01},
    ]
    adjustments: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.4},
        {"logit_bias": ((3, 2.0), (7, -100.0))},
    ]
    return [
        {"temperature": temperature} | limit | adjustment
        for temperature in (0.5, 0.8, 1.5)
        for limit in limits
        for adjustment in adjustments
    ]


LAWS = list(enumerate(settings_of_the_law()))
EACH_DAY = {1, 17, 29, 44}


@each_sampler
@pytest.mark.parametrize(
    ("number", "options"),
    [pytest.param(*each, marks=[] if each[0] in EACH_DAY else pytest.mark.nightly) for each in LAWS],
)
def test_the_law_is_that_of_transformers(make_sampler: MakeSampler, number: int, options: dict[str, Any]) -> None:
    """Chi-square of 2,000 draws; one failure of all 60 settings would be by chance once in a thousand runs."""
    generator = torch.Generator().manual_seed(number)
    row = 2.5 * torch.randn(VOCAB, generator=generator)
    if number % 3 == 0:
        row = row.round()  # ties
    history = History(torch.randint(0, VOCAB, (300,), generator=generator).tolist(), 150)
    chosen = [params(seed=number, **options)] * NUM_DRAWS
    positions = range(1000 * number, 1000 * number + NUM_DRAWS)
    tokens = make_sampler().sample(row.expand(NUM_DRAWS, -1), chosen, positions, [history] * NUM_DRAWS)
    of_tokens, scores = probabilities_and_scores(row, chosen[0], history)
    kinds = scores.unique(return_inverse=True)[1]  # tokens of the same score together
    probabilities = torch.zeros(VOCAB, dtype=torch.float64).index_add_(0, kinds, of_tokens)
    counts = torch.bincount(kinds[torch.tensor(tokens)], minlength=VOCAB).double()
    assert counts[probabilities == 0].sum() == 0
    order = probabilities.argsort()
    expected, found, statistic, degrees = 0.0, 0.0, 0.0, -1
    for kind in order[probabilities[order] > 0].tolist():  # rare ones together, as the statistic asks for
        expected += NUM_DRAWS * float(probabilities[kind])
        found += float(counts[kind])
        if expected >= 10:
            statistic += (found - expected) ** 2 / expected
            degrees += 1
            expected = found = 0.0
    assert statistic < chi2.ppf(1 - 0.001 / len(LAWS), max(degrees, 1)), (statistic, degrees)


def random_params(rng: random.Random) -> SamplingParams:
    return params(
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 40, 500]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.01, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=rng.getrandbits(64),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5, -2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        logit_bias=rng.choice([(), (), ((3, 5.0), (7, -100.0))]),
        min_tokens=rng.choice([0, 0, 4, 50]),
        stop_token_ids=rng.choice([(), (5, 6)]),
        allowed_token_ids=rng.choice([(), (), (), (1, 4, 5, 6, 30)]),
        bad_words=rng.choice([(), (), ((4,), (5, 6))]),
    )


class Rows:
    """Random rows of random parameters; masks for every fourth."""

    def __init__(self, vocab_size: int, num_rows: int, *, tied: bool = False) -> None:
        rng = random.Random(vocab_size + tied)
        self.logits = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        if tied:
            self.logits = self.logits.round()
        self.params = [random_params(rng) for _ in range(num_rows)]
        self.positions = [rng.randrange(1000) for _ in range(num_rows)]
        self.histories = [
            History([rng.randrange(vocab_size) for _ in range(rng.randint(3, 30))], 3) for _ in range(num_rows)
        ]
        masked = range(0, num_rows, 4)
        size = 2 * -(-vocab_size // 16)
        bits = np.random.default_rng(0).integers(0, 256, (len(masked), size), dtype=np.uint8)
        bits[:, 0] = 255
        self.masks = MaskedRows(list(masked), bits, {})

    def sample(self, sampler: Sampler, rows: list[int] | None = None) -> list[int]:
        if rows is None:
            return sampler.sample(self.logits, self.params, self.positions, self.histories, masks=self.masks)
        masked = [(place, row // 4) for place, row in enumerate(rows) if row % 4 == 0]
        bits = self.masks.bits[[index for _, index in masked]]
        return sampler.sample(
            self.logits[rows],
            [self.params[row] for row in rows],
            [self.positions[row] for row in rows],
            [self.histories[row] for row in rows],
            masks=MaskedRows([place for place, _ in masked], bits, {}),
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [40, 61, 1000, 5003])
def test_it_draws_what_torch_draws(vocab_size: int, tied: bool) -> None:
    """But where a random number lies within a rounding of the border between two tokens: once in some 100,000."""
    rows = Rows(vocab_size, 400, tied=tied)
    ours, theirs = rows.sample(NativeSampler(EOS)), rows.sample(Sampler(EOS))
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 1


def test_a_row_knows_nothing_of_other_rows_and_of_threads(tiny_model_dir: Path) -> None:
    rows = Rows(5003, 60)
    alone = NativeSampler(EOS)
    expected = rows.sample(alone)
    assert rows.sample(alone) == expected
    for row in range(0, 60, 7):
        assert rows.sample(alone, [row]) == [expected[row]]
    kwargs: dict[str, Any] = {"num_blocks": 8, "block_size": 16, "backend": "native", "num_threads": 3}
    runner = ModelRunner.from_dir(tiny_model_dir, dtype=torch.float32, **kwargs)
    assert isinstance(runner.sampler, NativeSampler)
    rng = random.Random(0)
    for _ in range(5):
        order = rng.sample(range(60), 41)
        assert rows.sample(runner.sampler, order) == [expected[row] for row in order]


@pytest.mark.parametrize("vocab_size", [61, 1500])
def test_the_roundings_are_those_of_the_contract(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    chosen = [
        params(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 30, 700]),
            top_p=rng.choice([1.0, 0.95, 0.5, 0.999]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.getrandbits(64),
        )
        for _ in range(150)
    ]
    logits = 3 * torch.randn(len(chosen), vocab_size, generator=torch.Generator().manual_seed(3))
    logits[::3] = logits[::3].round()
    found = NativeSampler().sample(logits, chosen, range(150))
    for position, (row, each, token) in enumerate(zip(logits.numpy(), chosen, found, strict=True)):
        uniform = counter_uniform(each.seed, position)
        assert token == exact_sampler.draw(row, each.temperature, each.top_k, each.top_p, each.min_p, uniform), each


def test_ties_at_the_border_of_the_nucleus() -> None:
    """Where logits are equal, the lowest ids go, as many as in transformers; at the border of top-k all stay."""
    row = torch.zeros(64)
    for options, kept in (
        ({"top_p": 0.5}, range(32, 64)),
        ({"top_p": 0.47}, range(33, 64)),
        ({"top_k": 3}, range(64)),
        ({"top_k": 3, "top_p": 0.5}, range(32, 64)),
        ({"min_p": 1.0}, range(64)),
    ):
        assert int((law(row, params(temperature=1.0, **options), History([0], 1)) > 0).sum()) == len(kept)
        for make in (NativeSampler, Sampler):
            chosen = [params(temperature=1.0, seed=seed, **options) for seed in range(2000)]
            assert set(make().sample(row.expand(2000, -1), chosen, [0] * 2000)) == set(kept)


@each_sampler
def test_rows_at_the_reach_of_float32(make_sampler: MakeSampler) -> None:
    largest = 3.4028234e38
    rows = torch.full((6, 300), -math.inf)
    rows[0, 7] = -largest  # the only token
    rows[1, 7], rows[1, 8] = largest, -largest
    rows[2] = -largest
    rows[3] = largest
    rows[4, 299] = 1e-45
    rows[5, 7] = math.nan
    for options in ({}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.5}, {"top_k": 200, "top_p": 1 - 2**-53}):
        for temperature in (5e-324, 1.0, 1e308):
            chosen = [params(temperature=temperature, seed=4, **options)] * 6
            tokens = make_sampler().sample(rows, chosen, range(6))
            assert tokens[:2] == [7, 7] and tokens[4:] == [299, NO_TOKEN]
            assert 0 <= tokens[2] < 300 and 0 <= tokens[3] < 300


@each_sampler
def test_log_probabilities(make_sampler: MakeSampler) -> None:
    rows = 3 * torch.randn(70, 333, generator=torch.Generator().manual_seed(5))
    rows[1, 5], rows[2], rows[3, 8] = math.nan, -math.inf, math.inf
    rows[4, 20:] = -math.inf
    tokens, num_top = [row % 333 for row in range(70)], [row % 25 for row in range(70)]
    order = list(range(69, -1, -1))
    found = make_sampler().token_logprobs(rows, order, [tokens[row] for row in order], [num_top[row] for row in order])
    for row, (ids, values) in zip(order, found, strict=True):
        assert ids[0] == tokens[row] and len(ids) == len(values) == 1 + num_top[row]
        if row in (1, 2, 3):
            assert set(values) == {-9999.0}
            continue
        expected = rows[row].log_softmax(-1).nan_to_num(neginf=-9999.0)
        torch.testing.assert_close(torch.tensor(values), expected[list(ids)], atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(torch.tensor(values[1:]), expected.topk(num_top[row]).values, atol=2e-6, rtol=1e-6)
        assert len(set(ids[1:])) == num_top[row]


@pytest.mark.nightly
@pytest.mark.parametrize("processor", ["x86-64-v3", "x86-64"])
def test_other_registers_draw_the_same(tmp_path: Path, processor: str) -> None:
    """With a fused multiply-add every bit is the same; without one, up to rounding."""
    here = Path(__file__).parent
    flags = [flag for flag in library.COMPILE_FLAGS if not flag.startswith("-march")]
    built = tmp_path / "sampler.so"
    command = ["c++", *flags, f"-march={processor}", f"-I{Path(library.__file__).parent}", "-shared", "-fPIC"]
    subprocess.run([*command, str(here / "sampler_probe.cpp"), "-o", str(built)], check=True)
    other = NativeSampler(EOS)
    other._library = ctypes.CDLL(str(built))
    for vocab_size in (61, 5003):
        rows = Rows(vocab_size, 400)
        assert sum(a != b for a, b in zip(rows.sample(other), rows.sample(NativeSampler(EOS)), strict=True)) <= 1
