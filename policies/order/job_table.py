"""Columns over jobs, so that a policy can work on all at once, and the first few of many rows in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from farsight.core.errors import IntegrityError
from farsight.policies.interfaces import Job

_FIRST_ROWS = 64


class JobTable:
    """One row per job, without gaps: the last row takes the place of a removed one.

    ``add`` and ``remove`` cost O(columns), amortised.

    Args:
        columns: Name -> (type, shape of one row's entry).

    Attributes:
        jobs: By row.
    """

    def __init__(self, columns: Mapping[str, tuple[DTypeLike, tuple[int, ...]]]) -> None:
        self.jobs: list[Job] = []
        self._row_of: dict[str, int] = {}
        self._columns: dict[str, NDArray[np.generic]] = {
            name: np.zeros((_FIRST_ROWS, *shape), dtype) for name, (dtype, shape) in columns.items()
        }

    def __len__(self) -> int:
        return len(self.jobs)

    def row(self, job: Job) -> int | None:
        """Returns the row of the job; None if the job is not here."""
        return self._row_of.get(job.request_id)

    def column(self, name: str) -> NDArray[np.generic]:
        """Returns a view of the rows in use, which is void after the next ``add``."""
        return self._columns[name][: len(self.jobs)]

    def put(self, row: int, name: str, entry: float) -> None:
        """Sets one number of a column: quicker than through a view."""
        self._columns[name][row] = entry

    def add(self, job: Job) -> int:
        """Appends a row of zeros and returns its number; the job is not here yet."""
        row = len(self.jobs)
        for name, column in self._columns.items():
            if row == len(column):
                self._columns[name] = column = np.concatenate([column, np.zeros_like(column)])
            column[row] = 0
        self.jobs.append(job)
        self._row_of[job.request_id] = row
        return row

    def remove(self, job: Job) -> bool:
        """Removes the job's row; returns False if the job is not here."""
        row = self._row_of.pop(job.request_id, None)
        if row is None:
            return False
        last = self.jobs.pop()
        if last is not job and row < len(self.jobs):
            self.jobs[row] = last
            self._row_of[last.request_id] = row
            for column in self._columns.values():
                column[row] = column[len(self.jobs)]
        return True

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every job is in the row that it is said to be in."""
        if self._row_of != {job.request_id: row for row, job in enumerate(self.jobs)}:
            raise IntegrityError("jobs and their rows disagree")


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
