"""``[predictor]`` and ``[log]``: forecasts of output lengths, and the log that they are learned from."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.errors import require


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """How output lengths are predicted.

    Attributes:
        artefact: Directory that ``farsight train`` wrote; empty: a server whose preset reads forecasts of requests
            learns them from its own traffic (``from_traffic``).
        from_traffic: Without an artefact, learn output lengths by application from the server's own requests, from the
            first hundred on. With false every request is predicted by the lengths of the last outputs.
        encoder: A text encoder for Magnus's features (USIN, section III-B): the directory of any model of
            sentence-transformers, such as LaBSE, a hub id, ``minilm`` (a package, no network), or ``auto``: LaBSE where
            the hub's cache has it, else ``minilm``. BERT, RoBERTa and XLM-RoBERTa need nothing more; other kinds, and
            any name behind ``sentence-transformers:``, are computed by that library
            (``pip install 'farsight[encoders]'``). Without an artefact the server grows its forest over this encoder's
            vectors; with one, the encoder of its training is loaded from here. Empty: where the training had it;
            without one, LaBSE for the preset ``magnus`` where the hub's cache has it, and else, as with ``none``, no
            encoder.
        num_trees: Trees of the forest that a server grows from its own traffic (Magnus, section III-B, which gives no
            number); ``farsight train --trees`` says it for an artefact.
        device: Where an encoder runs, as torch names it.
        cpu_share: Share of one core that predictions may take; beyond it they use fewer features.
        wait_s: Seconds that a request waits for its forecast before the ingress sends it; a later forecast follows it.
        learn: Train again while serving, on requests that were predicted badly.
        learn_every_s: Seconds between two trainings; Magnus trains every three minutes (section III-B).
        learn_min_error: Only requests whose prediction was wrong by more than so many tokens are learned from (Magnus,
            section III-B: 10) ...
        learn_min_share: ... and by more than this share of the true length (0.1).
    """

    artefact: str = ""
    from_traffic: bool = True
    encoder: str = ""
    num_trees: int = 50
    device: str = "cpu"
    cpu_share: float = 0.05
    wait_s: float = 0.0
    learn: bool = True
    learn_every_s: float = 180.0
    learn_min_error: float = 10.0
    learn_min_share: float = 0.1

    def __post_init__(self) -> None:
        reads = bool(self.artefact) or self.from_traffic
        require(reads or not self.encoder, "predictor.encoder", self.encoder, "none where from_traffic is false")
        require(1 <= self.num_trees <= 1000, "predictor.num_trees", self.num_trees, "an integer from 1 to 1000")
        require(self.cpu_share > 0, "predictor.cpu_share", self.cpu_share, "a number > 0")
        require(self.wait_s >= 0, "predictor.wait_s", self.wait_s, "a number >= 0")
        require(self.learn_every_s > 0, "predictor.learn_every_s", self.learn_every_s, "a number > 0")
        for name in ("learn_min_error", "learn_min_share"):
            require(getattr(self, name) >= 0, f"predictor.{name}", getattr(self, name), "a number >= 0")


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
