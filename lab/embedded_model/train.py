"""Train the embedded model from scratch on one CPU core.

    python -m lab.embedded_model.train --out services/embedded_model --checkpoint build/embedded_model.pt

Examples are drawn on the fly from the training side of the split (:func:`.tasks.is_held_out`), the loss is
taken on the answer and its EOS alone. A curriculum starts with inputs of at most two words, since copying
appears far sooner on short inputs, and allows one more word each time the copying tasks are learned at the
current size. The data of a step depend on the seed, the step and the size, so a resumed run goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM

from lab.embedded_model.tasks import TASKS, Example, Task, held_out_examples, make_example
from lab.embedded_model.tokenizer import (
    BOS_ID,
    EOS_ID,
    MAX_POSITIONS,
    PAD_ID,
    SEP_ID,
    VOCABULARY_SIZE,
    encode_bytes,
    save_tokenizer,
)

STEPS: Final = 8500
SEED: Final = 1
TOKENS_PER_STEP: Final = 5000
MICRO_BATCHES: Final = 3
PEAK_LEARNING_RATE: Final = 3e-3
FINAL_LEARNING_RATE_SHARE: Final = 0.05
WARM_UP_STEPS: Final = 200
WEIGHT_DECAY: Final = 0.05
GRADIENT_CLIP: Final = 1.0
END_WEIGHT: Final = 5.0
END_WEIGHT_FROM_STEP: Final = 3500
"""From this step on the EOS of an answer weighs ``END_WEIGHT`` tokens: where to stop is one token in fifty of
a long count, and is learned last."""
IGNORED: Final = -100
FOCUS_SHARE: Final = 3
"""How often a task of ``--focus`` is drawn for each time that another is."""

FIRST_SIZE: Final = 2
LAST_SIZE: Final = 14
STEPS_PER_SIZE: Final = (80, 400)
"""Fewest and most steps at one size; the most does not bind the first size."""
LEARNED_LOSS: Final = 0.05
COPYING: Final = ("repeat", "upper", "thrice", "bullets", "mask_digits")
"""Tasks whose mean answer loss decides when the curriculum goes on."""

Encoded = tuple[list[int], int]
"""Token ids of prompt and answer, and the number of prompt tokens (SEP included)."""


@dataclass
class Progress:
    """Where a training run stands."""

    step: int = 0
    size: int = FIRST_SIZE
    steps_at_size: int = 0
    copying_loss: float = 5.0
    """Moving average, nats a token."""
    seconds: float = 0.0
    """Training time so far."""


def float32_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention computed in float32: on a CPU the backward pass is far slower in bfloat16.

    ``query`` is (batch, heads, length, width), ``key`` and ``value`` the same with fewer heads; batches are
    padded on the right only, so no mask is needed. The result is (batch, length, heads, width).
    """
    groups = query.shape[1] // key.shape[1]
    with torch.autocast("cpu", enabled=False):
        attended = functional.scaled_dot_product_attention(
            query.float(),
            key.float().repeat_interleave(groups, dim=1),
            value.float().repeat_interleave(groups, dim=1),
            is_causal=True,
            scale=scaling,
        )
    return attended.transpose(1, 2).contiguous(), None


ATTENTION: Final = "farsight_float32"
AttentionInterface.register(ATTENTION, float32_attention)


def build_model() -> LlamaForCausalLM:
    """The untrained model: 4 layers of width 128, with the embedding tied to the output."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def encode(example: Example) -> Encoded:
    """``BOS instruction \\n input SEP answer EOS`` as token ids."""
    prompt = [BOS_ID, *encode_bytes(example.prompt), SEP_ID]
    return [*prompt, *encode_bytes(example.answer), EOS_ID], len(prompt)


def task_size(task: Task, size: int) -> int:
    """The largest input to draw for a task while the curriculum stands at ``size`` words."""
    ahead = 0 if task.max_size <= 6 else 1
    return min(size + ahead, task.max_size + task.extra_size)


def draw_step(seed: int, step: int, size: int, focus: Sequence[str] = ()) -> list[tuple[Task, Encoded]]:
    """Examples of one step, the tasks in even shares, about ``TOKENS_PER_STEP`` tokens in all.

    Args:
        focus: Tasks that get ``FOCUS_SHARE`` times the share of another.
    """
    rng = random.Random(f"{seed}/{step}/{size}")
    mix = [task for task in TASKS for _ in range(FOCUS_SHARE if task.name in focus else 1)]
    drawn: list[tuple[Task, Encoded]] = []
    tokens = 0
    while tokens < TOKENS_PER_STEP:
        for task in mix:
            encoded = encode(make_example(task, rng, task_size(task, size), held_out=False))
            drawn.append((task, encoded))
            tokens += len(encoded[0])
    return drawn


def split_by_length(drawn: list[tuple[Task, Encoded]], parts: int) -> Iterator[list[tuple[Task, Encoded]]]:
    """Cut a step into ``parts`` of like length, so that little is padded and every step keeps its mix."""
    ordered = sorted(drawn, key=lambda item: len(item[1][0]))
    total = sum(len(ids) for _, (ids, _) in ordered)
    part: list[tuple[Task, Encoded]] = []
    filled = 0
    for item in ordered:
        part.append(item)
        filled += len(item[1][0])
        if filled >= total / parts:
            yield part
            part, filled = [], 0
    if part:
        yield part


def collate(encoded: Sequence[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and targets, both (batch, length), padded on the right.

    Targets are ``IGNORED`` outside the answer.
    """
    length = max(len(ids) for ids, _ in encoded) - 1
    inputs = torch.full((len(encoded), length), PAD_ID)
    targets = torch.full((len(encoded), length), IGNORED)
    for row, (ids, prompt_length) in enumerate(encoded):
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[row, prompt_length - 1 : len(ids) - 1] = torch.tensor(ids[prompt_length:])
    return inputs, targets


Forward = Callable[[torch.Tensor], torch.Tensor]
"""Input ids (batch, length) to final hidden states (batch, length, width)."""


def answer_logits(
    model: LlamaForCausalLM, forward: Forward, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (n, vocabulary), targets (n) and row numbers (n) of the answer positions of a batch."""
    wanted = targets != IGNORED
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model.lm_head(forward(inputs)[wanted])
    rows = wanted.nonzero()[:, 0]
    return logits.float(), targets[wanted], rows


def train_step(
    model: LlamaForCausalLM, forward: Forward, drawn: list[tuple[Task, Encoded]], end_weight: float
) -> tuple[float, float]:
    """Accumulate the gradients of one step.

    A token of an answer of n tokens weighs ``n ** -0.5``: long answers neither vanish nor drown the rest.
    Returns the mean loss and the mean loss of the copying tasks, in nats a token.
    """
    answer_lengths = [len(ids) - prompt for _, (ids, prompt) in drawn]
    norm = sum((length - 1 + end_weight) * length**-0.5 for length in answer_lengths)
    sums = {True: 0.0, False: 0.0}
    tokens = {True: 0, False: 0}
    for part in split_by_length(drawn, MICRO_BATCHES):
        inputs, targets = collate([encoded for _, encoded in part])
        logits, wanted, rows = answer_logits(model, forward, inputs, targets)
        losses = functional.cross_entropy(logits, wanted, reduction="none")
        lengths = torch.tensor([len(ids) - prompt for _, (ids, prompt) in part], dtype=torch.float32)
        weights = lengths.rsqrt()[rows] * torch.where(wanted == EOS_ID, end_weight, 1.0)
        ((losses * weights).sum() / norm).backward()
        copying = torch.tensor([task.name in COPYING for task, _ in part])[rows]
        for kind in (True, False):
            sums[kind] += float(losses.detach()[copying == kind].sum())
            tokens[kind] += int((copying == kind).sum())
    return sum(sums.values()) / sum(tokens.values()), sums[True] / max(tokens[True], 1)


def learning_rate(step: int, steps: int, peak: float = PEAK_LEARNING_RATE) -> float:
    """Linear warm-up over ``WARM_UP_STEPS`` or a tenth of a short run, then cosine down to a share of the peak."""
    warm_up = min(WARM_UP_STEPS, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    floor = FINAL_LEARNING_RATE_SHARE
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def advance_curriculum(progress: Progress, copying_loss: float) -> None:
    """Count one step, and allow one more word when copying is learned or has had its time."""
    progress.copying_loss = 0.95 * progress.copying_loss + 0.05 * copying_loss
    progress.steps_at_size += 1
    fewest, most = STEPS_PER_SIZE
    learned = progress.copying_loss < LEARNED_LOSS and progress.steps_at_size >= fewest
    overdue = progress.size > FIRST_SIZE and progress.steps_at_size >= most
    if progress.size < LAST_SIZE and (learned or overdue):
        progress.size += 1
        progress.steps_at_size = 0


@torch.no_grad()
def exact_matches(model: LlamaForCausalLM, forward: Forward, examples: Sequence[Example]) -> int:
    """How many answers greedy decoding would give exactly.

    It does if each token of the answer is the likeliest one after the right tokens before it, so one forward
    pass tells.
    """
    encoded = [encode(example) for example in examples]
    inputs, targets = collate(encoded)
    logits, wanted, rows = answer_logits(model, forward, inputs, targets)
    wrong = rows[logits.argmax(-1) != wanted]
    return len(encoded) - int(wrong.unique().numel())


def export(model: LlamaForCausalLM, out: Path) -> None:
    """Write the model with bfloat16 weights, its generation settings and its tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    stored: Any = build_model()
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16)
    stored.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False
    )
    stored.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(out)


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write everything a resumed run needs, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a trained model, float32, by parameter."""
    trained = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights: dict[str, torch.Tensor] = trained.state_dict()
    return weights


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW, with weight decay on the matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), fused=True)


def report(model: LlamaForCausalLM, forward: Forward, progress: Progress, n: int = 24) -> str:
    """Exact matches in percent per task, on held-out inputs of the promised sizes."""
    shares = []
    for task in TASKS:
        hits = exact_matches(model, forward, held_out_examples(task, n, seed=2))
        shares.append(f"{task.name} {100 * hits // n}")
    return f"  step {progress.step} size {progress.size}: " + ", ".join(shares)


def train(arguments: argparse.Namespace) -> None:
    """Run or resume the training and write the model."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = build_model()
    progress = Progress()
    if arguments.start_from:
        model.load_state_dict(load_weights(arguments.start_from))
        progress = Progress(size=LAST_SIZE)
    model.set_attn_implementation(ATTENTION)
    optimizer = build_optimizer(model)
    if arguments.resume and arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        progress = Progress(**state["progress"])

    def eager(inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        return hidden

    forward: Forward = torch.compile(eager, dynamic=True) if arguments.compile else eager
    started = time.monotonic() - progress.seconds
    while progress.step < arguments.steps:
        rate = learning_rate(progress.step, arguments.steps, arguments.rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        knows_text = arguments.start_from or progress.step >= END_WEIGHT_FROM_STEP
        drawn = draw_step(arguments.seed, progress.step, progress.size, arguments.focus)
        loss, copying_loss = train_step(model, forward, drawn, END_WEIGHT if knows_text else 1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.seconds = time.monotonic() - started
        advance_curriculum(progress, copying_loss)
        if progress.step % 50 == 0:
            print(
                f"{progress.step} {progress.seconds:.0f}s size {progress.size} rate {rate:.2e} "
                f"loss {loss:.4f} copying {progress.copying_loss:.4f}",
                flush=True,
            )
        if progress.step % arguments.report_every == 0 or progress.step == arguments.steps:
            print(report(model, eager, progress), flush=True)
            save_checkpoint(arguments.checkpoint, model, optimizer, progress)
    export(model, arguments.out)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the embedded model from scratch on one CPU core.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model files")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/embedded_model.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint if there is one")
    parser.add_argument("--report-every", type=int, default=250, help="steps between reports and checkpoints")
    parser.add_argument("--start-from", type=Path, help="folder of a trained model to go on from, at the largest size")
    parser.add_argument("--focus", nargs="*", default=(), help=f"tasks drawn {FOCUS_SHARE} times as often")
    parser.add_argument("--rate", type=float, default=PEAK_LEARNING_RATE, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile the model (needs a C++ compiler)")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
