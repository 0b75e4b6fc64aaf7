"""Questions about scenes, their answers, and the tokenizer: the text model's tokens, and one for each of their words.

A word that is one token costs a fifth of its bytes to train and to serve, and the text model need not learn to spell.
Any other text is read byte by byte.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lab.embedded_model.tokenizer import SPECIAL_TOKENS, byte_level, byte_symbols
from lab.embedded_vision.scenes import COLOURS, KINDS, Scene, number_scene, shapes_scene


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a scene, with its answer."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question.

    Attributes:
        make: Draws a scene that the question can be asked about.
        ask: Draws a question about a scene.
    """

    make: Callable[[random.Random], Scene]
    ask: Callable[[Scene, random.Random], Question]


def _count_kind(scene: Scene, rng: random.Random) -> Question:
    kind = rng.choice(KINDS)
    count = sum(shape.kind == kind for shape in scene.shapes)
    return Question(rng.choice(("How many {}s?", "Count the {}s.")).format(kind), str(count))


def _count_all(scene: Scene, rng: random.Random) -> Question:
    return Question(rng.choice(("How many shapes?", "Count the shapes.")), str(len(scene.shapes)))


def _each_kind(scene: Scene, rng: random.Random) -> Question:
    counts = [sum(shape.kind == kind for shape in scene.shapes) for kind in KINDS]
    return Question("Count each kind.", ", ".join(f"{n} {kind}s" for n, kind in zip(counts, KINDS, strict=True)))


def _read(scene: Scene, rng: random.Random) -> Question:
    return Question(rng.choice(("Read the number.", "What number is it?")), scene.number)


TASKS: Final[Mapping[str, Task]] = {
    "count_kind": Task(shapes_scene, _count_kind),
    "count_all": Task(shapes_scene, _count_all),
    "each_kind": Task(shapes_scene, _each_kind),
    "read": Task(number_scene, _read),
}


IMAGE_ID: Final = 4
"""The first reserved token of the text model's vocabulary stands for a patch of a picture."""
IMAGE: Final = "<image>"
SPECIAL: Final = tuple(IMAGE if index == IMAGE_ID else token for index, token in enumerate(SPECIAL_TOKENS))
CORPUS: Final = (
    *(f"How many {each}s? Count the {each}s. a {each} {each}s" for each in KINDS),
    *(f"How many {each} shapes? {each} {each}, a {each}" for each in COLOURS),
    *("How many shapes? Count the shapes.", "Is there a", "yes", "no"),
    *("Count each kind.", "Count each colour.", "Read the number.", "What number is it?"),
)
"""Holds every word of :mod:`.questions`; those about colours were given up, and their words remain tokens."""

CHAT_TEMPLATE: Final = (
    "{%- set ns = namespace(system='', user=none) -%}"
    "{%- for message in messages -%}"
    "{%- set text = namespace(value='', images='') -%}"
    "{%- if message['content'] is string -%}{%- set text.value = message['content'] -%}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{%- set text.value = text.value + part['text'] -%}"
    "{%- else -%}{%- set text.images = text.images + '<image>' -%}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'system' -%}{%- set ns.system = text.value + '\\n' -%}"
    "{%- elif message['role'] == 'user' -%}"
    "{%- set ns.user = text.images + ns.system + text.value -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if ns.user is none -%}"
    "{{- raise_exception('This model answers a user message, and the conversation has none.') -}}"
    "{%- endif -%}"
    "{{- bos_token + ns.user -}}"
    "{%- if add_generation_prompt -%}{{- '<sep>' -}}{%- endif -%}"
)
"""Single-turn, as the text model's: the picture, the last user message, SEP."""


@functools.cache
def merges() -> tuple[tuple[str, str], ...]:
    """What makes one token of each word of ``CORPUS``, in the order of application."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(vocab_size=2000, min_frequency=1, show_progress=False)
    learned.train_from_iterator(CORPUS, trainer)
    return tuple((left, right) for left, right in json.loads(learned.to_str())["model"]["merges"])


@functools.cache
def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, ready for ``save_pretrained``."""
    tokens = dict.fromkeys((*SPECIAL, *byte_symbols(), *("".join(pair) for pair in merges())))
    return byte_level(list(tokens), SPECIAL, merges(), CHAT_TEMPLATE)


@functools.cache
def encode(text: str) -> tuple[int, ...]:
    """Token ids of a text without special tokens."""
    return tuple(build_tokenizer().encode(text, add_special_tokens=False))
