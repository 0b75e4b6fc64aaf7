"""The profile file says what it was told, and what is wrong with one is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from farsight.core.costs import ImageCost, StepCost
from farsight.core.errors import InvalidValueError
from farsight.estimator.profile_file import (
    SCHEMA,
    HeldBackErrors,
    ProfiledMachine,
    ProfiledRange,
    ProfileFile,
    parse_profile,
)

FULL = ProfileFile(
    base_s=1e-3,
    prefill_token_s=2e-5,
    decode_seq_s=3e-5,
    context_token_s=4e-8,
    prefill_pair_s=5e-9,
    kv_bytes=2048,
    copy_bandwidth=1e10,
    image_token_s=3e-6,
    image_batch_s=1e-3,
    image_pair_s=2e-9,
    machine=ProfiledMachine("m", "float32", "a processor", 2, 1, 0.99),
    range=ProfiledRange(1024, 128, 131072, 524800),
    error=HeldBackErrors(0.05, 0.15, 132),
)
PRICES = {"base_s": 1.0, "prefill_token_s": 0.1, "decode_seq_s": 0, "context_token_s": 0.0}


def test_what_was_written_is_read() -> None:
    assert parse_profile(FULL.to_json(), "x") == FULL
    bare = replace(FULL, machine=None, kv_bytes=None)
    assert parse_profile(bare.to_json(), "x") == bare
    assert "machine" not in json.loads(bare.to_json())
    profile = parse_profile(json.dumps(PRICES), "x")
    assert profile.cost == StepCost(1.0, 0.1, 0, 0.0, 0.0)
    assert profile.image_cost.is_free and FULL.image_cost == ImageCost(1e-3, 3e-6, 2e-9)
    assert profile.schema == SCHEMA and profile.kv_bytes is None and profile.machine is None


@pytest.mark.parametrize("missing", PRICES)
def test_each_of_four_prices_is_needed(missing: str) -> None:
    values = {key: value for key, value in PRICES.items() if key != missing}
    with pytest.raises(InvalidValueError, match=f"p: {missing}: got None, expected a number >= 0; it is missing"):
        parse_profile(json.dumps(values), "p")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"base_s": -1.0}, "base_s: got -1.0, expected a number >= 0"),
    ({"base_s": 0.0}, "base_s: got 0, expected a number above 0"),
    ({"decode_seq_s": None}, "decode_seq_s: got None, expected a number >= 0"),
    ({"decode_seq_s": float("inf")}, "decode_seq_s: got inf, expected a number >= 0"),
    ({"kv_bytes": 1.5}, "kv_bytes: got 1.5, expected an integer >= 0"),
    ({"kv_bytes": True}, "kv_bytes: got True, expected an integer >= 0"),
    ({"schema": "1"}, "schema: got '1', expected 1, the only one"),
    ({"bases": 1}, "bases: got 1, expected only base_s, prefill_token_s"),
    ({"machine": "mine"}, "machine: got 'mine', expected a JSON object with model, dtype"),
    ({"machine": {"model": "m"}}, "machine.dtype: got None, expected a text; it is missing"),
    ({"error": {"median": 0.1, "p90": 0.2, "num_steps": "9"}}, "error.num_steps: got '9', expected an integer >= 0"),
    ({"range": {"tokens": 1}}, "range.tokens: got 1, expected only prefill_tokens, decode_seqs"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        parse_profile(json.dumps(PRICES | change), "--profile p.json")
    assert str(caught.value).startswith(f"--profile p.json: {message}")
    for text in ("", "{", "[]", "3", "null"):
        with pytest.raises(InvalidValueError, match=r"p: got .*, expected a JSON object"):
            parse_profile(text, "p")
