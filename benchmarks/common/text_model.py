"""A small model that has learned something: trained on the source text of Python's standard library, offline."""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.make_model import PRESETS, random_model, train_tokenizer

TEXT_STEPS = 600
WINDOW = 256
ROWS = 8
PEAK_LEARNING_RATE = 2e-3
WARM_UP_STEPS = 50
HELD_OUT = 17
"""Every file whose place in the sorted list is a multiple of this is not trained on."""
NUM_CHARS = 8_000_000


def held_out_text() -> str:
    """The text that is not trained on."""
    return "\n".join(_texts(held_out=True))


def train_text_model(out: Path, steps: int) -> None:
    """Trains the preset ``tiny`` in float32 and writes it in bfloat16, with its tokenizer; prints the loss.

    600 steps take about 5 minutes on 3 cores.
    """
    tokenizer = train_tokenizer()
    model: Any = random_model(PRESETS["tiny"], tokenizer, torch.float32).train()
    torch.nn.init.normal_(model.lm_head.weight, std=0.02)
    ids = torch.tensor(tokenizer("\n".join(_texts(held_out=False)), add_special_tokens=False)["input_ids"])
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.05, betas=(0.9, 0.95))
    began = time.perf_counter()
    for step in range(steps):
        share = min((step + 1) / WARM_UP_STEPS, 1 - 0.95 * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * share
        starts = torch.randint(len(ids) - WINDOW, (ROWS,), generator=generator).tolist()
        rows = torch.stack([ids[start : start + WINDOW] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}, loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    model.eval().to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _texts(*, held_out: bool) -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    found, num_chars = [], 0
    for index, path in enumerate(paths):
        if (index % HELD_OUT == 0) is held_out and num_chars <= NUM_CHARS:
            found.append(path.read_text("utf-8", errors="ignore"))
            num_chars += len(found[-1])
    return found
