"""Past-Future's admission beside both others on a model that computes: ``python -m benchmarks.admissions MODEL CHATS``.

A closed loop of clients sends chats, which end by themselves, to the engine in this process, with KV memory for a few
of the longest. CHATS is what ``benchmarks.real_presets record`` writes. Seconds are of this process and one compute
thread, so that other work on the machine does not count. The bounds of a good request are the paper's: its first token
within 10 s, and no gap above 1.5 s.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_presets.chats import Chat, read_chats
from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.services.api.text.prompts import ChatPrompt, PromptEncoder
from farsight.services.bench.report import markdown_table

PRESETS = ("past-future", "aggressive", "conservative")
TTFT_S, MTPOT_S = 10.0, 1.5


@dataclass(slots=True)
class Sent:
    """A chat and the instants at which it was sent and got tokens."""

    at: float
    token_at: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.at

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.token_at, self.token_at[1:], strict=False)), default=0.0)


def run(args: argparse.Namespace, preset: str, chats: Sequence[Chat]) -> list[Any]:
    """Serves the chats under a preset; returns a row of the table."""
    block_bytes = 16 * load_model_config(args.model).kv_bytes_per_token(torch.bfloat16)
    num_blocks = args.long_answers * (args.limit + args.prompt) // 16
    config = EngineConfig(
        kv_memory=str(num_blocks * block_bytes),
        block_size=16,
        max_num_seqs=args.clients,
        max_model_len=args.limit + 4 * args.prompt,
        num_threads=1,
        prefix_cache=False,
    )
    scheduler = SchedulerConfig(preset=preset)
    engine = Engine(args.model, dtype="bfloat16", engine=config, scheduler=scheduler, clock=time.process_time)
    encoder = PromptEncoder(args.model)
    waiting = deque(enumerate(chats))
    sent: dict[str, Sent] = {}
    num_left, num_tokens, began_at = len(chats), 0, time.process_time()
    while num_left:
        while waiting and len(sent) - (len(chats) - num_left) < args.clients:
            number, chat = waiting.popleft()
            prompt = ChatPrompt([{"role": "user", "content": chat.prompt}])
            ids = encoder.encode_rendered(encoder.render_chat(prompt))
            sampling = SamplingParams(args.limit, temperature=0.7, top_p=0.95, seed=number)
            sent[engine.submit(ids, sampling)] = Sent(time.process_time())
        deltas = engine.step()
        now = time.process_time()
        for delta in deltas:
            sent[delta.request_id].token_at += [now] * bool(delta.num_tokens)
            num_tokens += delta.num_tokens
            num_left -= delta.finish_reason is not None
    took_s = time.process_time() - began_at
    good = sum(each.ttft_s <= TTFT_S and each.longest_gap_s <= MTPOT_S for each in sent.values())
    smooth = sum(each.longest_gap_s <= MTPOT_S for each in sent.values())
    evictions = 100 * engine.scheduler.num_preemptions / len(chats)
    ttfts = sorted(each.ttft_s for each in sent.values())
    numbers = (evictions, good / took_s, smooth / took_s, num_tokens / took_s, ttfts[len(ttfts) // 2])
    return [preset, *(f"{number:.3g}" for number in numbers)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admissions", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--long-answers", type=int, default=12, help="of --limit tokens that fit the KV memory")
    parser.add_argument("--limit", type=int, default=256, help="of an answer, in tokens")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt, for the memory")
    args = parser.parse_args()
    fitting = [each for each in read_chats(args.chats, folds=0) if each.prompt_len <= 3 * args.prompt]
    chats = fitting[: args.requests]
    header = [
        "preset",
        "evictions for 100",
        "good requests/s",
        "without long gaps/s",
        "tokens/s",
        "median first token s",
    ]
    print(markdown_table(header, [run(args, preset, chats) for preset in args.presets]))


if __name__ == "__main__":
    main()
