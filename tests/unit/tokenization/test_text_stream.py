"""Text that comes token by token is the text of all tokens at once, and a token costs a bounded number of decodings."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from farsight.tokenization.text_stream import TextDecoder, byte_level_bytes, fallback_byte
from tests.unit.tokenization.kinds import CORPUS, KINDS
from tests.volumes import at_volume

TEXTS = ("hello world", "日本 naïve", "🙂🙃", " the  dog ", "\n", "say €", "zz ß", "_", "▁", "x")
MAX_DECODED = 10
"""Tokens decoded a token: twice the token or four bytes of a character, the part before it, and the anchor."""


def suffix_marks_words() -> Tokenizer:
    """As the first BPE models: the last token of a text loses the mark of a word's end."""
    words = ["hello</w>", "wor", "ld</w>", "a</w>", "x"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


ALL_KINDS = {**KINDS, "suffix_marks_words": suffix_marks_words}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return ALL_KINDS[kind]()


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def text_of(decoder: TextDecoder, ids: list[int], context: tuple[int, ...] = ()) -> str:
    stream = decoder.start(context)
    return "".join([*map(stream.push, ids), stream.flush()])


def broken_runs(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether byte tokens beside each other are no UTF-8 together."""
    run, special = b"", TextDecoder(tokenizer).special_ids
    for token_id in [each for each in ids if each not in special]:
        byte = fallback_byte(tokenizer.id_to_token(token_id) or "")
        if byte is None:
            if not valid(run):
                return True
            run = b""
        else:
            run += byte
    return not valid(run)


def valid(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@at_volume(30, 500)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_same_as_all_at_once_and_each_token_is_decoded_with_few_others(kind: str, volume: int) -> None:
    tokenizer = tokenizer_of(kind)
    counting = Counting(tokenizer)
    decoder = TextDecoder(cast(Tokenizer, counting))
    assert len(decoder.anchor) <= 1

    @settings(max_examples=volume)
    @given(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=50))
    def check(ids: list[int]) -> None:
        if kind in ("llama_2", "metaspace_first") and broken_runs(tokenizer, ids):
            ids = [each for each in ids if fallback_byte(tokenizer.id_to_token(each) or "") is None]
        stream, texts = decoder.start(), []
        for token_id in ids:
            counting.num_decoded = 0
            texts.append(stream.push(token_id))
            assert counting.num_decoded <= 2 * MAX_DECODED
        assert "".join([*texts, stream.flush()]) == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("kind", ALL_KINDS)
@given(texts=st.lists(st.sampled_from([*TEXTS, *CORPUS]), max_size=4), cut=st.integers(0, 40))
@settings(max_examples=40)
def test_what_follows_a_prompt(kind: str, texts: list[str], cut: int) -> None:
    """Prompt and output together are the text of all tokens, wherever one ends and the other begins."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("".join(texts), add_special_tokens=False).ids
    prompt, output = ids[:cut], ids[cut:]
    before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
    if "\ufffd" not in before and whole.startswith(before) and prompt:
        assert before + text_of(TextDecoder(tokenizer), output, tuple(prompt)) == whole


@given(st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80]), max_size=24))
@settings(max_examples=100)
def test_bytes_of_byte_fallback_that_are_no_text(data: list[int]) -> None:
    """Good characters stay, each other byte is U+FFFD, and what comes after is not changed by them."""
    tokenizer = tokenizer_of("llama_2")
    ids = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in data]
    hello = tokenizer.encode("hello", add_special_tokens=False).ids
    expected, rest = "", bytes(data)
    while rest:
        length = next((n for n in range(1, 5) if valid(rest[:n])), 0)
        expected += rest[:length].decode() if length else "\ufffd"
        rest = rest[max(length, 1) :]
    begin = "" if expected else " "
    assert text_of(TextDecoder(tokenizer), [*ids, *hello]) == (expected + " hello").removeprefix(begin)


@pytest.mark.parametrize("kind", ["llama_2", "metaspace_first"])
@pytest.mark.parametrize("ending", [["<s>"] * 4, ["<0x82>", "<0x80>", "<0x82>", "<0xE2>"], ["</s>", "<0xE2>", "<s>"]])
def test_a_leading_space_is_kept_whatever_the_prompt_ends_with(kind: str, ending: list[str]) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = [*tokenizer.encode("say").ids, *(id_of(tokenizer, each) for each in ending)]
    world = [id_of(tokenizer, "▁the")]
    assert text_of(TextDecoder(tokenizer), world, tuple(prompt)) == " the"
    assert text_of(TextDecoder(tokenizer), world, (id_of(tokenizer, "<s>"),)) == "the"
    special = [id_of(tokenizer, each) for each in ("<s>", "▁the", "</s>")]
    stream = TextDecoder(tokenizer).start(shows_special=True)
    shown = "".join([*map(stream.push, special), stream.flush()])
    assert shown == "<s> the</s>" == tokenizer.decode(special, False), "special tokens may be text"


@pytest.mark.parametrize(
    ("kind", "byte"),
    [*itertools.product(["byte_level", "llama_2"], [0x80, 0xE2, 0xF0, 0xC3]), ("metaspace_first", 0x80)],
)
def test_output_that_completes_no_character_takes_linear_time(kind: str, byte: int) -> None:
    tokenizer = tokenizer_of(kind)
    counting = Counting(tokenizer)
    decoder = TextDecoder(cast(Tokenizer, counting))
    ids = [id_of(tokenizer, f"<0x{byte:02X}>")] if kind != "byte_level" else []
    ids = ids or [i for i in range(400) if byte_level_bytes(tokenizer.id_to_token(i) or "") == bytes([byte])][:1]
    ids *= 500
    assert decoder.anchor is not None
    text = text_of(decoder, ids)
    assert text == "\ufffd" * len(ids) == tokenizer.decode(ids)
    stream = decoder.start()
    for token_id in ids:
        before = counting.num_decoded
        stream.push(token_id)
        assert counting.num_decoded - before <= MAX_DECODED
