"""``[log]``: the log of finished requests."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import require


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log of finished requests, forecasts and batches, and of what was learned from them.

    Attributes:
        path: SQLite file, or the ``redis://`` URL of a server that syncs every write; empty keeps it with the server's
            temporary files, gone when the server ends.
        max_rows: Rows kept of finished requests, forecasts, decision traces and batches each; the oldest are dropped.
        max_artefacts: Versions kept of each kind of artefact, beside the one in use.
    """

    path: str = ""
    max_rows: int = 1_000_000
    max_artefacts: int = 5

    def __post_init__(self) -> None:
        require(
            "://" not in self.path or self.on_redis, "log.path", self.path, "a file, or a URL of redis:// or rediss://"
        )
        require(self.max_rows >= 1, "log.max_rows", self.max_rows, "an integer >= 1")
        require(self.max_artefacts >= 1, "log.max_artefacts", self.max_artefacts, "an integer >= 1")

    @property
    def on_redis(self) -> bool:
        """Whether ``path`` is the URL of a Redis server, and no file."""
        return self.path.startswith(("redis://", "rediss://"))
