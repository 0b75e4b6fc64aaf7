"""The settings of a model that ``LLM``, ``AsyncLLM`` and ``Server`` take as keywords."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict


class ModelSettings(TypedDict, total=False):
    """The flags of ``farsight serve`` that have to do with the model and its schedule, under the same names.

    ``docs/reference/configuration.md`` says what each means. The second part are vLLM's names for some of them.
    """

    preset: str
    dtype: str
    device: str
    weights: str
    kv_dtype: str
    kv_memory: str
    host_kv_memory: str
    gpu_memory_utilization: float
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int
    threads: int
    prefix_cache: bool
    benchmark_mode: bool
    execution: str
    replicas: int
    predictor: str | Path
    predictor_encoder: str
    chat_template: str | Path
    tool_format: str
    served_model_name: str | Sequence[str]

    max_num_batched_tokens: int
    enable_prefix_caching: bool
    tool_call_parser: str
    swap_space: float


class ServerSettings(ModelSettings, total=False):
    """Further flags of ``farsight serve``."""

    host: str
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: bool
    max_replicas: int
    placement: str
    proxy: str
    drain_s: float
    log_level: str
    access_log: bool
    api_key: str
    key_file: str | Path
    insecure: bool
    tls_cert: str | Path
    tls_key: str | Path
    allow_image_urls: str

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
