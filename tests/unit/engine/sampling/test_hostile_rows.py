"""One row that no token can be chosen for ends alone: the rows beside it get the tokens that they get without it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from farsight.core.errors import IntegrityError
from farsight.core.request import Fault, SamplingParams
from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.weights import load_weights
from farsight.engine.sampling.sampler import NO_TOKEN, likeliest
from farsight.engine.step_results import LoggedTokens
from farsight.engine.steps.backends import GraphBackend
from farsight.engine.steps.careful_steps import CarefulSteps
from farsight.engine.steps.model_runner import ModelRunner
from farsight.engine.steps.recording import Capture
from farsight.services.launch.launch import EMBEDDED_MODEL
from tests.unit.engine.conftest import POISON
from tests.unit.engine.driver import Driver
from tests.unit.engine.sampling.samplers import History, MakeSampler, each_sampler, params

VOCAB = 40
EOS = (2,)
INF = math.inf
ALL_IDS = tuple(range(VOCAB))


NORMAL = [
    params(),
    params(logprobs=3),
    params(temperature=1.0, seed=5),
    params(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=6),
    params(temperature=1.3, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5, seed=7),
    params(logit_bias=((3, 5.0), (7, -100.0)), min_tokens=9),
]

extreme_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 5e-324, 0.8, 2.0, 1e308]),
    top_p=st.sampled_from([5e-324, 0.5, 1 - 2**-53, 1.0]),
    top_k=st.sampled_from([0, 1, VOCAB - 1, VOCAB, 2**40]),
    min_p=st.sampled_from([0.0, 5e-324, 1 - 2**-53, 1.0]),
    seed=st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    repetition_penalty=st.sampled_from([0.01, 1.0, 100.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    logit_bias=st.sampled_from([(), ((0, -1e30),), ((5, 1e30),), tuple((i, -100.0) for i in ALL_IDS)]),
    min_tokens=st.sampled_from([0, 1, 50]),
    stop_token_ids=st.sampled_from([(), (5, 5, 5), ALL_IDS, ALL_IDS[1:]]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 10**6]),
)
broken_values = st.sampled_from([math.nan, INF, -INF, 3.4e38, -3.4e38])
breakage: st.SearchStrategy[dict[int, float]] = st.one_of(
    st.just({}),
    st.dictionaries(st.integers(0, VOCAB - 1), broken_values, min_size=1, max_size=3),
    broken_values.map(lambda value: dict.fromkeys(ALL_IDS, value)),
)


def break_row(row: torch.Tensor, changes: dict[int, float]) -> None:
    for token_id, value in changes.items():
        row[token_id] = value


@each_sampler
@settings(max_examples=150)
@given(extreme_params, breakage, st.integers(0, len(NORMAL)), st.integers(0, 2**32 - 1), st.booleans())
def test_a_hostile_row_changes_no_other_and_never_raises(
    make_sampler: MakeSampler, hostile: SamplingParams, changes: dict[int, float], place: int, seed: int, known: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(NORMAL) + 1, VOCAB, generator=generator)
    break_row(logits[place], changes)
    history = History(torch.randint(0, VOCAB, (12,), generator=generator).tolist(), 8)
    chosen = [*NORMAL[:place], hostile, *NORMAL[place:]]
    others = [row for row in range(len(chosen)) if row != place]
    sampler = make_sampler(EOS)

    def sample(rows: Sequence[int]) -> list[int]:
        best = likeliest(logits[rows]).tolist() if known else None
        histories = [history] * len(rows)
        return sampler.sample(logits[rows], [chosen[row] for row in rows], [12] * len(rows), histories, best)

    together = sample(range(len(chosen)))
    assert [together[row] for row in others] == sample(others)
    assert all(0 <= together[row] < VOCAB for row in others)
    found = together[place]
    assert found == NO_TOKEN or 0 <= found < VOCAB
    if found == NO_TOKEN:
        failure = sampler.why_no_token(logits, place, hostile, history)
        assert failure.reason.startswith("output token 4 cannot be chosen: ")
        assert (failure.fault is Fault.MODEL) == (not math.isfinite(logits[place].amax()))
    else:
        assert math.isfinite(logits[place].amax())
        assert logits[place, found] > -INF
        forbidden = {*hostile.stop_token_ids, *(() if hostile.ignore_eos else EOS)} if hostile.min_tokens > 4 else set()
        assert found not in forbidden


@each_sampler
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("changes", "options", "fault", "words"),
    [
        ({7: math.nan}, {}, Fault.MODEL, "the model's logits hold NaN"),
        (dict.fromkeys(ALL_IDS, math.nan), {}, Fault.MODEL, "hold NaN"),
        ({0: INF}, {}, Fault.MODEL, "hold +inf"),
        ({0: INF, 39: math.nan}, {}, Fault.MODEL, "hold NaN"),
        (dict.fromkeys(ALL_IDS, -INF), {}, Fault.MODEL, "are all -inf"),
        ({}, {"min_tokens": 5, "stop_token_ids": ALL_IDS}, Fault.REQUEST, "min_tokens = 5 forbids"),
        (
            {},
            {"min_tokens": 5, "stop_token_ids": ALL_IDS[:2] + ALL_IDS[3:]},
            Fault.REQUEST,
            "39 stop_token_ids and the",
        ),
        ({3: 3e38}, {"repetition_penalty": 0.01}, Fault.REQUEST, "beyond the largest float32"),
    ],
)
def test_a_row_without_a_token_is_told_why(
    make_sampler: MakeSampler,
    temperature: float,
    changes: dict[int, float],
    options: dict[str, Any],
    fault: Fault,
    words: str,
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    break_row(logits[0], changes)
    history = History([3, 4, 5], 2)
    param = params(temperature=temperature, **options)
    sampler = make_sampler(EOS)
    assert sampler.sample(logits, [param], [3], [history]) == [NO_TOKEN]
    failure = sampler.why_no_token(logits, 0, param, history)
    assert failure.fault is fault and words in failure.reason


@each_sampler
def test_tokens_of_no_likelihood_are_no_fault(make_sampler: MakeSampler) -> None:
    logits = torch.full((2, VOCAB), -INF)
    logits[:, 9] = -3e38
    assert make_sampler().sample(logits, [params(), params(temperature=1.0, top_p=0.1)], [0, 0]) == [9, 9]


# Whole steps, of a model that computes NaN for a sequence that holds one token


BLOCK_SIZES = {"torch": 4, "native": 16, "graphs": 4}


@pytest.fixture(params=list(BLOCK_SIZES))
def make_driver(broken_dir: Path, request: pytest.FixtureRequest) -> Callable[[], Driver]:
    name = request.param

    @cache
    def load() -> ModelRunner:
        backend = "torch" if name == "graphs" else name
        kwargs: dict[str, Any] = {"num_blocks": 200, "block_size": BLOCK_SIZES[name], "backend": backend}
        runner = ModelRunner.from_dir(broken_dir, dtype=torch.float32, **kwargs)
        if name == "graphs":
            weights = load_weights(broken_dir, runner.config, torch.float32)
            attention = TorchAttention(runner.config.sliding_windows)
            sizes = StepSizes(8, 64)
            runner.backend = GraphBackend(
                runner.config, weights, runner.pool, 256, attention, sizes, cast(Capture, lambda run: run), lambda: None
            )
        return runner

    return lambda: Driver(load())


INNOCENT: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 3},
    {},
    {"temperature": 0.5, "top_k": 9, "seed": 4},
]
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"logprobs": 5},
    {"temperature": 1.0, "repetition_penalty": 1.5, "logprobs": 0},
    {"logprobs": 1, "prompt_logprobs": True},
]


def execute(driver: Driver, **num_tokens: int) -> list[int | None]:
    """A step; what it brings is appended, also of a sequence that got no token."""
    batch = driver.batch(**num_tokens)
    tokens = driver.runner.execute(batch, driver.sequences)
    for item, token in zip(batch.items, tokens, strict=True):
        driver.computed[item.request_id] += item.num_tokens
        if token is not None:
            driver.sequences[item.request_id].token_ids.append(token)
    return tokens


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_step_with_a_row_of_nan_is_whole_for_the_others(make_driver: Callable[[], Driver], way: int) -> None:
    """Prompts, then a prompt beside a row that has turned NaN while decoding, whose blocks go to others."""
    found = []
    for hostile in (True, False):
        driver = make_driver()
        for i, sampling in enumerate(INNOCENT):
            driver.add(f"i{i}", [5 + i, 6, 7, 8, 9][: 2 + i], **sampling)
        lens = {f"i{i}": 2 + i for i in range(len(INNOCENT))}
        outputs = []
        if hostile:
            driver.add("bad", [5, POISON, 7], **WAYS[way])
            tokens = execute(driver, i0=lens["i0"], bad=3, i1=lens["i1"])
            assert isinstance(tokens, LoggedTokens)
            assert tokens[1] is None and list(tokens.failures) == [1]
            assert tokens.failures[1].fault is Fault.MODEL
            assert [i for i, each in tokens.logprobs.items() if each.output is not None] == [0], "of i0 alone"
            driver.add("turned", [5, 6, 7], **WAYS[way])
            outputs.append([tokens[0], tokens[2]])
            execute(driver, turned=3)
            driver.sequences["turned"].prompt_logprobs = None  # they have gone out with the first token
            driver.sequences["turned"].token_ids[3] = POISON
            tokens = execute(driver, i2=lens["i2"], turned=1)
            outputs.append(tokens[:1])
        else:
            outputs.append(list(execute(driver, i0=lens["i0"], i1=lens["i1"])))
            outputs.append(list(execute(driver, i2=lens["i2"])))
        for each in ["bad", "turned"] if hostile else []:
            driver.remove(each)
        outputs.append(list(execute(driver, i3=lens["i3"])))
        outputs += [list(execute(driver, i0=1, i1=1, i2=1, i3=1)) for _ in range(12)]
        found.append(outputs)
    assert found[0] == found[1]


@pytest.mark.parametrize("value", [math.nan, 3e38])
@pytest.mark.parametrize("token_id", [0, 17, 255, 263])  # of 264: in the first vector, another, the last, and behind it
def test_the_compiled_step_finds_what_torch_finds(tmp_path: Path, token_id: int, value: float) -> None:
    """One logit is NaN, or so large a multiple of one activation that it is +inf or -inf, by the sign of that."""
    model = shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    row = weights["model.embed_tokens.weight"][token_id]
    row.zero_()[7] = value
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    found = []
    for backend in ("torch", "native"):
        runner = ModelRunner.from_dir(model, dtype=torch.float32, num_blocks=64, block_size=16, backend=backend)
        driver = Driver(runner)
        prompts = {f"s{i}": [30 + i, 40 + 3 * i, 50 + i] for i in range(40)}
        for name, prompt in prompts.items():
            driver.add(name, prompt)
        found.append(execute(driver, **dict.fromkeys(prompts, 3)))
    assert found[0] == found[1]
    assert [isinstance(each, LoggedTokens) for each in found] == [True, True]
    num_lacking = found[0].count(None)
    assert num_lacking == 40 if math.isnan(value) else 0 < num_lacking < 40


def test_a_decoding_row_without_a_token_beside_rows_that_are_recorded(make_driver: Callable[[], Driver]) -> None:
    driver = make_driver()
    for name in ("a", "b"):
        driver.add(name, [5, 6])
        driver.step(**{name: 2})
    driver.sequences["a"].token_ids[2] = POISON
    tokens = execute(driver, a=1, b=1)
    assert isinstance(tokens, LoggedTokens) and list(tokens.failures) == [0]
    assert tokens[0] is None and tokens[1] is not None


def test_steps_in_parts_tell_which_items_lack_a_token(broken_dir: Path) -> None:
    kwargs: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "backend": "torch"}
    whole = ModelRunner.from_dir(broken_dir, dtype=torch.float32, **kwargs)
    careful = CarefulSteps(lambda: None)
    careful.max_tokens = 2
    runner = ModelRunner(whole.config, whole.pool, whole.backend, 200, careful=careful)
    driver = Driver(runner)
    for name, prompt in {"a": [5, 6, 7], "bad": [5, POISON], "c": [8, 9, 10]}.items():
        driver.add(name, prompt)
    tokens = execute(driver, a=3, bad=2, c=3)
    assert isinstance(tokens, LoggedTokens) and list(tokens.failures) == [1]
    assert [token is None for token in tokens] == [False, True, False]


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_no_backend_is_handed_a_token_that_the_model_lacks(make_driver: Callable[[], Driver], token_id: int) -> None:
    """A GPU that is asked for one fails an assertion and computes nothing ever after."""
    driver = make_driver()
    driver.add("a", [5, 6])
    driver.step(a=2)
    driver.sequences["a"].token_ids[2] = token_id
    with pytest.raises(IntegrityError, match=f"token ids {token_id}"):
        driver.step(a=1)
