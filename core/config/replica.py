"""Replicas that are other servers: the tables of the array ``[[replica]]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.errors import ConfigError

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
        _require(self.backend in REPLICA_BACKENDS, "backend", self.backend, backends)
        is_address = _ADDRESS.fullmatch(self.url) is not None
        _require(is_address, "url", self.url, "an address as in http://host:8000/v1, without a password")
        _require(self.prompt in PROMPTS, "prompt", self.prompt, f"one of {', '.join(PROMPTS)}")
        _require(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "an integer >= 1")
        for name in ("max_model_len", "kv_tokens"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "an integer >= 0")
        for name in ("connect_timeout_s", "first_token_timeout_s", "token_timeout_s", "probe_timeout_s"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "a number > 0")

    @property
    def base_url(self) -> str:
        """``url`` without a slash at the end and without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"replica.{name}", value, expected)
