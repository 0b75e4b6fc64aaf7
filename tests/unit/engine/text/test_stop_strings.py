"""Stop strings are found in time linear in the text, however long they are and however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import stop_strings
from engine.text.stop_strings import StopStrings

few_letters = st.text("ab", max_size=30)


def parts_of(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def expected(text: str, stop: list[str]) -> str:
    for end in range(1, len(text) + 1):
        found = [each for each in stop if text[:end].endswith(each)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(
    few_letters, st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3), st.lists(st.integers(0, 30))
)
@settings(max_examples=500, deadline=None)
def test_the_first_complete_one_ends_the_text(text: str, stop: list[str], cuts: list[int]) -> None:
    found = StopStrings(stop)
    shown = ""
    for part in parts_of(text, cuts):
        shown += found.push(part)
        if found.stopped:
            break
    assert shown + found.flush() == expected(text, stop)
    assert found.stopped == any(each in text for each in stop)


@given(few_letters, st.text("ab", min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_than_may_begin_a_stop_string(text: str, stop: str) -> None:
    found = StopStrings([stop])
    shown = ""
    for index, char in enumerate(text):
        shown += found.push(char, may_stop=False)
        known = text[: index + 1]
        held = next(n for n in range(len(stop) - 1, -1, -1) if known.endswith(stop[:n]))
        assert known == shown + (known[-held:] if held else "")
    rest = StopStrings([stop])
    assert rest.push(text, may_stop=False) == shown


@pytest.mark.parametrize("text", ["a" * 20_000, "ab" * 10_000, ("a" * 99 + "b") * 200])
def test_work_is_linear(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in looks at a stop string of 9,000 characters that is almost there all the time."""
    num_looks = 0

    class Counted(str):
        def __getitem__(self, key: object) -> str:
            nonlocal num_looks
            num_looks += 1
            return str.__getitem__(self, key)  # type: ignore[index]

    monkeypatch.setattr(stop_strings, "_Match", lambda stop, real=stop_strings._Match: real(Counted(stop)))
    found = StopStrings(["a" * 9_000 + "c", "ab" * 4_500 + "c"])
    shown = [found.push(char) for char in text]
    assert "".join(shown) + found.flush() == text
    assert num_looks <= 12 * len(text)
