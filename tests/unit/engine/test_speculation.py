"""Guessed tokens change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from farsight.actors.worker import step_loop
from farsight.actors.worker.step_loop import Step, StepLoop
from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError
from farsight.core.request import SamplingParams
from farsight.engine.drafted_steps import DraftedSteps
from farsight.engine.engine import Engine, RequestOutput
from farsight.policies.speculation.base import Drafter, Speculation
from farsight.tokenization.grammars.sources import of_schema
from tests.unit.engine.driver import outputs_of

MAX_TOKENS = 24

PERSON = of_schema({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})

SAMPLINGS = {
    "greedy": SamplingParams(MAX_TOKENS, ignore_eos=True),
    "its own end": SamplingParams(MAX_TOKENS),
    "drawn": SamplingParams(MAX_TOKENS, temperature=0.9, top_p=0.95, top_k=40, seed=3, ignore_eos=True),
    "penalised": SamplingParams(
        MAX_TOKENS,
        temperature=0.7,
        seed=4,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((9, 2.0),),
        ignore_eos=True,
    ),
    "not yet": SamplingParams(MAX_TOKENS, temperature=1.0, seed=5, min_tokens=11, stop_token_ids=tuple(range(40, 90))),
    "stop string": SamplingParams(MAX_TOKENS, temperature=1.0, seed=6, stop=("e", "a1"), ignore_eos=True),
    "log probabilities": SamplingParams(MAX_TOKENS, logprobs=2, prompt_logprobs=True, ignore_eos=True),
    "one token": SamplingParams(1, ignore_eos=True),
    "a grammar": SamplingParams(MAX_TOKENS, temperature=1.0, seed=7, grammar=PERSON),
    "a grammar, greedily": SamplingParams(MAX_TOKENS, grammar=PERSON),
}


@dataclass
class Oracle(Speculation):
    """Guesses that it knows to be right, spoiled at random places; every step may look as if it were cheap.

    Attributes:
        answers: Prompt and output of each request.
        not_before: Tokens that a request must have.
    """

    answers: Iterable[Sequence[int]]
    spoil: float
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    guesses: int = 0
    not_before: int = 0

    def open(self) -> Drafter:
        return OracleDrafter(self)

    def price(self, num_seqs: int) -> float:
        return 0.1

    def observe(self, num_seqs: int, num_drafts: int, duration_s: float) -> None:
        self.guesses += num_drafts

    def tokens(self, num_seqs: int, seconds: float) -> float:
        return 0.0


@dataclass
class OracleDrafter(Drafter):
    oracle: Oracle

    def draft(self, token_ids: Sequence[int], price: float) -> Sequence[int]:
        rng = self.oracle.rng
        known = list(token_ids)
        if len(known) < self.oracle.not_before:
            return ()
        for answer in self.oracle.answers:
            if list(answer[: len(known)]) == known:
                guess = [*answer[len(known) : len(known) + rng.randint(0, 6)], *(5, 6, 7)[: rng.randint(0, 3)]]
                return [token if rng.random() > self.oracle.spoil else (token + 1) % 90 for token in guess]
        return ()


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(10, 90) for _ in range(rng.randint(2, 21))] for _ in range(6)]


def answers_of(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Each kind alone, then all requests at once."""
    found = {name: engine.generate(list(prompts()), params) for name, params in SAMPLINGS.items()}
    together = [(prompt, params) for prompt in prompts() for params in SAMPLINGS.values()]
    found["all"] = engine.generate([prompt for prompt, _ in together], [params for _, params in together])
    return found


def config(**changes: object) -> EngineConfig:
    values: dict[str, object] = {"kv_memory": "1MiB", "block_size": 16, "num_threads": 1, "speculation": "off"}
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> Callable[..., Engine]:
    def make(scheduler: SchedulerConfig | None = None, **changes: object) -> Engine:
        return Engine(tiny_model_dir, dtype="float32", engine=config(**changes), scheduler=scheduler)

    return make


@pytest.fixture
def plain(make_engine: Callable[..., Engine]) -> dict[str, list[RequestOutput]]:
    found = answers_of(make_engine())
    for name in ("not yet", "stop string"):
        assert any(each.finish_reason == "stop" for each in found[name])
    return found


def known_answers(plain: dict[str, list[RequestOutput]]) -> Iterator[Sequence[int]]:
    for completions in plain.values():
        for each in completions:
            yield (*each.prompt_ids, *each.token_ids)


@pytest.mark.parametrize(
    ("changes", "spoil"),
    [
        ({}, 0.0),
        ({"num_threads": 3}, 0.3),
        ({"prefix_cache": False}, 0.3),
        ({"max_batch_tokens": 24}, 0.1),
        ({"backend": "torch", "block_size": 4}, 0.3),
    ],
    ids=str,
)
def test_right_and_wrong_guesses_leave_every_answer_as_it_is(
    make_engine: Callable[..., Engine], plain: dict[str, list[RequestOutput]], changes: dict[str, object], spoil: float
) -> None:
    engine = make_engine(**changes)
    oracle = Oracle(list(known_answers(plain)), spoil)
    engine.worker.speculation = DraftedSteps(oracle)
    assert answers_of(engine) == plain
    engine.check_integrity()
    counts = engine.worker.speculation.counts
    assert oracle.guesses > 0
    assert counts.drafts < counts.tokens
    assert 100 < counts.accepted < counts.tokens
    assert engine.worker.executor.blocks.num_free == engine.worker.executor.blocks.num_blocks


@pytest.mark.parametrize("preset", ["fcfs", "fastserve", "past-future", "farsight"])
def test_preempted_and_offloaded_requests_get_the_same_answers(
    make_engine: Callable[..., Engine], plain: dict[str, list[RequestOutput]], preset: str
) -> None:
    """Blocks for a sixth of the requests: some lose their KV in the middle, right and wrong guesses in it."""
    scheduler = SchedulerConfig(preset=preset)
    engine = make_engine(scheduler, kv_memory="40KiB", host_kv_memory="64KiB", max_num_seqs=12)
    engine.worker.speculation = DraftedSteps(Oracle(list(known_answers(plain)), 0.2))
    together = [(prompt, params) for prompt in prompts() for params in SAMPLINGS.values()]
    order = [engine.submit(prompt, params) for prompt, params in together]
    assert outputs_of(engine, order)[0] == [each.token_ids for each in plain["all"]]
    assert engine.worker.speculation.counts.accepted > 50
    assert engine.worker.executor.report().traffic.recomputed_tokens or preset != "fcfs"


def test_a_perfect_guess_saves_its_step(
    make_engine: Callable[..., Engine], plain: dict[str, list[RequestOutput]]
) -> None:
    engine = make_engine()
    oracle = Oracle(list(known_answers(plain)), 0.0)
    engine.worker.speculation = DraftedSteps(oracle)
    prompt, num_steps, tokens = prompts()[0], 0, 0
    engine.submit(prompt, SAMPLINGS["greedy"])
    while not engine.idle:
        tokens += sum(len(delta.token_ids) for delta in engine.step())
        num_steps += 1
    assert tokens == MAX_TOKENS
    assert num_steps == MAX_TOKENS - engine.worker.speculation.counts.accepted < MAX_TOKENS / 2


def test_steps_that_are_got_ready_leave_room_for_guesses(
    make_engine: Callable[..., Engine], plain: dict[str, list[RequestOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of a server begins a step before the one before it is booked, but not where one may be guessed for."""
    monkeypatch.setattr(step_loop, "LEAST_TO_LOOK_AHEAD", 1)
    engine = make_engine()
    engine.worker.speculation = DraftedSteps(Oracle(list(known_answers(plain)), 0.2, not_before=28))
    order = [engine.submit(prompt, SAMPLINGS["drawn"]) for prompt in prompts()]
    got: dict[str, list[int]] = {request_id: [] for request_id in order}

    def keep(step: Step) -> None:
        for output in engine.worker.render(step.emissions) + step.failures:
            assert output.delta.start == len(got[output.delta.request_id])
            got[output.delta.request_id] += output.delta.token_ids

    StepLoop(engine.worker, keep, on_abort=lambda outputs: None).run()
    assert [tuple(got[request_id]) for request_id in order] == [each.token_ids for each in plain["drawn"]]
    assert engine.worker.speculation.counts.accepted > 4


@pytest.mark.parametrize(
    ("changes", "speculates"),
    [
        ({"speculation": "auto"}, True),
        ({"speculation": "ngram"}, True),
        ({"speculation": "off"}, False),
        ({"speculation": "auto", "backend": "torch"}, False),
        ({"speculation": "ngram", "backend": "torch"}, True),
        ({"speculation": "auto", "device": "emulated:a100-7b"}, False),
    ],
    ids=str,
)
def test_auto_guesses_where_steps_are_exact(
    make_engine: Callable[..., Engine], changes: dict[str, object], speculates: bool
) -> None:
    assert (make_engine(**({"kv_memory": "auto"} | changes)).worker.speculation is not None) == speculates


def test_what_cannot_guess_says_so(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match=r"engine.speculation: got 'medusa', expected one of ngram"):
        make_engine(speculation="medusa")
    with pytest.raises(
        ConfigError, match=r"engine.speculation: got 'ngram', expected auto or off on an emulated device"
    ):
        make_engine(speculation="ngram", device="emulated:a100-7b", kv_memory="auto")
    with pytest.raises(ConfigError, match=r"got 'ngram', expected auto or off where batches run in lockstep"):
        make_engine(SchedulerConfig(preset="magnus", execution="static"), speculation="ngram")
