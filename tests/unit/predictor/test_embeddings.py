"""What is kept of an encoder's vectors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.errors import InvalidValueError
from predictor.embedding_cache import EmbeddingCache
from tests.unit.predictor.requests import CountingEncoder


def test_serving_needs_neither_torch_nor_sklearn_to_start() -> None:
    loaded = "import sys, predictor.text_predictor, predictor.shedding; print([*sys.modules])"
    modules = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout
    assert "'numpy'" in modules
    for name in ("torch", "sklearn", "scipy", "sentence_transformers"):
        assert f"'{name}'" not in modules


def test_an_instruction_is_encoded_once() -> None:
    encoder = CountingEncoder()
    cache = EmbeddingCache(encoder)
    app, user = cache.embed(["sum up", "repeat", "sum up"], ["one", "two", "three"])
    assert encoder.asked == [["sum up", "repeat", "one", "two", "three"]]
    again, _ = cache.embed(["repeat"], ["two"])
    assert encoder.asked[1:] == [["two"]]
    assert app.tolist() == CountingEncoder().encode(["sum up", "repeat", "sum up"]).tolist()
    assert user.tolist() == CountingEncoder().encode(["one", "two", "three"]).tolist()
    assert again[0].tolist() == app[1].tolist()


def test_the_one_unused_for_longest_makes_way() -> None:
    encoder = CountingEncoder()
    cache = EmbeddingCache(encoder, capacity=2)
    cache.embed(["a"], ["x"])
    cache.embed(["e"], ["x"])
    assert cache.known("a") is not None  # used again
    cache.embed(["l"], ["x"])
    assert [cache.known(each) is not None for each in "ael"] == [True, False, True]
    assert len(cache) == 2


def test_more_instructions_at_once_than_are_kept() -> None:
    cache = EmbeddingCache(CountingEncoder(), capacity=1)
    cache.embed(["a"], ["x"])
    app, _ = cache.embed(["a", "e", "l"], ["x", "y", "z"])
    assert app.tolist() == CountingEncoder().encode(["a", "e", "l"]).tolist()
    assert len(cache) == 1


def test_nothing_asked() -> None:
    app, user = EmbeddingCache(CountingEncoder()).embed([], [])
    assert app.shape == user.shape == (0, 8)


def test_a_cache_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="capacity"):
        EmbeddingCache(CountingEncoder(), 0)
