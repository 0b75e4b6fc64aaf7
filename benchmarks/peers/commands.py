"""The command that starts each peer so that it does well on few cores, and the versions that were started."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.servers import ServerCommand, farsight_command, free_port

PACKAGES = ("vllm", "transformers", "torch", "accelerate")

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}

SINGLE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""With its default executor vLLM runs three processes whose shared-memory readers spin; on two cores the spinning
starves its HTTP server. In one process it is quicker and its streams are smooth. The variable is needed beside the
flag: without it vLLM turns ``uni`` back into ``mp`` on a CPU."""

PEERS = ("vllm", "transformers", "llama.cpp", "farsight")

KV_SPACE_GIB = "2"
CB_BLOCK_TOKENS, CB_BLOCKS = "128", "512"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server.

    Attributes:
        takes_ids: Prompts may be token ids.
        takes_extensions: It supports ``ignore_eos`` and ``stream_options``; if not, neither server is sent them.
    """

    name: str
    command: ServerCommand
    takes_ids: bool
    takes_extensions: bool


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What a peer is started with.

    Attributes:
        installed: A virtual environment; for ``llama.cpp`` the directory that holds ``llama-server``.
        model: A model directory; for ``llama.cpp`` a GGUF file.
        max_model_len: In tokens; vLLM plans its memory by it, llama.cpp has this much for each request in flight.
        threads: Compute threads.
        in_flight: The most requests in flight; llama.cpp has so many slots.
        more: More arguments of its server.
        dtype: The type of weights and KV; llama.cpp takes that of its file.
    """

    installed: Path
    model: Path
    max_model_len: int = 2048
    threads: int = 1
    in_flight: int = 1
    more: Sequence[str] = ()
    dtype: str = "bfloat16"


def peer(name: str, options: PeerOptions) -> Peer:
    """A peer by its name, one of ``PEERS``."""
    if name == "vllm":
        return Peer(name, vllm_command(options), True, True)
    if name == "farsight":
        return Peer("other-farsight", own_command(options), True, True)
    if name == "llama.cpp":
        return Peer(name, llama_cpp_command(options), True, True)
    return Peer(name, transformers_command(options), False, False)


def own_command(options: PeerOptions) -> ServerCommand:
    """``farsight serve`` of this checkout: beside it stands the same server with other flags, such as a preset."""
    return farsight_command(
        options.model,
        ["--dtype", options.dtype, "--proxy", "haproxy", "--threads", str(options.threads), *options.more],
    )


def vllm_command(options: PeerOptions) -> ServerCommand:
    """``vllm serve`` of its CPU build, in one process, with prefix caching off: the prompts share nothing anyway."""
    port, model_name = free_port(), options.model.resolve().name
    words = [str(options.installed / "bin/vllm"), "serve", str(options.model), "--served-model-name", model_name]
    words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(options.max_model_len)]
    words += ["--dtype", options.dtype, "--no-enable-prefix-caching", "--distributed-executor-backend", "uni"]
    env = {**OFFLINE, **SINGLE_PROCESS, "VLLM_CPU_KVCACHE_SPACE": KV_SPACE_GIB, "VLLM_NO_USAGE_STATS": "1"}
    env |= {"OMP_NUM_THREADS": str(options.threads)}
    env |= {"VLLM_CACHE_ROOT": str(options.installed / "cache")}  # compiled graphs; kept out of the home directory
    return ServerCommand([*words, *options.more], port, model_name, env)


def llama_cpp_command(options: PeerOptions) -> ServerCommand:
    """``llama-server`` with a slot for every request in flight, without its cache of prompts."""
    port, model_name = free_port(), options.model.resolve().name
    words = [str(options.installed / "llama-server"), "--model", str(options.model), "--alias", model_name]
    words += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(options.threads), "--no-webui"]
    words += ["--parallel", str(options.in_flight), "--ctx-size", str(options.max_model_len * options.in_flight)]
    words += ["--no-cache-prompt"]
    return ServerCommand([*words, *options.more], port, model_name)


def transformers_command(options: PeerOptions) -> ServerCommand:
    """``transformers serve`` with continuous batching; its own sizing of the cache is made for GPUs."""
    port = free_port()
    words = [str(options.installed / "bin/transformers"), "serve", str(options.model)]
    words += ["--continuous-batching", "--device", "cpu"]
    words += ["--dtype", options.dtype, "--host", "127.0.0.1", "--port", str(port), "--no-cb-use-cuda-graph"]
    words += ["--cb-block-size", CB_BLOCK_TOKENS, "--cb-num-blocks", CB_BLOCKS, "--cb-max-batch-tokens", "2048"]
    env = {**OFFLINE, "OMP_NUM_THREADS": str(options.threads)}
    return ServerCommand([*words, *options.more], port, str(options.model), env)


def versions(name: str, installed: Path) -> dict[str, str]:
    """The versions of a peer and of what it stands on.

    Raises:
        OSError: It is not there.
        subprocess.CalledProcessError: It does not run.
    """
    if name == "llama.cpp":
        words = [str(installed / "llama-server"), "--version"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return {name: (done.stdout + done.stderr).strip()}
    return installed_versions(installed)


def installed_versions(venv: Path) -> dict[str, str]:
    """The versions of Python and of those ``PACKAGES`` that are installed in a virtual environment.

    Raises:
        OSError: The environment has no Python.
        subprocess.CalledProcessError: Its Python does not run.
    """
    script = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name'] in sys.argv}\n"
        "print(json.dumps(found | {'python': platform.python_version()}))"
    )
    words = [str(venv / "bin/python"), "-c", script, *PACKAGES, "vllm-cpu"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
