"""The first few of many rows in order, without sorting them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

AT_ONCE = 512
"""Rows that are put in order first; each further run has four times as many."""

_T = TypeVar("_T")
Column = NDArray[Any]
Rows = NDArray[np.intp]


def in_order(columns: Sequence[Column]) -> Iterator[int]:
    """Yields rows in rising order, compared by one column after the other; of equals the lower row first.

    Taking the first k of n rows costs O(n) numpy operations and sorts O(k) rows, not n.

    Args:
        columns: At least one, all of one length n, the most significant first.
    """
    return itertools.chain.from_iterable(_runs(columns))


def _runs(columns: Sequence[Column]) -> Iterator[list[int]]:
    """Yields ``in_order`` in the runs that are sorted at once: ``AT_ONCE`` rows, then four times as many, and so on."""
    columns = [column for column in columns[:-1] if len(column) and (column != column[0]).any()] + [columns[-1]]
    left = np.arange(len(columns[0]))
    num = AT_ONCE
    while len(left):
        first = first_of(columns, left, num)
        yield _sorted(columns, first).tolist()
        if len(first) == len(left):
            return
        is_left = np.zeros(len(columns[0]), np.bool_)
        is_left[left] = True
        is_left[first] = False
        left = np.flatnonzero(is_left)
        num *= 4


def first_of(columns: Sequence[Column], rows: Rows, num: int) -> Rows:
    """Returns the first ``num`` of ``rows``, which rise, as ``in_order`` compares them; in no order."""
    taken: list[Rows] = []
    for column in columns:
        if len(rows) <= num:
            break
        values = column[rows]
        last = np.partition(values, num - 1)[num - 1]
        below = rows[values < last]
        taken.append(below)
        num -= len(below)
        rows = rows[values == last]
    return np.concatenate([*taken, rows[:num]])


def _sorted(columns: Sequence[Column], rows: Rows) -> Rows:
    rows = np.sort(rows)
    return rows[np.lexsort([column[rows] for column in reversed(columns)])]


def replayed(columns: Sequence[Column]) -> Iterable[int]:
    """Returns the rows of ``in_order``, for any number of readers."""
    if len(columns[0]) <= AT_ONCE:
        rows: list[int] = np.lexsort(columns[::-1]).tolist()
        return rows
    return Kept(_runs(columns))


class Kept(Generic[_T]):
    """Replays the items of an iterator's runs to each reader; reads further runs from it when a reader needs them."""

    def __init__(self, source: Iterator[list[_T]]) -> None:
        self._source = source
        self._given: list[list[_T]] = []

    def __iter__(self) -> Iterator[_T]:
        return itertools.chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[list[_T]]:
        given, num = self._given, 0
        while num < len(given) or self._reads_on():
            yield given[num]
            num += 1

    def _reads_on(self) -> bool:
        for following in self._source:
            self._given.append(following)
            return True
        return False
