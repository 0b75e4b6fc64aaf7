"""``[model]``: which model, and how many copies of it."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import require

TOOL_FORMATS = (
    *("auto", "hermes", "llama3", "mistral", "mistral-args", "granite", "deepseek-v3", "deepseek-v3.1", "harmony"),
    "pythonic",
)
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served.

    Attributes:
        path: A directory, a GGUF file or a hub id; empty means the embedded model.
        name: The name clients ask for; empty means the name of the directory or the file.
        also_named: Further names that clients may ask for, separated by commas.
        chat_template: A file with the chat template, in place of the model's own; every machine has it.
        tool_format: How the model writes tool calls, such as ``hermes``; ``auto`` finds it from the chat template.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        replicas: Copies of the model on our own engine, each with a worker and a scheduler of its own. In a file with
            ``[[replica]]`` tables that does not say, there are none.
        tensor_parallel: Processes that each layer of a replica is split over; must divide its attention heads.
        pipeline_parallel: Stages of consecutive layers that a replica is cut into, each with ``tensor_parallel``
            processes; as many batches are under way at once.
        expert_parallel: Whether each of the ``tensor_parallel`` processes has some experts of a mixture as a whole, in
            place of a share of every expert.
        max_replicas: Most replicas, if their number follows the predicted queue delay; 0: always ``replicas``.
        min_replicas: Fewest replicas, with ``max_replicas``.
        target_queue_delay_s: Seconds that a new request may be predicted to wait; beyond it, replicas are added.
        scale_down_after_s: One replica is removed when, without it, the predicted wait was below half of the target
            for so many seconds.
    """

    path: str = ""
    name: str = ""
    also_named: str = ""
    chat_template: str = ""
    tool_format: str = "auto"
    dtype: str = "auto"
    replicas: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    min_replicas: int = 1
    max_replicas: int = 0
    target_queue_delay_s: float = 1.0
    scale_down_after_s: float = 60.0

    def __post_init__(self) -> None:
        require(self.replicas >= 0, "model.replicas", self.replicas, "an integer >= 0")
        for name in ("tensor_parallel", "pipeline_parallel", "min_replicas"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "an integer >= 1")
        alone = self.expert_parallel and self.tensor_parallel == 1
        require(
            not alone, "model.expert_parallel", True, "false, or model.tensor_parallel >= 2: processes share experts"
        )
        if self.max_replicas:
            low, high = max(self.replicas, self.min_replicas), self.max_replicas
            require(high >= low, "model.max_replicas", high, f"0, or at least {low}")
            require(self.replicas >= self.min_replicas, "model.min_replicas", self.min_replicas, f"<= {self.replicas}")
        for name in ("target_queue_delay_s", "scale_down_after_s"):
            require(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "a number > 0")
        forms = ", ".join(TOOL_FORMATS)
        require(self.tool_format in TOOL_FORMATS, "model.tool_format", self.tool_format, f"one of {forms}")
        require(self.dtype in DTYPES, "model.dtype", self.dtype, f"one of {', '.join(DTYPES)}")

    @property
    def most_replicas(self) -> int:
        """Most replicas without a request for more: they share the memory of one machine."""
        return max(self.replicas, self.max_replicas)

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names in ``also_named``."""
        return tuple(name.strip() for name in self.also_named.split(",") if name.strip())

    @property
    def num_ranks(self) -> int:
        """Processes of one replica."""
        return self.tensor_parallel * self.pipeline_parallel
