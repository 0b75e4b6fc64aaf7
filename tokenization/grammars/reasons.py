"""Says in a client's words why a grammar cannot be compiled, where the compiler says it in its own."""

from __future__ import annotations

import re

_MAX_CHARS = 500

_WORDS = (
    (r"\n<(?:state|non-verbose)[\s\S]*", ""),
    (r"Unimplemented keys: \[(.*?)\]", r"these keywords cannot be followed: \1"),
    (
        r"oneOf constraints are not supported\. Enable .*",
        "oneOf can be followed where no value follows two of its options, as their types, values, bounds or required"
        " properties show; write anyOf if an output may follow several",
    ),
    (r"Expected f64 for", "Expected a number for"),
    (
        r"Resource '(?:json-schema:///)?(.*?)' is not present in a registry.*",
        r"the reference leads to '\1', which is not in the schema: other documents are not fetched",
    ),
    (
        r"circular references with sibling keys are not supported: (?:json-schema:///)?(.*)",
        r"a reference that leads to itself cannot have other keywords beside it: \1",
    ),
    (
        r"Value for 'multipleOf' has too many digits: .*|invalid multiple of",
        "multipleOf can be followed if it is above 0, at most 4294967295, and has few decimals",
    ),
    (r"min/maxProperties only supported", "minProperties and maxProperties can be followed only"),
    (r"Regex is empty: .*", "its pattern, format and lengths leave no text"),
    (r"Unable to determine if regex is empty: .*", "its pattern, format and lengths are too costly together"),
    (r"NoExtension(?:Bias)?\b", "no text follows it"),
    (r"LexerTooComplex\b", "its expressions are too costly"),
    (r"ParserTooComplex\b", "its rules are too costly"),
    (r"\bmin=(?:Some\((.*?)\)|None), max=(?:Some\((.*?)\)|None)", r"\1 to \2"),
)


def plain(reason: str) -> str:
    """Returns a reason of the compiler without names that exist only in its source, and shortened."""
    for pattern, words in _WORDS:
        reason = re.sub(pattern, words, reason)
    return reason.strip()[:_MAX_CHARS]
