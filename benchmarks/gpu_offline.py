"""The offline run that nano-vllm publishes, in the shape of Qwen3-0.6B: ``python -m benchmarks.gpu_offline``.

256 requests of 100 to 1,024 tokens in and as many out, random weights, temperature 0.6, no end of sequence. Scheduler,
executor and worker are those of a server, without Ray and HTTP. The run is made twice: the first is to be as fast.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.gpu_models import model_config, save_random_checkpoint
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from farsight.engine.steps.backends import GraphBackend
from farsight.engine.steps.model_runner import ModelRunner
from farsight.services.bench.report import provenance, write_json

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **QWEN,
    "vocab_size": 12000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EMBEDDED = Path(__file__).parents[1] / "services" / "embedded_model"
"""The model whose tokenizer is taken."""

SHORTEST, LONGEST = 100, 1024
TEMPERATURE = 0.6


def requests(count: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Draws prompts, and how each is answered."""
    rng = random.Random(0)
    least = min(SHORTEST, longest // 2)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(least, longest))] for _ in range(count)]
    params = [
        SamplingParams(rng.randint(least, longest), temperature=TEMPERATURE, seed=i, ignore_eos=True)
        for i in range(count)
    ]
    return prompts, params


def run(device: str, shape: dict[str, Any], count: int, longest: int) -> dict[str, Any]:
    """Makes both runs; a record of numbers."""
    prompts, params = requests(count, longest)
    tokens = sum(each.max_new_tokens for each in params)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EMBEDDED / name, model / name)
        config = model_config("tiny", model, **shape)
        save_random_checkpoint(config, model, torch.bfloat16)
        began_at = time.perf_counter()
        engine = Engine(model, engine=EngineConfig(device=device, max_num_seqs=256))
        ready_s = time.perf_counter() - began_at
        seconds = []
        for _ in range(2):
            began_at = time.perf_counter()
            engine.generate(prompts, params)
            seconds.append(time.perf_counter() - began_at)
    runner, compiles = engine.worker.runner, 0
    if isinstance(runner, ModelRunner) and isinstance(runner.backend, GraphBackend):
        compiles = runner.backend.compiles.num_compiles
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "requests": count,
        "output tokens": tokens,
        "ready after s": ready_s,
        "tokens/s": tokens / seconds[0],
        "again tokens/s": tokens / seconds[1],
        "compiles": compiles,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test the script")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else QWEN
    record = run(arguments.device, shape, arguments.requests, arguments.longest)
    print(record)
    write_json(arguments.json, {**provenance(["python", "-m", "benchmarks.gpu_offline"]), **record})


if __name__ == "__main__":
    main()
