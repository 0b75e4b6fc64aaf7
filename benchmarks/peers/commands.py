"""Commands that start each peer so that it performs well on few cores, and records of what was started."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.servers import ServerCommand, free_port

PACKAGES = ("vllm", "transformers", "torch", "accelerate")

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}

SINGLE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
"""With its default executor vLLM runs three processes whose shared-memory readers spin; on two cores the spinning
starves its HTTP server. In one process it is quicker and its streams are smooth. The variable is needed beside the
flag: without it vLLM turns ``uni`` back into ``mp`` on a CPU."""

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


def peer(name: str, venv: Path, model_dir: Path, max_model_len: int, options: Sequence[str]) -> Peer:
    """A peer by its name, ``vllm`` or ``transformers``.

    Args:
        venv: Virtual environment in which it is installed.
        max_model_len: In tokens; vLLM plans its memory by it.
        options: More arguments of its server.
    """
    if name == "vllm":
        return Peer(name, vllm_command(venv, model_dir, max_model_len, options), True, True)
    return Peer(name, transformers_command(venv, model_dir, options), False, False)


def vllm_command(venv: Path, model_dir: Path, max_model_len: int, options: Sequence[str]) -> ServerCommand:
    """``vllm serve`` of its CPU build, in one process, with prefix caching off: the prompts share nothing anyway."""
    port, model_name = free_port(), model_dir.resolve().name
    words = [str(venv / "bin/vllm"), "serve", str(model_dir), "--served-model-name", model_name]
    words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len)]
    words += ["--dtype", "bfloat16", "--no-enable-prefix-caching", "--distributed-executor-backend", "uni", *options]
    env = {**OFFLINE, **SINGLE_PROCESS, "VLLM_CPU_KVCACHE_SPACE": KV_SPACE_GIB, "VLLM_NO_USAGE_STATS": "1"}
    env |= {"VLLM_CACHE_ROOT": str(venv / "cache")}  # compiled graphs; kept out of the home directory
    return ServerCommand(words, port, model_name, env)


def transformers_command(venv: Path, model_dir: Path, options: Sequence[str]) -> ServerCommand:
    """``transformers serve`` with continuous batching; its own sizing of the cache is made for GPUs."""
    port = free_port()
    words = [str(venv / "bin/transformers"), "serve", str(model_dir), "--continuous-batching", "--device", "cpu"]
    words += ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port), "--no-cb-use-cuda-graph"]
    words += ["--cb-block-size", CB_BLOCK_TOKENS, "--cb-num-blocks", CB_BLOCKS, "--cb-max-batch-tokens", "2048"]
    return ServerCommand([*words, *options], port, str(model_dir), {**OFFLINE, "OMP_NUM_THREADS": "1"})


def installed_versions(venv: Path) -> dict[str, str]:
    """Versions of the installed ``PACKAGES`` and of Python in the environment.

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
    versions: dict[str, str] = json.loads(done.stdout)
    return versions
