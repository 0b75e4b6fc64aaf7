"""Text comes out whole, once, and ends at the first complete stop string, however it is cut into tokens.

Also where a request is resumed: its client reads on as if nothing had happened. The model is a script there, so that
stop strings and half characters come where they are wanted. Counts of tokens that grow with a sequence are those of all
its tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from farsight.core.errors import InvalidValueError
from farsight.core.messages.plans import WorkerReady
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request, SamplingParams
from farsight.engine import sequence
from farsight.engine.runner import Runner
from farsight.engine.sequence import Detokenizer, Sequence, StopStrings, TokenCounts
from farsight.engine.worker import Worker
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor, StepBatch
from farsight.tokenization.loading import load_tokenizer
from tests.unit.engine.driver import offer, steps
from tests.unit.engine.small_models import EOS_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
DETOKENIZER = Detokenizer(TOKENIZER)
VOCAB = TOKENIZER.get_vocab()
BYTE_IDS = {char: VOCAB[char] for char in pre_tokenizers.ByteLevel.alphabet()}


def as_bytes(text: str) -> list[int]:
    """One token a byte: the finest cut there is."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [BYTE_IDS[char] for piece, _ in pieces for char in piece]


def shown(token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """What is shown after each token, and at the end; whether a stop string has come."""
    text = DETOKENIZER.start(stop)
    parts = [text.push(token_id) for token_id in token_ids]
    return [*parts, text.flush()], text.stopped


def naive(full: str, stops: tuple[str, ...]) -> str:
    ends = [(full.find(stop) + len(stop), full.find(stop)) for stop in stops if stop in full]
    return full[: min(ends)[1]] if ends else full


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=5), max_size=3), st.booleans())
@settings(max_examples=300, deadline=None)
def test_nothing_comes_behind_the_first_stop_string(text: str, stop: list[str], by_bytes: bool) -> None:
    token_ids = as_bytes(text) if by_bytes else TOKENIZER.encode(text, add_special_tokens=False).ids
    parts, stopped = shown(token_ids, tuple(stop))
    assert "".join(parts) == naive(text, tuple(stop))
    assert stopped == any(s in text for s in stop)


def test_a_character_over_several_tokens_comes_with_the_last_of_them() -> None:
    assert shown(as_bytes("a€b"))[0] == ["a", "", "", "€", "b", ""]
    assert shown(as_bytes("a€")[:-1])[0] == ["a", "", "", "\ufffd"]


def parts_of(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(st.integers(0, 30)),
)
@settings(max_examples=500, deadline=None)
def test_the_first_complete_one_ends_the_text(text: str, stop: list[str], cuts: list[int]) -> None:
    found = StopStrings(stop)
    text_shown = ""
    for part in parts_of(text, cuts):
        text_shown += found.push(part)
        if found.stopped:
            break
    assert text_shown + found.flush() == naive(text, tuple(stop))
    assert found.stopped == any(each in text for each in stop)


@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_than_may_begin_a_stop_string(text: str, stop: str) -> None:
    found = StopStrings([stop])
    text_shown = ""
    for index, char in enumerate(text):
        text_shown += found.push(char, may_stop=False)
        known = text[: index + 1]
        held = next(n for n in range(len(stop) - 1, -1, -1) if known.endswith(stop[:n]))
        assert known == text_shown + (known[-held:] if held else "")
    rest = StopStrings([stop])
    assert rest.push(text, may_stop=False) == text_shown


@pytest.mark.parametrize("text", ["a" * 20_000, "ab" * 10_000, ("a" * 99 + "b") * 200])
def test_work_is_linear(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in looks at a stop string of 9,000 characters that is almost there all the time."""
    num_looks = 0

    class Counted(str):
        def __getitem__(self, key: object) -> str:
            nonlocal num_looks
            num_looks += 1
            return str.__getitem__(self, key)  # type: ignore[index]

    monkeypatch.setattr(sequence, "_Match", lambda stop, real=sequence._Match: real(Counted(stop)))
    found = StopStrings(["a" * 9_000 + "c", "ab" * 4_500 + "c"])
    assert "".join([found.push(char) for char in text]) + found.flush() == text
    assert num_looks <= 12 * len(text)


def test_a_tokenizer_that_cannot_be_read_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert load_tokenizer(tiny_model_dir).decode(as_bytes("hi")) == "hi"
    for content in (None, "{}"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(InvalidValueError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)


class Script(Runner):
    """Says the same output whatever it is asked, and does nothing else."""

    def __init__(self, output_ids: list[int]) -> None:
        self.output_ids = output_ids

    def execute(self, batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        return [
            self.output_ids[sequences[item.request_id].output_len] if item.samples else None for item in batch.items
        ]


def attempt(script: list[int], sampling: SamplingParams, known: int) -> list[TokenDelta]:
    """The deltas of an attempt that begins after ``known`` tokens of the script."""
    executor = LeaseExecutor(BlockManager(64, 4), BatchLimits(4, 64), "w")
    ready = WorkerReady("w", 64, 4, 256, True, 320)
    worker = Worker(Script(script), executor, DETOKENIZER, (EOS_ID,), ready)
    prompt = tuple(TOKENIZER.encode("say it:").ids)
    request = Request("r", 1, "i", prompt, sampling, tuple(script[:known]))
    offer(worker, [request])
    return [output.delta for outputs in steps(worker) for output in outputs]


CASES = {
    "plain": ("hello world, the lazy dog", (), "length"),
    "multi-byte": ("naïve 日本語 🙂🙃, 한국어", (), "length"),
    "stop": ("stop and go, then STOP HERE and no more", ("STOP HERE",), "stop"),
    "stop that almost comes first": ("END EN ENDI ENDING and on", ("ENDING",), "stop"),
    "stop with multi-byte": ("価格は🙂終わり🙃です、ほか", ("🙂終わり🙃",), "stop"),
    "held to the end": ("it may be a ST", ("STOP",), "length"),
    "half a character at the end": ("five 🙂", (), "length"),
    "a special token": ("one</s> two", (), "length"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_text_continues_exactly_wherever_it_broke_off(case: str) -> None:
    text, stop, reason = CASES[case]
    script = TOKENIZER.encode(text).ids
    if case == "half a character at the end":
        script = script[:-1]
    sampling = SamplingParams(len(script), stop=stop, ignore_eos=True)
    whole = attempt(script, sampling, 0)
    assert whole[-1].finish_reason == reason
    expected = text.split(stop[0])[0] if reason == "stop" else TOKENIZER.decode(script)
    assert "".join(delta.text for delta in whole) == expected
    for cut in range(1, len(whole)):
        assert attempt(script, sampling, cut) == whole[cut:], f"after {cut} tokens"


def test_a_resumed_request_ends_at_eos() -> None:
    script = [*TOKENIZER.encode("one two").ids, EOS_ID]
    resumed = attempt(script, SamplingParams(50), 2)
    assert (resumed[-1].token_ids, resumed[-1].finish_reason) == ((EOS_ID,), "stop")


def contents(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def expected(token_ids: list[int], prompt_len: int) -> dict[int, int]:
    return {**dict.fromkeys(token_ids[:prompt_len], 0), **Counter(token_ids[prompt_len:])}


def test_counts_that_grow_are_those_of_all_tokens() -> None:
    rng = random.Random(0)
    for prompt_len in (0, 1, 40):
        tokens = [rng.randrange(60) for _ in range(prompt_len + 200)]
        growing = TokenCounts(tokens[:prompt_len], prompt_len)
        for known in range(prompt_len, len(tokens), 3):
            growing.advance(tokens[:known])
            resumed = TokenCounts(tokens[:known], prompt_len)
            assert contents(growing) == contents(resumed) == expected(tokens[:known], prompt_len)


def test_guesses_are_counted_apart() -> None:
    counts = TokenCounts([1, 2, 2, 3], 2)
    assert contents(counts.plus((3, 9, 9))) == {1: 0, 2: 1, 3: 2, 9: 2}
    assert contents(counts) == {1: 0, 2: 1, 3: 1}
    counts.advance([1, 2, 2, 3, 1])
    assert contents(counts) == {1: 1, 2: 1, 3: 1}
