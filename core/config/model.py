"""``[model]``: which model, and how many copies of it."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import require

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served.

    Attributes:
        path: A directory, a GGUF file or a hub id; empty means the embedded model.
        name: The name clients ask for; empty means the name of the directory or the file.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        replicas: Copies of the model on our own engine, each with a worker and a scheduler of its own. In a file with
            ``[[replica]]`` tables that does not say, there are none.
        tensor_parallel: Processes that each layer of a replica is split over; must divide its attention heads.
        pipeline_parallel: Stages of consecutive layers that a replica is cut into, each with ``tensor_parallel``
            processes; as many batches are under way at once.
        max_replicas: Most replicas, if their number follows the predicted queue delay; 0: always ``replicas``.
        min_replicas: Fewest replicas, with ``max_replicas``.
        target_queue_delay_s: Seconds that a new request may be predicted to wait; beyond it, replicas are added.
        scale_down_after_s: One replica is removed when, without it, the predicted wait was below half of the target
            for so many seconds.
    """

    path: str = ""
    name: str = ""
    dtype: str = "auto"
    replicas: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    min_replicas: int = 1
    max_replicas: int = 0
    target_queue_delay_s: float = 1.0
    scale_down_after_s: float = 60.0

    def __post_init__(self) -> None:
        require(self.replicas >= 0, "model.replicas", self.replicas, "an integer >= 0")
        for name in ("tensor_parallel", "pipeline_parallel", "min_replicas"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "an integer >= 1")
        if self.max_replicas:
            low, high = max(self.replicas, self.min_replicas), self.max_replicas
            require(high >= low, "model.max_replicas", high, f"0, or at least {low}")
            require(self.replicas >= self.min_replicas, "model.min_replicas", self.min_replicas, f"<= {self.replicas}")
        for name in ("target_queue_delay_s", "scale_down_after_s"):
            require(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "a number > 0")
        require(self.dtype in DTYPES, "model.dtype", self.dtype, f"one of {', '.join(DTYPES)}")

    @property
    def most_replicas(self) -> int:
        """Most replicas without a request for more: they share the memory of one machine."""
        return max(self.replicas, self.max_replicas)

    @property
    def num_ranks(self) -> int:
        """Processes of one replica."""
        return self.tensor_parallel * self.pipeline_parallel
