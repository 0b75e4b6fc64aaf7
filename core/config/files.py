"""``[files]``: what clients may leave with the service, and batches of requests from such files."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import require


@dataclass(frozen=True, slots=True)
class FilesConfig:
    """Files and batches of clients. They are kept in the log (``log.path``).

    Attributes:
        max_file_bytes: Larger files are refused; 0 turns files and batches off.
        max_owner_bytes: Most bytes of the files of one tenant, or of all clients where no keys are in use; 0 is no
            limit.
        max_age_s: Seconds after which a file or an ended batch is dropped, unless its client asked for less.
        max_batch_lines: Most requests of one batch.
        batch_in_flight: Most requests of batches in flight at once, at each ingress replica. No more begin than the
            replicas have places free.
    """

    max_file_bytes: int = 64 * 1024 * 1024
    max_owner_bytes: int = 1024 * 1024 * 1024
    max_age_s: float = 30 * 86_400.0
    max_batch_lines: int = 50_000
    batch_in_flight: int = 256

    def __post_init__(self) -> None:
        for name in ("max_file_bytes", "max_owner_bytes"):
            require(getattr(self, name) >= 0, f"files.{name}", getattr(self, name), "an integer >= 0")
        require(self.max_age_s > 0, "files.max_age_s", self.max_age_s, "a number > 0")
        for name in ("max_batch_lines", "batch_in_flight"):
            require(getattr(self, name) >= 1, f"files.{name}", getattr(self, name), "an integer >= 1")
