"""Records how long a model's answers are if it ends them itself: ``python -m benchmarks.natural_lengths MODEL OUT``.

Prompts are half open instructions, half tasks, in a fixed order. A run goes on where the last one has ended. Each line
of OUT has the prompt, the lengths in tokens, and the state of the prompt's last token behind half of the layers.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine.engine import Engine
from farsight.services.api.text.prompts import ChatPrompt, PromptEncoder

IN_FLIGHT = 32
SEED = 48


def prompts_of(data: Path) -> list[str]:
    """Returns all prompts, an instruction and a task by turns."""
    rng, files = random.Random(SEED), []
    for name in ("alpaca", "apps_text"):
        with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        rng.shuffle(rows)
        files.append([f"{row['instruction']}\n\n{row['user_input']}".strip() for row in rows])
    return [prompt for pair in zip(*files, strict=False) for prompt in pair]


def record(model: Path, out: Path, prompts: Sequence[str], limit: int, temperature: float, threads: int) -> None:
    """Appends a line for each prompt that has none yet, as it ends; an ended run leaves no gap to be told from.

    Raises:
        InvalidValueError: The model cannot be loaded, or has no room for a prompt.
    """
    done = set()
    if out.exists():
        with out.open(encoding="utf-8") as lines:
            done = {int(json.loads(line)["number"]) for line in lines}
    engine = Engine(model, engine=EngineConfig(max_num_seqs=IN_FLIGHT, max_model_len=2048, num_threads=threads))
    engine.worker.runner.reads_states = True
    encoder = PromptEncoder(model)
    rows: dict[str, dict[str, int | str]] = {}
    waiting = [number for number in range(len(prompts)) if number not in done]
    with out.open("a", encoding="utf-8") as file:
        while waiting or rows:
            while waiting and len(rows) < IN_FLIGHT:
                number = waiting.pop(0)
                chat = ChatPrompt([{"role": "user", "content": prompts[number]}])
                ids = encoder.encode_rendered(encoder.render_chat(chat))
                if len(ids) + limit > engine.worker.ready.max_model_len:
                    continue
                sampling = SamplingParams(limit, temperature=temperature, seed=number)
                row: dict[str, int | str] = {"number": number, "prompt": prompts[number], "prompt_tokens": len(ids)}
                rows[engine.submit(ids, sampling)] = {**row, "limit": limit, "output_tokens": 0, "state": ""}
            for delta in engine.step():
                row = rows[delta.request_id]
                row["output_tokens"] = int(row["output_tokens"]) + delta.num_tokens
                row["state"] = row["state"] or base64.b64encode(delta.state).decode()
                if delta.finish_reason is not None:
                    del rows[delta.request_id]
                    print(json.dumps(row, ensure_ascii=False), file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.natural_lengths", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    default = Path(os.environ.get("FARSIGHT_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, metavar="DIR", help="with apps_text and alpaca")
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--limit", type=int, default=512, help="of an output, in tokens")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    prompts = prompts_of(args.data)[: args.num]
    record(args.model, args.out, prompts, args.limit, args.temperature, args.threads)


if __name__ == "__main__":
    main()
