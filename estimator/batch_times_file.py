"""Estimated times of batches in a directory: what ``farsight train --estimator`` writes and a server begins with."""

from __future__ import annotations

from pathlib import Path

from core.costs import StepCost
from estimator.knn import BatchLearning, BatchTimes

FILE_NAME = "batch-times.npz"


def write_batch_times(directory: Path, times: BatchTimes) -> Path:
    """Writes the file and returns its path.

    Raises:
        OSError: The directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    path.write_bytes(times.to_bytes())
    return path


def read_batch_times(directory: Path, cost: StepCost, learning: BatchLearning) -> BatchTimes:
    """Reads the estimator back; ``cost`` and ``learning`` are as in ``BatchTimes``.

    Raises:
        OSError: There is no such file.
        InvalidValueError: The file is damaged, or no such artefact.
    """
    return BatchTimes.from_bytes((directory / FILE_NAME).read_bytes(), cost, learning)
