"""The settings that a server's flags and Python's keywords name, and vLLM's names for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from farsight.core.errors import ConfigError, InvalidValueError

SETTINGS: Mapping[str, str] = {
    "model": "model.path",
    "chat_template": "model.chat_template",
    "tool_format": "model.tool_format",
    "dtype": "model.dtype",
    "replicas": "model.replicas",
    "tensor_parallel": "model.tensor_parallel",
    "pipeline_parallel": "model.pipeline_parallel",
    "expert_parallel": "model.expert_parallel",
    "max_replicas": "model.max_replicas",
    "device": "engine.device",
    "weights": "engine.weights",
    "kv_dtype": "engine.kv_dtype",
    "kv_memory": "engine.kv_memory",
    "host_kv_memory": "engine.host_kv_memory",
    "disk_kv": "engine.disk_kv",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "block_size": "engine.block_size",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "max_batch_tokens": "engine.max_batch_tokens",
    "threads": "engine.num_threads",
    "prefix_cache": "engine.prefix_cache",
    "benchmark_mode": "engine.benchmark_mode",
    "preset": "scheduler.preset",
    "execution": "scheduler.execution",
    "host": "server.host",
    "port": "server.port",
    "proxy": "server.proxy",
    "drain_s": "server.drain_s",
    "log_format": "server.log_format",
    "log_level": "server.log_level",
    "access_log": "server.access_log",
    "key_file": "access.key_file",
    "insecure": "access.insecure",
    "tls_cert": "access.tls_cert",
    "tls_key": "access.tls_key",
    "placement": "actors.placement",
    "allow_image_urls": "images.allow_urls",
    "predictor": "predictor.artefact",
    "predictor_encoder": "predictor.encoder",
}
"""Tables and keys of ``farsight.toml`` by the names that flags and keywords have."""

_SEVERAL = ("model.name", "model.also_named")
"""What ``served_model_name`` sets."""

VLLM_NAMES: Mapping[str, str] = {
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "replicas",
    "enable_expert_parallel": "expert_parallel",
    "enable_prefix_caching": "prefix_cache",
    "max_num_batched_tokens": "max_batch_tokens",
    "tool_call_parser": "tool_format",
    "allowed_media_domains": "allow_image_urls",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
}
"""vLLM's names of settings that are called otherwise here."""

VLLM_PARSERS: Mapping[str, str] = {
    "llama3_json": "llama3",
    "llama4_pythonic": "pythonic",
    "deepseek_v3": "deepseek-v3",
    "deepseek_v31": "deepseek-v3.1",
    "openai": "harmony",
}
"""Forms of tool calls whose names in vLLM are other ones."""

VLLM_ANSWERS: Mapping[str, str] = {
    "quantization": "none: a quantised checkpoint says so itself; --weights int8 or int4 quantises another one",
    "load_format": "none: the files say what they are",
    "trust_remote_code": "none: no code of a checkpoint is ever run",
    "enforce_eager": "none: nothing is compiled by torch unless engine.compile in --config says so",
    "kv_cache_dtype": "--kv-dtype auto or int8",
    "reasoning_parser": "none: found from the chat template, or from --tool-format",
    "enable_chunked_prefill": "none: long prompts are always computed in parts of --max-batch-tokens",
    "scheduling_policy": "--preset; priority is a field of each request",
    "distributed_executor_backend": "none: always Ray",
    "limit_mm_per_prompt": "images.max_per_request in --config",
    "generation_config": "none: each request has the defaults of the API",
    "seed": "none: a field of each request",
    "tokenizer": "none: the model's own",
    "revision": "none: a directory, or a hub id at its newest revision",
    "speculative_config": "engine.speculation in --config",
    "uvicorn_log_level": "--log-level",
    "root_path": "none: a proxy in front removes it",
    "allowed_origins": "access.cors_origins in --config",
    "max_logprobs": "none: up to 20",
    "lora_modules": "none: adapters are not supported",
    "enable_lora": "none: adapters are not supported",
}
"""What to do instead of a flag of vLLM that there is not."""


def overrides_of(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns settings as ``load_config`` takes them; None is not given.

    Args:
        given: Values by flag or keyword, under the names of Farsight or vLLM: ``swap_space`` in GiB,
            ``served_model_name`` one name or several.

    Raises:
        ConfigError: There is no such setting.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        for setting, each in _settings_of(name, value):
            section, _, key = setting.partition(".")
            if found.setdefault(section, {}).get(key) is None:
                found[section][key] = each
    return found


def _settings_of(name: str, value: Any) -> list[tuple[str, Any]]:
    if name == "served_model_name":
        names = [value] if isinstance(value, str) else list(value or ())
        return list(zip(_SEVERAL, (names[0] if names else None, ",".join(names[1:]) or None), strict=True))
    if name == "swap_space":
        return [("engine.host_kv_memory", None if value is None else f"{value:.3f}GiB" if value else "0")]
    setting = SETTINGS.get(VLLM_NAMES.get(name, name))
    if setting is None:
        raise ConfigError(name, value, VLLM_ANSWERS.get(name, f"one of {', '.join(SETTINGS)}"))
    if setting == "model.tool_format" and value is not None:
        value = VLLM_PARSERS.get(value, value)
    return [(setting, value if value is None or isinstance(value, bool | int | float) else str(value))]


def name_of(setting: str) -> str:
    """Returns the flag or keyword that sets a setting, by Farsight's name; empty where none does."""
    if setting in _SEVERAL:
        return "served_model_name"
    return next((name for name, each in SETTINGS.items() if each == setting), "")


def flag_of(setting: str) -> str:
    """Returns the flag that sets a setting, as ``--kv-memory``."""
    name = name_of(setting) or setting.rpartition(".")[2]
    return f"--{name.replace('_', '-')}"


@contextmanager
def naming(given: Mapping[str, Mapping[str, Any]], *, flags: bool) -> Iterator[None]:
    """Names the flag, or the keyword, in an error of a setting that it has set.

    Args:
        given: As ``overrides_of`` returns them.
    """
    try:
        yield
    except InvalidValueError as error:
        setting = "model.path" if error.field == "model" else error.field  # as the engine names it
        section, _, key = setting.rpartition(".")
        if given.get(section, {}).get(key) is None:
            raise
        name = flag_of(setting) if flags else name_of(setting)
        raise type(error)(name, error.value, error.expected) from error
