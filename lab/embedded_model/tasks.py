"""The tasks of the embedded model: an instruction over a user input, and the one right answer.

Every task is a pair of small pure functions: one draws an input text, the other computes the answer from
that text. Inputs are drawn on the fly, and a hash of the input text decides whether it belongs to the
training or to the held-out side (:func:`is_held_out`), so the two sides are disjoint by construction,
whatever the seeds.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

LengthClass = Literal["shorter", "equal", "longer", "independent"]
"""How the length of an answer follows the length of the input."""

MAX_WORDS: Final = 12
"""Words in the longest input the model is promised to handle."""

MAX_WORD_LETTERS: Final = 8
"""Letters in the longest pseudo-word."""

CALL: Final = "call"
"""The task that the chat template asks for where a request has tools."""

HELD_OUT_MODULUS: Final = 8
"""One input text in this many is held out of training."""

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_LETTER_PERCENT: Final = (
    8.2, 1.5, 2.8, 4.3, 12.7, 2.2, 2.0, 6.1, 7.0, 0.2, 0.8, 4.0, 2.4,
    6.7, 7.5, 1.9, 0.1, 6.0, 6.3, 9.1, 2.8, 1.0, 2.4, 0.2, 2.0, 0.1,
)  # fmt: skip
_LETTER_CUMULATIVE: Final = tuple(accumulate(_LETTER_PERCENT))
_DIGITS: Final = "0123456789"
_DIGIT_NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_MASK_DIGITS: Final = str.maketrans(_DIGITS, "#" * 10)


@dataclass(frozen=True)
class Task:
    """One task: how to ask for it, how to draw an input and what the right answer is."""

    name: str
    instructions: tuple[str, ...]
    """Phrasings of the instruction; the first is the one shown in tables."""
    length_class: LengthClass
    draw_input: Callable[[random.Random, int], str]
    """``(rng, size) -> input``, where ``size`` is the largest number of words (or digits) to draw."""
    answer: Callable[[str], str]
    """The right answer to an input."""
    max_size: int = MAX_WORDS
    """Largest ``size`` the model is promised to handle."""
    extra_size: int = 2
    """How far beyond ``max_size`` training goes."""


@dataclass(frozen=True)
class Example:
    """One instruction over one input, with the expected answer."""

    task: str
    instruction: str
    text: str
    answer: str

    @property
    def prompt(self) -> str:
        """The prompt as text, without the BOS and SEP tokens around it."""
        return f"{self.instruction}\n{self.text}"


def is_held_out(text: str) -> bool:
    """Whether an input text is reserved for evaluation: decided by its CRC-32 alone."""
    return zlib.crc32(text.encode("utf-8")) % HELD_OUT_MODULUS == 0


# --- inputs ------------------------------------------------------------------------------------------------


def draw_word(rng: random.Random) -> str:
    """A pseudo-word of 1 to 8 letters with the letter frequencies of English."""
    letters = rng.randint(1, MAX_WORD_LETTERS)
    return "".join(rng.choices(_LETTERS, cum_weights=_LETTER_CUMULATIVE, k=letters))


def draw_number(rng: random.Random) -> str:
    """A number of 1 to 4 digits, leading zeros allowed."""
    return "".join(rng.choices(_DIGITS, k=rng.randint(1, 4)))


def draw_words(rng: random.Random, size: int) -> str:
    """1 to ``size`` pseudo-words with one space between them."""
    return " ".join(draw_word(rng) for _ in range(rng.randint(1, size)))


def draw_words_and_numbers(rng: random.Random, size: int) -> str:
    """1 to ``size`` items, each a pseudo-word or (one time in three) a number."""
    return " ".join(draw_number(rng) if rng.random() < 1 / 3 else draw_word(rng) for _ in range(rng.randint(1, size)))


def draw_maybe_number(rng: random.Random, size: int) -> str:
    """1 to ``size`` pseudo-words; half of the time one of them is replaced by a number."""
    items = [draw_word(rng) for _ in range(rng.randint(1, size))]
    if rng.random() < 0.5:
        items[rng.randrange(len(items))] = draw_number(rng)
    return " ".join(items)


def draw_digits(rng: random.Random, size: int) -> str:
    """One number of 1 to ``size`` digits."""
    return "".join(rng.choices(_DIGITS, k=rng.randint(1, size)))


def draw_range(rng: random.Random, size: int) -> str:
    """``"a to b"`` with ``a`` in 1..400 and ``a <= b < a + size``."""
    first = rng.randint(1, 400)
    return f"{first} to {first + rng.randrange(size)}"


def draw_name(rng: random.Random) -> str:
    """A name of a function: one or two pseudo-words, joined by an underscore."""
    return "_".join(draw_word(rng) for _ in range(rng.randint(1, 2)))


def draw_question(rng: random.Random, size: int) -> str:
    """1 to ``size`` pseudo-words, some with a capital, half of the time with a question mark behind the last."""
    words = [word.capitalize() if rng.random() < 0.3 else word for word in draw_words(rng, size).split()]
    return " ".join(words) + rng.choice(("", "?"))


def draw_record(rng: random.Random, size: int) -> str:
    """The name of a field on a line of its own, then a question."""
    return f"{draw_word(rng)}\n{draw_question(rng, size)}"


def draw_call(rng: random.Random, size: int) -> str:
    """The names of a function and of its parameter on a line of their own, then a question."""
    return f"{draw_name(rng)} {draw_record(rng, size)}"


# --- answers -----------------------------------------------------------------------------------------------


def repeat(text: str) -> str:
    """The text itself."""
    return text


def mask_digits(text: str) -> str:
    """The text with ``#`` for every digit."""
    return text.translate(_MASK_DIGITS)


def initials(text: str) -> str:
    """The first letter of every word, without spaces."""
    return "".join(word[0] for word in text.split())


def last_word(text: str) -> str:
    """The last word of the text."""
    return text.split()[-1]


def spell_digits(text: str) -> str:
    """The English name of every digit: ``"407"`` becomes ``"four zero seven"``."""
    return " ".join(_DIGIT_NAMES[int(digit)] for digit in text)


def thrice(text: str) -> str:
    """The text three times, numbered."""
    return f"1) {text} 2) {text} 3) {text}"


def bullets(text: str) -> str:
    """Every word on a line of its own behind ``"- "``."""
    return "\n".join(f"- {word}" for word in text.split())


def count(text: str) -> str:
    """Every number from ``a`` to ``b``, both included, for the input ``"a to b"``."""
    first, last = text.split(" to ")
    return " ".join(str(number) for number in range(int(first), int(last) + 1))


def has_digit(text: str) -> str:
    """``yes`` if the text has a digit, else ``no``."""
    return "yes" if any(character.isdigit() for character in text) else "no"


def ticket(text: str) -> str:
    """A record of fixed format with the first letter of the text."""
    return f'{{"status": "ok", "initial": "{text[0]}"}}'


def record(text: str) -> str:
    """A JSON object: the field that the first line names, with the last word of the rest."""
    field, question = text.split("\n")
    return json.dumps({field: last_word(question).rstrip("?")})


def call(text: str) -> str:
    """A call in the form of Hermes: function and parameter of the first line, with the last word of the rest."""
    name, arguments = text.split(" ", 1)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {record(arguments)}}}\n</tool_call>'


# --- the table ---------------------------------------------------------------------------------------------

TASKS: Final[tuple[Task, ...]] = (
    Task("repeat", ("Repeat the text:", "Copy this text:", "Say it again:"), "equal", draw_words, repeat),
    Task(
        "upper", ("Write in upper case:", "Put this in capitals:", "Shout this text:"), "equal", draw_words, str.upper
    ),
    Task(
        "mask_digits",
        ("Replace every digit by #:", "Mask the digits:", "Hide all digits:"),
        "equal",
        draw_words_and_numbers,
        mask_digits,
    ),
    Task(
        "initials",
        ("First letter of each word:", "Give the initials:", "Abbreviate this:"),
        "shorter",
        draw_words,
        initials,
    ),
    Task(
        "last_word",
        ("Give the last word:", "Which word comes last?", "What is the final word?"),
        "shorter",
        draw_words,
        last_word,
    ),
    Task(
        "spell_digits",
        ("Spell the digits:", "Read out each digit:", "Write the digits as words:"),
        "longer",
        draw_digits,
        spell_digits,
        max_size=10,
    ),
    Task(
        "thrice",
        ("Write it three times:", "Give three copies:", "Say this thrice:"),
        "longer",
        draw_words,
        thrice,
        max_size=6,
    ),
    Task("bullets", ("Make a bullet list:", "List the words:", "One word per line:"), "longer", draw_words, bullets),
    Task(
        "count",
        ("Count:", "List the numbers:", "Count up:"),
        "independent",
        draw_range,
        count,
        max_size=10,
        extra_size=0,
    ),
    Task(
        "has_digit",
        ("Is there a digit?", "Does it contain a digit?", "Any digits here?"),
        "independent",
        draw_maybe_number,
        has_digit,
    ),
    Task(
        "ticket", ("Open a ticket:", "Make a ticket record:", "File this as JSON:"), "independent", draw_words, ticket
    ),
    Task(
        "record",
        ("Fill in the field:", "Give JSON with the field:", "Answer as a JSON object:"),
        "independent",
        draw_record,
        record,
    ),
    Task(CALL, ("Call the function:", "Make a tool call:", "Use the tool:"), "independent", draw_call, call),
)
"""All tasks the model is trained on, in the order of the tables."""


def make_example(task: Task, rng: random.Random, size: int, held_out: bool) -> Example:
    """Draw one example of ``task`` with at most ``size`` words, from the wanted side of the split.

    Sizes of which one side has almost no inputs (the single digits, say) are left by growing ``size``.
    """
    for attempt in range(1000):
        text = task.draw_input(rng, size + attempt // 50)
        if is_held_out(text) == held_out:
            return Example(task.name, rng.choice(task.instructions), text, task.answer(text))
    raise RuntimeError(f"no {'held-out' if held_out else 'training'} input found for {task.name}")


def held_out_examples(task: Task, n: int, seed: int) -> list[Example]:
    """``n`` held-out examples of ``task`` with distinct inputs, the same for the same seed."""

    def stream() -> Iterator[Example]:
        rng = random.Random(f"{task.name}/{seed}")
        while True:
            yield make_example(task, rng, task.max_size, held_out=True)

    by_text: dict[str, Example] = {}
    for example in stream():
        by_text.setdefault(example.text, example)
        if len(by_text) == n:
            break
    return list(by_text.values())


def task_named(name: str) -> Task:
    """The task of that name."""
    for task in TASKS:
        if task.name == name:
            return task
    raise KeyError(name)
