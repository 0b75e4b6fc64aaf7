"""How long a batch takes: the mean of the batches most like it (Magnus III-D); its file."""

from __future__ import annotations

import hashlib
import io
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from farsight.core.costs import StepCost, attention_pairs
from farsight.core.errors import InvalidValueError
from farsight.core.learning import ErrorRule, Schedule
from farsight.core.processors import check_unpacked

NUM_NEIGHBOURS = 5
"""k, the number of neighbours; the paper gives none."""

MIN_BATCHES = 200
"""Measured batches before neighbours are used; with fewer, the nearest are too far away."""

MAX_BATCHES = 5000
"""Most batches kept; the oldest are dropped."""

PERIOD_S = 120.0
"""Seconds between two refits."""

RULE = ErrorRule(min_error=2.0, min_share=0.2)
"""Which batches are learned from, by the error in seconds."""

SCHEMA = 1
"""Format version of the artefact; other versions are refused."""

_MAX_ARRAYS = 3
_MAX_UNPACKED = MAX_BATCHES * 4 * 8 + 4096
"""Bytes of the artefact's arrays: four numbers of 8 bytes a batch, and the heads of three arrays."""

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """A batch that ran to its end.

    Attributes:
        batch_size: Number of requests.
        prompt_len: L(B): tokens of its longest prompt.
        output_len: G(B): tokens of its longest output.
        duration_s: Seconds until the last of them ended.

    Raises:
        InvalidValueError: a length below 1, or a duration that is not a positive number.
    """

    batch_size: int
    prompt_len: int
    output_len: int
    duration_s: float

    def __post_init__(self) -> None:
        for name in ("batch_size", "prompt_len", "output_len"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidValueError(name, value, "an integer >= 1")
        if not 0 < self.duration_s < math.inf:
            raise InvalidValueError("duration_s", self.duration_s, "seconds above 0")


@dataclass(frozen=True, slots=True)
class BatchLearning:
    """How the times of batches are learned (Magnus, section III-D).

    Attributes:
        num_neighbours: k, at most ``MIN_BATCHES``.
        every_s: Seconds between two refits.
        rule: Which batches are learned from, by the error in seconds.
    """

    num_neighbours: int = NUM_NEIGHBOURS
    every_s: float = PERIOD_S
    rule: ErrorRule = RULE


class StepPrices(Protocol):
    """Seconds of steps by their work; ``StepCost`` is one."""

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_pairs: int = 0) -> float: ...

    def decode_run_s(self, decode_seqs: int, context_tokens: int, num_steps: int) -> float: ...


def padded_batch_s(cost: StepPrices, batch_size: int, prompt_len: int, output_len: int) -> float:
    """Adds up the seconds of a batch's steps: one prefill of all prompts, then a step for each further token."""
    pairs = attention_pairs(prompt_len, 0)
    prefill_s = cost.step_s(batch_size * prompt_len, 0, 0, batch_size * pairs)
    return prefill_s + cost.decode_run_s(batch_size, batch_size * (prompt_len + 1), output_len - 1)


class BatchTimes:
    """Estimates how long batches take, and learns from ended ones. Called as policies expect (``ServingTime``).

    k-nearest-neighbour regression on (batch size, L, G), each standardised: the plain mean of the neighbours' times.
    Until ``MIN_BATCHES`` are known, it adds up the costs of the batch's steps instead, and learns from every batch.
    After that it learns only from batches whose time, estimated again with their true G, ``learning.rule`` calls wrong.

    Estimates hold only for batches that resemble earlier ones: elsewhere the nearest neighbour is not near.

    Args:
        cost: Cost of a step, until it is measured (``price``).
        batches: Batches known before; the last ``MAX_BATCHES`` are kept.
        learning: How it learns.
    """

    def __init__(
        self, cost: StepCost, batches: Iterable[ServedBatch] = (), learning: BatchLearning | None = None
    ) -> None:
        self._cost = cost
        self._learning = learning or BatchLearning()
        self._batches = deque(batches, maxlen=MAX_BATCHES)
        self._served: deque[ServedBatch] = deque(maxlen=MAX_BATCHES)
        self._schedule = Schedule(self._learning.every_s)
        self._fit()

    @property
    def num_batches(self) -> int:
        """Number of batches behind the estimates."""
        return len(self._batches)

    @property
    def unlearned(self) -> tuple[ServedBatch, ...]:
        """Batches that ended since learning was last due."""
        return tuple(self._served)

    def price(self, cost: StepCost) -> None:
        """Takes a newly measured cost of steps."""
        self._cost = cost

    def __call__(self, batch_size: int, prompt_len: int, output_len: int) -> float:
        """Estimates the seconds of a batch; ``output_len`` is the longest predicted output. O(log batches known)."""
        return self.estimates_s([(batch_size, prompt_len, output_len)])[0]

    def estimates_s(self, queries: Sequence[tuple[int, int, int]]) -> list[float]:
        """Estimates several batches; together they cost little more than one alone."""
        if self._neighbours is None:
            return [padded_batch_s(self._cost, *query) for query in queries]
        features = np.array(queries, dtype=np.float64).reshape(-1, 3)
        estimates_s: list[float] = self._neighbours.predict((features - self._mean) / self._spread).tolist()
        return estimates_s

    def observe(self, batch: ServedBatch) -> None:
        """Takes a batch that ended; it is considered when learning is due."""
        self._served.append(batch)

    def learn(self, now: float) -> int:
        """Learns from the batches that the rule picks and fits again, if that is due; returns the number of batches.

        Cost: O(n log n) in the batches known and observed since.
        """
        if not self._schedule.claim(now):
            return 0
        lacking = max(0, MIN_BATCHES - len(self._batches))
        served = list(self._served)
        self._served.clear()
        # All batches are compared with the same fit, so that the order in which they ended does not matter.
        taken = served[:lacking] + self._wrong(served[lacking:])
        if taken:
            self._batches.extend(taken)
            self._fit()
        return len(taken)

    def _wrong(self, served: list[ServedBatch]) -> list[ServedBatch]:
        if not served:
            return []
        estimates_s = self.estimates_s([(each.batch_size, each.prompt_len, each.output_len) for each in served])
        pairs = zip(served, estimates_s, strict=True)
        rule = self._learning.rule
        return [batch for batch, estimate_s in pairs if rule.is_wrong(estimate_s, batch.duration_s)]

    def _fit(self) -> None:
        self._neighbours: Any = None
        if len(self._batches) < MIN_BATCHES:
            return
        from sklearn.neighbors import KNeighborsRegressor  # half a second, which only batch mode should pay

        rows = self._rows()
        features = rows[:, :3]
        self._mean, spread = features.mean(axis=0), features.std(axis=0)
        self._spread = np.where(spread > 0, spread, 1.0)
        # A tree, because the search of all rows starts threads, which costs more than it saves.
        self._neighbours = KNeighborsRegressor(self._learning.num_neighbours, algorithm="kd_tree")
        self._neighbours.fit((features - self._mean) / self._spread, rows[:, 3])

    def _rows(self) -> _Array:
        return np.array([astuple(batch) for batch in self._batches], dtype=np.float64).reshape(-1, 4)

    def to_bytes(self) -> bytes:
        """Saves the state behind the estimates, without the step cost: an ``.npz`` file of plain arrays. O(batches)."""
        rows = self._rows()
        buffer = io.BytesIO()
        np.savez(buffer, schema=np.array([SCHEMA]), rows=rows, checksum=_checksum(rows))
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, cost: StepCost, learning: BatchLearning | None = None) -> BatchTimes:
        """Makes an estimator from the result of ``to_bytes``; it estimates the same for the same step cost.

        Raises:
            InvalidValueError: bytes that are damaged, of another schema or no artefact at all.
        """
        try:
            check_unpacked(data, _MAX_ARRAYS, _MAX_UNPACKED)
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                schema, rows, checksum = arrays["schema"], arrays["rows"], arrays["checksum"]
        except Exception as error:  # the zip and npy readers raise many types on foreign bytes
            raise InvalidValueError("batch times", data[:20], f"an artefact of batch times ({error})") from error
        if schema.tolist() != [SCHEMA]:
            raise InvalidValueError("batch times: schema", schema.tolist(), f"[{SCHEMA}]")
        if not np.array_equal(checksum, _checksum(rows)):
            raise InvalidValueError("batch times: checksum", checksum.tobytes().hex(), "that of its rows")
        batches = [ServedBatch(int(size), int(prompt), int(output), took_s) for size, prompt, output, took_s in rows]
        return cls(cost, batches, learning)


def _checksum(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    digest = hashlib.sha256(f"{SCHEMA} {rows.dtype.str} {rows.shape}".encode() + rows.tobytes()).digest()
    return np.frombuffer(digest, dtype=np.uint8)


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
