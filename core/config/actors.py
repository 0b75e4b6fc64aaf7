"""``[actors]`` and ``[[replica]]``: processes and where they run, and replicas that are other servers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from farsight.core.errors import require

PLACEMENTS = ("auto", "together", "fused", "split", "packed")


@dataclass(frozen=True, slots=True)
class ActorsConfig:
    """Which components run in which processes.

    Attributes:
        placement: ``split`` gives every component its own actor; ``fused`` puts Router, Schedulers, KV offload
            managers, estimator, log store and supervisor into one; ``together`` is that, and puts LengthPredictors
            there too, which only suits those that read no prompts; ``packed`` is ``fused``, and sixteen workers of
            emulated devices share a process as well; ``auto`` picks by the machine's size, by whether predictors read
            prompts, and by how many devices are emulated.
        length_predictors: Number of LengthPredictors at the start.
        max_length_predictors: Most LengthPredictors, which start while questions queue; 0: never more than at the
            start.
        serving_time_estimators: Number of ServingTimeEstimators.
        gpus_per_rank: GPUs that Ray sets aside for each process of a replica that is spread over several; negative: one
            where it computes on a GPU, else none.
        scheduler_delay_s: Delays every message to and from a Scheduler by so many seconds; to measure that no step
            waits for one.
        failing_steps: The Supervisor replaces a worker after so many failed steps in a row.
        silence_s: The Supervisor replaces a process that is stopped or hangs for so many seconds, and one that is only
            slow after ten times as long.
        step_stall_s: A worker is replaced when a step lasts longer than twenty times its expected time plus so many
            seconds.
    """

    placement: str = "auto"
    length_predictors: int = 1
    max_length_predictors: int = 0
    serving_time_estimators: int = 1
    gpus_per_rank: float = -1.0
    scheduler_delay_s: float = 0.0
    failing_steps: int = 3
    silence_s: float = 10.0
    step_stall_s: float = 60.0

    def __post_init__(self) -> None:
        require(self.placement in PLACEMENTS, "actors.placement", self.placement, f"one of {', '.join(PLACEMENTS)}")
        for name in ("length_predictors", "serving_time_estimators", "failing_steps"):
            value = getattr(self, name)
            require(value >= 1, f"actors.{name}", value, "an integer >= 1")
        for name in ("silence_s", "step_stall_s"):
            value = getattr(self, name)
            require(1 <= value < math.inf, f"actors.{name}", value, "seconds, at least 1")
        most = self.max_length_predictors
        ok = most == 0 or most >= self.length_predictors
        require(ok, "actors.max_length_predictors", most, f"0, or at least {self.length_predictors}")
        require(self.scheduler_delay_s >= 0, "actors.scheduler_delay_s", self.scheduler_delay_s, "a number >= 0")


REPLICA_BACKENDS = ("openai",)
PROMPTS = ("tokens", "text")

_ADDRESS = re.compile(r"https?://[^/@?#\s]+(/[^@?#\s]*)?")


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One OpenAI-compatible server that serves the same model, with the same tokenizer.

    Attributes:
        backend: Its protocol: ``openai``.
        url: Its address, with or without ``/v1``.
        model: Its name there; empty means the name that our own clients use.
        prompt: The form in which prompts go there. ``tokens``: token ids, rendered and counted here, so that both sides
            mean the same; vLLM, SGLang, llama.cpp and Farsight take them. ``text``: the client's messages or text, for
            servers that take nothing else; such a server renders them itself.
        api_key_env: Environment variable that holds its key; empty sends none.
        max_num_seqs: Requests in flight there at most; others wait here, in the order of the preset.
        max_model_len: Tokens a sequence may reach there, prompt and output together; 0: the limit that the server
            reports.
        kv_tokens: KV tokens that placement assumes it holds; 0 is ``max_num_seqs`` sequences of full length.
        connect_timeout_s: Longest wait for a connection, in seconds.
        first_token_timeout_s: Longest wait for the first token after the request was sent, in seconds.
        token_timeout_s: Longest wait for each later token, in seconds.
        probe_timeout_s: Longest wait for the answer to a probe (``/health``, ``/v1/models``), in seconds. A server that
            has a request gets no probe.
    """

    backend: str = ""
    url: str = ""
    model: str = ""
    prompt: str = "tokens"
    api_key_env: str = ""
    max_num_seqs: int = 128
    max_model_len: int = 0
    kv_tokens: int = 0
    connect_timeout_s: float = 5.0
    first_token_timeout_s: float = 60.0
    token_timeout_s: float = 30.0
    probe_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        backends = f"one of {', '.join(REPLICA_BACKENDS)}; replicas of our own engine are counted by model.replicas"
        require(self.backend in REPLICA_BACKENDS, "replica.backend", self.backend, backends)
        is_address = _ADDRESS.fullmatch(self.url) is not None
        require(is_address, "replica.url", self.url, "an address as in http://host:8000/v1, without a password")
        require(self.prompt in PROMPTS, "replica.prompt", self.prompt, f"one of {', '.join(PROMPTS)}")
        require(self.max_num_seqs >= 1, "replica.max_num_seqs", self.max_num_seqs, "an integer >= 1")
        for name in ("max_model_len", "kv_tokens"):
            require(getattr(self, name) >= 0, f"replica.{name}", getattr(self, name), "an integer >= 0")
        for name in ("connect_timeout_s", "first_token_timeout_s", "token_timeout_s", "probe_timeout_s"):
            require(getattr(self, name) > 0, f"replica.{name}", getattr(self, name), "a number > 0")

    @property
    def base_url(self) -> str:
        """``url`` without a slash at the end and without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")
