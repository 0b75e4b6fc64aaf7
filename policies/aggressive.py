from collections.abc import Sequence

from policies.job import Job


class Aggressive:
    max_skips = 0

    def __init__(self, watermark: float) -> None:
        self.watermark = watermark
        self._used = self._limit = self._cap = 0

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        self._used = sum(j.known_len for j in running)
        self._cap = capacity
        self._limit = capacity - self.reserve(capacity)

    def admits(self, job: Job) -> bool:
        if self._used == 0:
            return job.known_len <= self._cap
        return self._used + job.known_len <= self._limit

    def add(self, job: Job) -> None:
        self._used += job.known_len

    def reserve(self, capacity: int) -> int:
        return capacity - int(self.watermark * capacity)

    def learn(self, output_len: int, *, censored: bool) -> None:
        pass
