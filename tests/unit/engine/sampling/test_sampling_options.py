"""Penalties, biases, min-p and log probabilities against transformers; how outputs end; what comes with a resume."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from farsight.core.config.engine import EngineConfig
from farsight.core.messages.plans import Plan, Slot
from farsight.core.messages.tokens import TokenDelta, TokenLogprobs
from farsight.core.request import Request, SamplingParams
from farsight.engine.build import build_worker
from farsight.engine.engine import Engine
from farsight.engine.sampling.logit_adjustments import adjust_logits
from farsight.engine.sampling.sampler import warp_logits
from farsight.engine.worker import Worker
from tests.unit.engine.sampling.samplers import History, MakeSampler, each_sampler, params
from tests.unit.engine.small_models import load_reference

VOCAB = 61
EOS = (2, 7)


def adjusted_by_transformers(row: torch.Tensor, param: SamplingParams, history: History) -> torch.Tensor:
    """One row; presence and frequency, which transformers lacks, from their definition."""
    ids = torch.tensor([history.token_ids])
    scores = row[None].clone()
    if param.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(param.repetition_penalty)(ids, scores)
    counts = torch.bincount(torch.tensor(history.token_ids[history.prompt_len :], dtype=torch.int64), minlength=VOCAB)
    scores = scores - param.frequency_penalty * counts - param.presence_penalty * (counts > 0)
    if param.logit_bias:
        biases: list[list[list[int] | float]] = [[[token_id], float(bias)] for token_id, bias in param.logit_bias]
        scores = SequenceBiasLogitsProcessor(biases)(ids, scores)
    if param.min_tokens:
        ends = [*param.stop_token_ids, *(() if param.ignore_eos else EOS)]
        if ends:
            least = MinNewTokensLengthLogitsProcessor(history.prompt_len, param.min_tokens, ends)
            scores = least(ids, scores)
    return scores[0]


def random_params(rng: random.Random) -> SamplingParams:
    return params(
        temperature=rng.choice([0.0, 0.5, 1.3]),
        min_p=rng.choice([0.0, 0.1, 0.7, 1.0]),
        top_k=rng.choice([0, 9]),
        top_p=rng.choice([1.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5, -2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4, -1.0]),
        logit_bias=rng.choice([(), (), ((3, 5.0), (7, -100.0), (60, 100.0))]),
        min_tokens=rng.choice([0, 0, 4, 50]),
        stop_token_ids=rng.choice([(), (5, 6)]),
        ignore_eos=rng.random() < 0.3,
        seed=rng.getrandbits(64),
    )


def random_history(rng: random.Random) -> History:
    prompt_len = rng.randint(1, 20)
    return History([rng.randrange(VOCAB) for _ in range(prompt_len + rng.randrange(12))], prompt_len)


@pytest.fixture
def mixed() -> tuple[torch.Tensor, list[SamplingParams], list[History]]:
    """Rows of every kind, side by side."""
    rng = random.Random(0)
    logits = 3 * torch.randn(150, VOCAB, generator=torch.Generator().manual_seed(0))
    return logits, [random_params(rng) for _ in range(150)], [random_history(rng) for _ in range(150)]


def test_adjustments_are_those_of_transformers(mixed: Any) -> None:
    logits, chosen, histories = mixed
    before = logits.clone()
    ours = adjust_logits(logits, chosen, histories, EOS)
    assert torch.equal(logits, before)
    for row, (param, history) in enumerate(zip(chosen, histories, strict=True)):
        torch.testing.assert_close(ours[row], adjusted_by_transformers(logits[row], param, history))


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_is_that_of_transformers(min_p: float) -> None:
    logits = 3 * torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(1))
    ours = warp_logits(logits, [params(temperature=1.0, min_p=min_p)] * 60)
    theirs = MinPLogitsWarper(min_p)(torch.LongTensor(), logits)
    assert torch.equal(ours == -torch.inf, theirs == -torch.inf)


@each_sampler
def test_a_row_draws_the_same_alone_and_among_others(mixed: Any, make_sampler: MakeSampler) -> None:
    logits, chosen, histories = mixed
    positions = [len(history.token_ids) for history in histories]
    sampler = make_sampler(EOS)
    together = sampler.sample(logits, chosen, positions, histories)
    argmax = logits.argmax(-1).tolist()
    assert sampler.sample(logits, chosen, positions, histories, best=argmax) == together
    for row in range(0, 150, 3):
        alone = sampler.sample(logits[row : row + 1], [chosen[row]], [positions[row]], [histories[row]])
        assert alone == [together[row]]


@each_sampler
def test_plain_rows_take_what_is_known_and_touch_no_logits(make_sampler: MakeSampler) -> None:
    assert make_sampler().sample(None, [params()] * 3, [1, 2, 3], best=[4, 5, 6]) == [4, 5, 6]  # type: ignore[arg-type]


@each_sampler
def test_greedy_rows_are_greedy_over_adjusted_logits(make_sampler: MakeSampler) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 2.5]] * 3)
    histories = [History([2], 1), History([0, 2], 1), History([0], 1)]
    chosen = [params(repetition_penalty=2.0), params(presence_penalty=0.6), params(logit_bias=((0, 9.0),))]
    assert make_sampler().sample(logits, chosen, [1, 2, 1], histories) == [3, 3, 0]


@each_sampler
def test_an_end_comes_neither_before_min_tokens_nor_never(make_sampler: MakeSampler) -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0]] * 2)
    chosen = [params(min_tokens=3)] * 2
    histories = [History([1] * 6, 4), History([1] * 7, 4)]
    assert make_sampler((2,)).sample(logits, chosen, [6, 7], histories) == [3, 2]


# The whole engine, on a tiny model


BACKENDS = {"torch": 4, "native": 16}
"""With the size of their blocks: small ones cut more."""

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def make_engine(model_dir: Path, backend: str, max_batch_tokens: int = 1024) -> Engine:
    config = EngineConfig(
        kv_memory="1MiB",
        block_size=BACKENDS[backend],
        num_threads=1,
        max_batch_tokens=max_batch_tokens,
        backend=backend,
    )
    return Engine(model_dir, dtype="float32", engine=config)


@pytest.fixture
def engine(tiny_model_dir: Path) -> Engine:
    return make_engine(tiny_model_dir, "torch")


def run(engine: Engine, prompts: list[list[int]], *sampling: SamplingParams) -> list[list[TokenDelta]]:
    order = [engine.submit(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)]
    deltas: dict[str, list[TokenDelta]] = {request_id: [] for request_id in order}
    while not engine.idle:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    engine.check_integrity()
    return [deltas[request_id] for request_id in order]


def ids_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@torch.inference_mode()
def check_logprobs(reference: Any, known: list[int], found: list[TokenLogprobs], num_top: int) -> None:
    """The last ``len(found)`` of the known tokens."""
    logprobs = reference(torch.tensor([known])).logits[0].float().log_softmax(-1)
    for i, (ids, values) in enumerate(found, len(known) - len(found)):
        assert len(ids) == len(values) == num_top + 1
        assert ids[0] == known[i]
        torch.testing.assert_close(torch.tensor(values), logprobs[i - 1][list(ids)], atol=1e-3, rtol=0)
        best = logprobs[i - 1].topk(num_top).values if num_top else torch.tensor([])
        torch.testing.assert_close(torch.tensor(values[1:]), best, atol=1e-3, rtol=0)


@each_backend
def test_logprobs_are_those_of_transformers(tiny_model_dir: Path, backend: str) -> None:
    """Log-probabilities of greedy, drawn and adjusted outputs, next to a request that wants none."""
    engine = make_engine(tiny_model_dir, backend)
    reference = load_reference(tiny_model_dir)
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (1, 9, 30, 5)]
    sampling = [
        params(max_new_tokens=12, ignore_eos=True, logprobs=4),
        params(max_new_tokens=12, ignore_eos=True, logprobs=0, temperature=1.0, seed=3),
        params(max_new_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=True, repetition_penalty=1.5),
        params(max_new_tokens=12, ignore_eos=True),
    ]
    outputs = run(engine, prompts, *sampling)
    assert all(delta.logprobs is None for delta in outputs[3])
    for prompt, param, deltas in zip(prompts[:3], sampling, outputs, strict=False):
        found = [each for delta in deltas if delta.logprobs for each in delta.logprobs.output]
        assert len(found) == 12
        check_logprobs(reference, prompt + ids_of(deltas), found, param.logprobs or 0)
    first = outputs[2][0].logprobs
    assert first is not None
    check_logprobs(reference, prompts[2], list(first.prompt), 2)
    assert len(first.prompt) == 29
    assert all(delta.logprobs and not delta.logprobs.prompt for delta in outputs[2][1:])


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 7, 64])
@each_backend
def test_prompt_logprobs_of_prompts_in_chunks(tiny_model_dir: Path, max_batch_tokens: int, backend: str) -> None:
    engine = make_engine(tiny_model_dir, backend, max_batch_tokens)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (1, 2, 20)]
    sampling = [params(max_new_tokens=2, logprobs=1, prompt_logprobs=True, ignore_eos=True)] * 3
    reference = load_reference(tiny_model_dir)
    for prompt, deltas in zip(prompts, run(engine, prompts, *sampling), strict=True):
        assert deltas[0].logprobs is not None
        found = deltas[0].logprobs.prompt
        assert len(found) == len(prompt) - 1
        check_logprobs(reference, prompt, list(found), 1)


def test_benchmark_len_says_where_the_output_ends(engine: Engine) -> None:
    """EOS, which is made certain here, does not end it before."""
    always_eos = {"logit_bias": ((2, 100.0),)}
    outputs = run(
        engine,
        [[5, 6]] * 3,
        params(benchmark_len=7, **always_eos),
        params(benchmark_len=70, **always_eos),
        params(**always_eos),
    )
    assert [(len(ids_of(deltas)), deltas[-1].finish_reason) for deltas in outputs] == [
        (7, "stop"),
        (50, "length"),
        (1, "stop"),
    ]


def test_min_tokens_holds_back_eos_stop_ids_and_stop_strings(engine: Engine) -> None:
    x = engine.tokenizer.encode("x").ids[0]
    outputs = run(
        engine,
        [[5, 6]] * 3,
        params(min_tokens=6, logit_bias=((2, 100.0),)),
        params(min_tokens=6, logit_bias=((5, 100.0),), stop_token_ids=(5,)),
        params(min_tokens=6, logit_bias=((x, 100.0),), stop=("x",)),
    )
    assert [len(ids_of(deltas)) for deltas in outputs] == [7, 7, 7]
    assert {deltas[-1].finish_reason for deltas in outputs} == {"stop"}
    assert "".join(delta.text for delta in outputs[2]) == "x" * 6


def attempt(worker: Worker, request: Request) -> list[TokenDelta]:
    slot = Slot(request.request_id, request.attempt, 99, 99, False, 0, request)
    worker.offer_plan(Plan("w", worker.take_over().lease, 1, 0, 0, (slot,)))
    deltas = []
    while (batch := worker.begin_step()) is not None:
        deltas += [output.delta for output in worker.finish_step(batch, worker.execute(batch))]
    return deltas


def test_a_resumed_request_says_and_knows_what_it_would_have(worker: Worker) -> None:
    """Every option that looks at the tokens so far, and log probabilities, wherever the first attempt broke off."""
    sampling = params(
        max_new_tokens=12,
        temperature=0.8,
        seed=5,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        min_tokens=3,
        logprobs=2,
        prompt_logprobs=True,
        benchmark_len=11,
    )
    whole = attempt(worker, Request("r", 0, "i", (5, 6, 7), sampling))
    tokens = tuple(ids_of(whole))
    assert len(tokens) == 11
    for cut in (1, 4, 10):
        resumed = attempt(worker, Request("r", cut, "i", (5, 6, 7), sampling, tokens[:cut]))
        assert [each.token_ids for each in resumed] == [each.token_ids for each in whole[cut:]]
        for ours, first in zip(resumed, whole[cut:], strict=True):
            assert ours.logprobs is not None and first.logprobs is not None
            assert (ours.start, ours.text, ours.finish_reason) == (first.start, first.text, first.finish_reason)
            assert (ours.attempt, ours.logprobs.prompt) == (cut, ())
            assert ours.logprobs.output[0][0] == first.logprobs.output[0][0]
            assert ours.logprobs.output[0][1] == pytest.approx(first.logprobs.output[0][1], abs=1e-4)


def test_preemption_in_the_middle_of_the_prompt_tells_nothing_twice(tiny_model_dir: Path) -> None:
    config = EngineConfig(kv_memory="1MiB", block_size=4, num_threads=1, max_batch_tokens=4, prefix_cache=False)
    worker = build_worker(tiny_model_dir, "float32", config, incarnation="w")
    request = Request("r", 0, "i", tuple(range(10, 20)), params(max_new_tokens=2, logprobs=0, prompt_logprobs=True))
    lease = worker.take_over().lease
    for num_preemptions in (0, 1):
        slot = Slot("r", 0, 99, 99, False, num_preemptions, request)
        worker.offer_plan(Plan("w", lease, num_preemptions + 1, 0, 0, (slot,)))
        batch = worker.begin_step()
        assert batch is not None and batch.items[0].start == 0
        assert worker.finish_step(batch, worker.execute(batch)) == []
    while (batch := worker.begin_step()) is not None:
        outputs = worker.finish_step(batch, worker.execute(batch))
        if outputs:
            break
    found = outputs[0].delta.logprobs
    assert found is not None
    assert [ids[0] for ids, _ in found.prompt] == list(range(11, 20))


def test_prompt_log_probabilities_take_nothing_from_the_prefix_cache(tiny_model_dir: Path) -> None:
    """They come with the computation: the same prompt again, also of another request, tells the same."""
    engine = Engine(tiny_model_dir, dtype="float32", engine=EngineConfig(kv_memory="1MiB", num_threads=1, block_size=4))
    wanted = params(max_new_tokens=2, logprobs=0, prompt_logprobs=True)
    prompt = list(range(10, 30))
    told = []
    for sampling in (params(max_new_tokens=2), wanted, wanted):
        engine.submit(prompt, sampling)
        while not engine.idle:
            told += [delta.logprobs.prompt for delta in engine.step() if delta.logprobs and delta.logprobs.prompt]
    assert len(told) == 2
    assert [ids[0] for ids, _ in told[0]] == prompt[1:]
    assert told[0] == told[1]
