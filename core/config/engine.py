"""``[model]`` and ``[engine]``: which model, and the devices, memory and numbers that it runs with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from farsight.core.errors import ConfigError, InvalidValueError, require

TOOL_FORMATS = (
    *("auto", "hermes", "llama3", "mistral", "mistral-args", "granite", "deepseek-v3", "deepseek-v3.1", "harmony"),
    *("qwen3-coder", "glm4.5", "gemma4", "lfm2", "pythonic"),
)
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served.

    Attributes:
        path: A name that ``farsight models`` lists, a directory, a GGUF file or a hub id; empty means the embedded
            model.
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


BACKENDS = ("auto", "native", "torch", "triton", "xformers")
GPU_BACKENDS = ("triton", "xformers")
LONG_FACTORS = ("served", "request")
WEIGHTS = ("auto", "full", "float", "int8", "int4")
KV_DTYPES = ("auto", "int8")
EXECUTIONS = ("ragged", "static")
EMULATED = "emulated:"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one worker runs.

    Attributes:
        device: The device that computes: ``cpu``, ``cuda`` (the first GPU that the process sees), or
            ``emulated:PROFILE``, to measure scheduling. An emulated device computes nothing: steps and copies take as
            long as the profile says (a name, or a file of ``farsight profile``), and the tokens are made up.
        kv_memory: Memory of the KV pool, as ``512MiB`` or ``2GiB``; ``auto`` takes what a full batch of
            full-length sequences needs, but all replicas together at most a fifth of the machine's available memory. On
            a GPU it takes at most what weights and the largest step leave of ``gpu_memory_utilization``. An emulated
            device counts it in the tokens of its profile, and takes at most the memory that the profile gives
            the device. A replica of several processes has so much in each of them.
        host_kv_memory: Memory of the host pool that sequences can be offloaded to, as for ``kv_memory``; ``0`` is none.
            ``auto`` is as much as the KV pool has, but all replicas together at most a fifth of the machine's available
            memory, where the KV policy moves KV to the host, and none where it does not.
        state_memory: Memory for the states of cached prefixes, as for ``kv_memory``, of a model that has states beside
            keys and values: without its state, a prefix is computed again. ``0`` keeps none; ``auto`` takes at most a
            fifth of the machine's available memory.
        block_size: Tokens in a KV block; 0 is 64 on a GPU, whose kernels take multiples of that, and 32 elsewhere.
        prefix_cache: Sequences that begin with the same tokens share the KV of their full blocks. Blocks of ended
            sequences stay cached until their memory is needed.
        max_num_seqs: Sequences in one step.
        max_batch_tokens: Tokens computed in one step; longer prompts are prefilled in several. 0 is 8192 on a GPU and
            1024 elsewhere.
        max_model_len: Tokens a sequence may reach, prompt and output together; 0 is the model's own context, which only
            an emulated device can go beyond.
        num_threads: Compute threads of a worker; 0 shares the cores that it may use among the replicas, from 4 cores on
            all but one, which serves HTTP and scheduling, and gives none more than a NUMA node has.
        benchmark_mode: Requests may say, with ``benchmark_len``, where their outputs end, and no request is refused for
            those that wait already (``[server]``). Only to measure.
        backend: The code that computes a step: ``native`` is one compiled call on the CPU, ``triton`` torch operations
            with this package's own kernels of attention on a GPU, ``xformers`` the same with those of xformers,
            ``torch`` the reference on either; ``auto`` takes the first that is available and supports the model.
        gpu_memory_utilization: Share of a GPU's memory that weights, KV pool and the largest step may take together.
        compile: Let torch compile what lies between two attentions. It takes minutes at the start.
        weights: ``int8`` and ``int4`` round the matrices to 8 bits in groups of 128, or to 4 bits in groups of 32 (the
            vocabulary head always to 8). On the CPU a step multiplies them as they are, with activations in 8 bits: a
            half or a third of bfloat16's memory, and faster. On a GPU they are unpacked each time, which is slower.
            ``full`` leaves what the checkpoint has, also where that is quantised: then the CPU rounds activations too.
            ``float`` computes such a checkpoint in ``model.dtype``, slower and in more memory: nothing is rounded to
            integers. ``auto`` is what the preset says.
        kv_dtype: ``int8`` keeps keys and values in 8 bits, with a scale for each token and head: 0.53 of bfloat16's
            memory with heads of 64, so nearly twice the sequences fit. Only the compiled step on the CPU computes so.
            ``auto`` is the model's type.
        speculation: What guesses tokens ahead, which a step verifies where that is worth its price: ``ngram`` guesses
            that an output repeats its prompt or itself, ``off`` nothing. Outputs are the same. ``auto`` is ``ngram``
            where the compiled step computes, whose results do not depend on the size of a step, and ``off`` elsewhere.
        long_factors: Which sequences of a ``longrope`` model (Phi-3) are turned by its long factors. With ``served``:
            all if the served context exceeds the original window, else none. With ``request``: each whose prompt and
            limit of output exceed the window together, as transformers chooses for a sequence of that length.
            ``request`` needs the CPU and one process for a replica; the two kinds share no cached prefixes.
        disk_kv: Folder in which the KV of ended requests is kept, and found again by the next turn of a conversation,
            also after a restart. Who can read it can tell what was said: it is made for the server's user alone.
            Empty: none is kept. It needs the CPU, one process for a replica and ``prefix_cache``.
        disk_kv_bytes: Most bytes of the folder, as ``20GiB``; the least recently used blocks leave first.
        disk_kv_tenant_bytes: Most bytes of one tenant, who then loses his own blocks; ``0`` is no limit of his own.
        disk_kv_hourly_bytes: Most bytes that a worker writes in an hour, since writing wears a disk out; ``0`` is no
            limit.
    """

    device: str = "cpu"
    kv_memory: str = "auto"
    host_kv_memory: str = "auto"
    state_memory: str = "auto"
    block_size: int = 0
    prefix_cache: bool = True
    max_num_seqs: int = 128
    max_batch_tokens: int = 0
    max_model_len: int = 0
    num_threads: int = 0
    benchmark_mode: bool = False
    backend: str = "auto"
    gpu_memory_utilization: float = 0.9
    compile: bool = False
    weights: str = "auto"
    kv_dtype: str = "auto"
    speculation: str = "auto"
    long_factors: str = "served"
    disk_kv: str = ""
    disk_kv_bytes: str = "20GiB"
    disk_kv_tenant_bytes: str = "0"
    disk_kv_hourly_bytes: str = "20GiB"

    def __post_init__(self) -> None:
        require(self.max_num_seqs >= 1, "engine.max_num_seqs", self.max_num_seqs, "an integer >= 1")
        self.kv_bytes()
        self.host_kv_bytes()
        self.state_bytes()
        for name in ("block_size", "max_batch_tokens", "max_model_len", "num_threads"):
            value = getattr(self, name)
            require(value >= 0, f"engine.{name}", value, "an integer >= 0")
        require(self.backend in BACKENDS, "engine.backend", self.backend, f"one of {', '.join(BACKENDS)}")
        require(self.weights in WEIGHTS, "engine.weights", self.weights, f"one of {', '.join(WEIGHTS)}")
        require(self.kv_dtype in KV_DTYPES, "engine.kv_dtype", self.kv_dtype, f"one of {', '.join(KV_DTYPES)}")
        require(self.long_factors in LONG_FACTORS, "engine.long_factors", self.long_factors, "served or request")
        if self.long_factors == "request":
            require(self.device == "cpu", "engine.long_factors", self.long_factors, "served where device is not cpu")
        share = self.gpu_memory_utilization
        require(0 < share <= 1, "engine.gpu_memory_utilization", share, "a number > 0 and <= 1")
        self._check_device()
        if self.kv_dtype == "int8":
            self._check_int8_kv()
        self.disk_bytes("disk_kv_bytes")
        self.disk_bytes("disk_kv_tenant_bytes")
        self.disk_bytes("disk_kv_hourly_bytes")
        if self.disk_kv:
            require(self.device == "cpu", "engine.disk_kv", self.disk_kv, "empty where device is not cpu")
            require(self.prefix_cache, "engine.disk_kv", self.disk_kv, "empty where prefix_cache is false")

    def _check_device(self) -> None:
        known = self.device in ("cpu", "cuda") or bool(self.profile)
        require(known, "engine.device", self.device, f"cpu, cuda, or {EMULATED}PROFILE as in {EMULATED}a100-7b")
        if self.device == "cuda":
            require(
                self.backend != "native", "engine.backend", self.backend, "auto, triton, xformers or torch on a GPU"
            )
        if self.backend in GPU_BACKENDS:
            require(self.device == "cuda", "engine.device", self.device, f"cuda, where {self.backend} computes")
        if self.backend == "xformers":
            size = self.kv_block_size
            require(size % 64 == 0, "engine.block_size", size, "a multiple of 64, as xformers' kernels take it")

    def _check_int8_kv(self) -> None:
        if self.device != "cpu":
            expected = "auto (the profile says what KV takes)" if self.profile else "auto (int8 is for the CPU)"
            raise ConfigError("engine.kv_dtype", self.kv_dtype, expected)
        computes = self.backend in ("auto", "native")
        require(computes, "engine.kv_dtype", self.kv_dtype, "auto (torch operations keep KV in the model's type)")

    @property
    def profile(self) -> str:
        """Name or path of the emulated device's profile; empty if the device is a real one."""
        return self.device.removeprefix(EMULATED) if self.device.startswith(EMULATED) else ""

    @property
    def kv_block_size(self) -> int:
        """``block_size``, or this device's default where that is 0."""
        return self.block_size or (64 if self.device == "cuda" else 32)

    @property
    def step_tokens(self) -> int:
        """``max_batch_tokens``, or this device's default where that is 0."""
        return self.max_batch_tokens or (8192 if self.device == "cuda" else 1024)

    def kv_bytes(self) -> int | None:
        """Returns ``kv_memory`` in bytes; None for ``auto``."""
        return None if self.kv_memory == "auto" else _parse_memory("engine.kv_memory", self.kv_memory, "auto")

    def host_kv_bytes(self) -> int | None:
        """Returns ``host_kv_memory`` in bytes; 0 for none, None for ``auto``."""
        return self._bytes_or_none("host_kv_memory")

    def state_bytes(self) -> int | None:
        """Returns ``state_memory`` in bytes; 0 for none, None for ``auto``."""
        return self._bytes_or_none("state_memory")

    def _bytes_or_none(self, name: str) -> int | None:
        text = getattr(self, name)
        if text in ("0", "auto"):
            return 0 if text == "0" else None
        return _parse_memory(f"engine.{name}", text, "auto, or 0 for none")

    def disk_bytes(self, name: str) -> int:
        """Returns a setting of the folder ``disk_kv`` in bytes; 0 for ``0``."""
        text = getattr(self, name)
        needs_some = name == "disk_kv_bytes"
        if text == "0" and not needs_some:
            return 0
        return _parse_memory(f"engine.{name}", text, "a size" if needs_some else "0")


def _parse_memory(field: str, text: str, otherwise: str) -> int:
    try:
        return parse_memory(text)
    except InvalidValueError as error:
        raise ConfigError(field, error.value, f"{otherwise}, or {error.expected}") from error


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_memory(text: str) -> int:
    """Returns the bytes in ``"512MiB"``, ``"1.5GB"`` or a plain number; rounded down.

    Raises:
        InvalidValueError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, flags=re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or Fraction(match[1]) == 0:
        raise InvalidValueError("memory", text, "a size above 0 such as 512MiB, 2GiB, 1.5GB or a number of bytes")
    return int(Fraction(match[1]) * unit)
