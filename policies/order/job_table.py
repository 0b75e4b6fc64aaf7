"""Columns over jobs, so that a policy can work on all of them at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import DTypeLike, NDArray

from core.errors import IntegrityError
from policies.interfaces import Job

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
