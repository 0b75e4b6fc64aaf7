"""Text comes out whole, once, and ends at the first complete stop string, however it is cut into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from core.errors import InvalidValueError
from engine.sequence import Detokenizer
from tests.unit.engine.small_models import EOS_ID, byte_level_tokenizer
from tokenization.loading import load_tokenizer

TOKENIZER = byte_level_tokenizer()
DETOKENIZER = Detokenizer(TOKENIZER)
VOCAB = TOKENIZER.get_vocab()
BYTE_IDS = {char: VOCAB[char] for char in pre_tokenizers.ByteLevel.alphabet()}


def as_bytes(text: str) -> list[int]:
    """One token a byte: the finest cut there is."""
    (piece,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text) or [
        ("", (0, 0))
    ]
    return [BYTE_IDS[char] for char in piece[0]]


def run(token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """What is shown after each token, and at the end."""
    text = DETOKENIZER.start(stop)
    shown = []
    for token_id in token_ids:
        shown.append(text.push(token_id))
        if text.stopped:
            break
    return [*shown, text.flush()], text.stopped


def naive(full: str, stops: tuple[str, ...]) -> str:
    ends = [(full.find(stop) + len(stop), full.find(stop)) for stop in stops if stop in full]
    return full[: min(ends)[1]] if ends else full


unicode_text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
few_letters = st.text("abé", max_size=30)


@given(unicode_text)
@settings(max_examples=100, deadline=None)
def test_text_comes_back_whole(text):
    for token_ids in (TOKENIZER.encode(text, add_special_tokens=False).ids, as_bytes(text)):
        shown, _ = run(token_ids)
        assert "".join(shown) == text
        if "\ufffd" not in text:
            assert shown[-1] == ""


@given(few_letters, st.lists(st.text("abé", min_size=1, max_size=5), max_size=3), st.booleans())
@settings(max_examples=300, deadline=None)
def test_stop_strings(text, stop, by_bytes):
    token_ids = as_bytes(text) if by_bytes else TOKENIZER.encode(text, add_special_tokens=False).ids
    shown, stopped = run(token_ids, tuple(stop))
    assert "".join(shown) == naive(text, tuple(stop))
    assert stopped == any(s in text for s in stop)


@given(st.lists(st.sampled_from([*sorted(BYTE_IDS.values()), EOS_ID]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_no_text(token_ids):
    shown, _ = run(token_ids)
    assert "".join(shown) == TOKENIZER.decode(token_ids)


def test_only_what_may_be_a_stop_string_is_held():
    shown, stopped = run(as_bytes("one END two ENDING"), ("ENDING",))
    assert stopped
    assert shown[:9] == ["o", "n", "e", " ", "", "", "", "END ", "t"]
    assert "".join(shown) == "one END two "


def test_held_text_is_released_at_the_end():
    shown, stopped = run(as_bytes("almost STO"), ("STOP",))
    assert not stopped
    assert shown[-1] == "STO"


def test_character_over_several_tokens():
    assert run(as_bytes("a€b"))[0] == ["a", "", "", "€", "b", ""]
    assert run(as_bytes("a€")[:-1])[0] == ["a", "", "", "\ufffd"]


def test_special_tokens_are_no_text():
    assert run([1, *as_bytes("hi"), EOS_ID])[0] == ["", "h", "i", "", ""]


def test_nothing_comes_after_a_stop():
    text = DETOKENIZER.start(("b",))
    assert [text.push(token_id) for token_id in as_bytes("abc")] == ["a", "", ""]
    assert text.stopped
    assert text.flush() == ""


def byte_fallback_tokenizer() -> Tokenizer:
    """Decodes as Llama 2 does: words with a marked space, single bytes for the rest, no space at the beginning."""
    words = ["▁hello", "▁world", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_byte_fallback():
    detokenizer = Detokenizer(byte_fallback_tokenizer())
    euro = [2 + byte for byte in "€".encode()]
    text = detokenizer.start()
    assert [text.push(token_id) for token_id in (0, *euro, 1)] == ["hello", "", "", "€", " world"]
    text = detokenizer.start(prompt_ids=[0])
    assert [text.push(token_id) for token_id in (1, 0)] == [" world", " hello"]


def test_byte_fallback_after_broken_bytes():
    """Stray bytes after a good character never raise, never repeat or swallow what follows."""
    detokenizer = Detokenizer(byte_fallback_tokenizer())
    euro = [2 + byte for byte in "€".encode()]
    text = detokenizer.start()
    shown = [text.push(token_id) for token_id in (*euro, 2 + 0xE2, 0, 1, *euro)]
    assert shown[2] == "€"
    assert "".join(shown) == "€\ufffd hello world€"


def test_load_tokenizer(tiny_model_dir, tmp_path):
    assert load_tokenizer(tiny_model_dir).decode(as_bytes("hi")) == "hi"
    with pytest.raises(InvalidValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
