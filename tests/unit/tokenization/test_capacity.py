"""The least number of tokens that a text has is never more than it has, and bounded tokenizers have such a bound."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tests.unit.tokenization.kinds import CORPUS, KINDS
from tokenization.capacity import text_capacity

BOUNDED = {"byte_level", "byte_level_rstrip", "llama_2", "metaspace_first"}
TEXTS = st.text() | st.lists(st.sampled_from(["    ", "the ", "hello", " \n", "é", "日", *CORPUS])).map("".join)


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


@pytest.mark.parametrize("kind", sorted(BOUNDED))
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    capacity = text_capacity(tokenizer)
    assert capacity is not None
    assert capacity.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - BOUNDED))
def test_where_characters_may_vanish_or_join_there_is_no_bound(kind: str) -> None:
    assert text_capacity(tokenizer_of(kind)) is None


def test_where_a_marker_takes_in_spaces_they_count_for_nothing() -> None:
    capacity = text_capacity(tokenizer_of("byte_level_rstrip"))
    assert capacity is not None
    assert capacity.least_tokens(" \n" * 10_000) == 0
    assert capacity.least_tokens("a" * 10_000) >= 10_000 / capacity.chars_per_token > 1


def test_composed_characters_count_as_the_many_that_they_are_made_of() -> None:
    """Four characters become one before the model sees them."""
    tokenizer = tokenizer_of("byte_level")
    composing = Tokenizer.from_str(tokenizer.to_str())
    composing.normalizer = normalizers.NFC()
    plain, found = text_capacity(tokenizer), text_capacity(composing)
    assert plain is not None and found is not None
    assert found.chars_per_token == 4 * plain.chars_per_token


def test_a_byte_level_vocabulary_without_all_bytes_drops_text() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.encode("c" * 100).ids == []
    assert text_capacity(tokenizer) is None
