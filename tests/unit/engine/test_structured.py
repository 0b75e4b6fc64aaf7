"""Outputs that follow a grammar, by a model with random weights, which would otherwise write anything."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from farsight.core.config.engine import EngineConfig
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Fault, ReasoningBudget, Request, SamplingParams
from farsight.engine.engine import Engine
from farsight.engine.sampling.token_masks import caps_on
from farsight.policies.replica.events import RequestsArrived
from farsight.tokenization.grammars import sources
from tests.unit.engine.conftest import BLOCK_SIZES

MAX_TOKENS = 60
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = sources.of_schema(PERSON, None)


@cache
def engine_of(model_dir: Path, backend: str = "torch") -> Engine:
    config = EngineConfig(kv_memory="4MiB", block_size=BLOCK_SIZES[backend], num_threads=1, backend=backend)
    return Engine(model_dir, dtype="float32", engine=config)


@pytest.fixture(params=["torch", "native"])
def engine(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Engine:
    return engine_of(tiny_model_dir, request.param)


def run(engine: Engine, request: Request) -> list[TokenDelta]:
    engine._handle(RequestsArrived((request,)))
    deltas: list[TokenDelta] = []
    while not engine.idle:
        deltas += engine.step()
        engine.check_integrity()
    return deltas


def sampled(seed: int, grammar: str = GRAMMAR, temperature: float = 1.0, **fields: object) -> SamplingParams:
    return SamplingParams(MAX_TOKENS, temperature=temperature, seed=seed, grammar=grammar, **fields)  # type: ignore[arg-type]


def test_outputs_are_valid_or_cut(engine: Engine) -> None:
    seeds = range(12)
    answers = [engine.generate(["the quick"], sampled(seed))[0] for seed in seeds]
    together = [engine.generate(["the quick", "dog"], sampled(seed))[0] for seed in seeds]
    assert [each.text for each in answers] == [each.text for each in together]
    complete = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len(complete) >= len(answers) // 2
    for answer in complete:
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert len({answer.text for answer in complete}) > 1


def test_a_resumed_output_goes_on_as_it_would_have(engine: Engine) -> None:
    prompt = (5, 9, 20)
    whole = run(engine, Request("whole", 0, "", prompt, sampled(3)))
    ids = tuple(token for delta in whole for token in delta.token_ids)
    for known in (1, len(ids) // 2, len(ids) - 1):
        resumed = run(engine, Request(f"from-{known}", 1, "", prompt, sampled(3), output_ids=ids[:known]))
        assert tuple(token for delta in resumed for token in delta.token_ids) == ids[known:]


END = (40, 41, 40, 42)
"""What ends reasoning here: a text of several tokens that begins again within itself."""


@pytest.mark.parametrize("speculation", ["off", "auto"])
@pytest.mark.parametrize("begin", [(), (7,)])
def test_reasoning_ends_where_its_budget_does(tiny_model_dir: Path, begin: tuple[int, ...], speculation: str) -> None:
    config = EngineConfig(kv_memory="4MiB", block_size=16, num_threads=1, speculation=speculation)
    engine, prompt = Engine(tiny_model_dir, dtype="float32", engine=config), (5, 9, 20)
    for budget in (0, 1, 9):
        params = SamplingParams(
            30,
            ignore_eos=True,
            logit_bias=tuple((token, 90.0) for token in begin),
            reasoning=ReasoningBudget(budget, begin, END),
        )
        ids = tuple(
            token for delta in run(engine, Request(f"b{budget}", 0, "", prompt, params)) for token in delta.token_ids
        )
        first = len(begin) + budget
        assert ids[first : first + len(END)] == END
        assert len(ids) == 30
        for known in sorted({1, first + 1, first + 3, 29}):
            name = f"b{budget}-from-{known}"
            resumed = run(engine, Request(name, 1, "", prompt, params, output_ids=ids[:known]))
            assert tuple(token for delta in resumed for token in delta.token_ids) == ids[known:]


def test_a_budget_leaves_an_output_without_reasoning_alone(engine: Engine) -> None:
    prompt, free = (5, 9, 20), SamplingParams(20, ignore_eos=True)
    params = dataclasses.replace(free, reasoning=ReasoningBudget(3, (299,), END))
    found = [run(engine, Request(name, 0, "", prompt, each)) for name, each in (("free", free), ("budget", params))]
    without, within = (tuple(token for delta in deltas for token in delta.token_ids) for deltas in found)
    assert without[0] != 299 and within == without


def test_a_budget_beside_a_grammar(engine: Engine, tiny_model_dir: Path) -> None:
    """The grammar holds behind the reasoning, which the budget ends."""
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    end = tuple(tokenizer.encode("!!", add_special_tokens=False).ids)
    grammar = sources.of_lark('start: /[a-z ]*/ "!!" ("yes" | "no")')
    params = dataclasses.replace(sampled(1, grammar), reasoning=ReasoningBudget(6, (), end))
    [answer] = engine.generate(["hello"], params)
    assert answer.finish_reason == "stop"
    assert re.fullmatch(r"[a-z ]*!!(yes|no)", answer.text)
    assert answer.token_ids.index(end[0]) <= 6


def test_log_probabilities_are_the_models_own(tiny_model_dir: Path) -> None:
    """Those of the first token are the same with and without a grammar."""
    engine = engine_of(tiny_model_dir)
    prompt = (5, 9, 20)
    free = run(engine, Request("free", 0, "", prompt, SamplingParams(1, logprobs=300)))[0]
    held = run(engine, Request("held", 0, "", prompt, sampled(3, temperature=0.0, logprobs=300)))[0]
    assert free.logprobs is not None and held.logprobs is not None
    (free_ids, free_values), (held_ids, held_values) = free.logprobs.output[0], held.logprobs.output[0]
    assert (held_ids[1:], held_values[1:]) == (free_ids[1:], free_values[1:])
    assert held_values[0] == dict(zip(free_ids, free_values, strict=True))[held_ids[0]]


def test_a_neighbour_answers_as_alone(engine: Engine) -> None:
    free = SamplingParams(12, temperature=1.0, seed=4)
    [alone] = engine.generate(["hello"], free)
    ids = [engine.submit("hello", free), engine.submit("hello", sampled(1))]
    texts = dict.fromkeys(ids, "")
    while not engine.idle:
        for delta in engine.step():
            texts[delta.request_id] += delta.text
    assert texts[ids[0]] == alone.text


def test_a_grammar_that_leaves_no_token_fails_its_request_alone(engine: Engine) -> None:
    """The tokens of ``min_tokens`` are more than the choice has: the end is forbidden, all else too."""
    prompt = (5, 9)
    failed = run(engine, Request("r", 0, "", prompt, sampled(1, sources.of_choices(["a"]), min_tokens=30)))[-1]
    assert (failed.finish_reason, failed.fault) == ("error", Fault.REQUEST)
    broken = run(engine, Request("s", 0, "", prompt, sampled(1, "no grammar")))[-1]
    assert (broken.finish_reason, broken.fault) == ("error", Fault.REQUEST)
    assert "grammar" in str(broken.error)
    assert engine.generate(["hello"], sampled(1))[0].finish_reason in ("stop", "length")


def test_a_device_unpacks_the_bits_of_masks() -> None:
    bits = torch.tensor([[0b00000101, 0b10000000], [0, 255]], dtype=torch.uint8)
    allowed = [torch.nonzero(row > 0)[:, 0].tolist() for row in caps_on(bits)]
    assert allowed == [[0, 2, 15], list(range(8, 16))]
    assert torch.isinf(caps_on(bits)).all()
