"""The tasks and the tokenizer of the embedded model, without the model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lab.embedded_model.tasks import (
    MAX_WORD_LETTERS,
    TASKS,
    Task,
    held_out_examples,
    is_held_out,
    make_example,
    task_named,
)
from lab.embedded_model.tokenizer import (
    BOS_ID,
    BYTE_OFFSET,
    EOS_ID,
    PAD_ID,
    SEP_ID,
    VOCABULARY_SIZE,
    build_tokenizer,
    byte_symbols,
    encode_bytes,
    save_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def chat(tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation that waits for its answer."""
    batch: Any = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    return list(batch["input_ids"])


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("repeat", "on the mat", "on the mat"),
        ("upper", "on the mat", "ON THE MAT"),
        ("mask_digits", "room 407 b", "room ### b"),
        ("initials", "on the mat", "otm"),
        ("last_word", "on the mat", "mat"),
        ("spell_digits", "407", "four zero seven"),
        ("thrice", "on it", "1) on it 2) on it 3) on it"),
        ("bullets", "on the mat", "- on\n- the\n- mat"),
        ("count", "8 to 11", "8 9 10 11"),
        ("count", "5 to 5", "5"),
        ("has_digit", "room 407", "yes"),
        ("has_digit", "on the mat", "no"),
        ("ticket", "on the mat", '{"status": "ok", "initial": "o"}'),
        ("record", "city\nThe weather in Rome?", '{"city": "Rome"}'),
        (
            "call",
            "get_weather city\nthe weather in rome",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "rome"}}\n</tool_call>',
        ),
    ],
)
def test_answers(name: str, text: str, answer: str) -> None:
    assert task_named(name).answer(text) == answer


def test_at_least_eight_tasks_cover_every_length_class() -> None:
    assert len(TASKS) >= 8
    assert {task.length_class for task in TASKS} == {"shorter", "equal", "longer", "independent"}
    assert len({task.name for task in TASKS}) == len(TASKS)
    phrasings = [phrasing for task in TASKS for phrasing in task.instructions]
    assert len(set(phrasings)) == len(phrasings) >= 2 * len(TASKS)
    with pytest.raises(KeyError):
        task_named("fly")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_inputs_stay_within_the_promise(task: Task) -> None:
    for example in held_out_examples(task, 50, seed=3):
        assert task.length_class != "longer" or len(example.answer) > len(example.text)
        words = example.text.split("\n")[-1].rstrip("?").split(" ")
        assert all(words)
        assert example.answer == task.answer(example.text)
        if task.name == "count":
            assert len(example.answer.split()) <= task.max_size
        elif task.name == "spell_digits":
            assert len(example.text) <= task.max_size
        else:
            assert len(words) <= task.max_size
            assert max(map(len, words)) <= MAX_WORD_LETTERS
    held_out = {example.text for example in held_out_examples(task, 200, seed=3)}
    assert len(held_out) == 200 and all(map(is_held_out, held_out))
    assert held_out == {example.text for example in held_out_examples(task, 200, seed=3)}
    rng = random.Random(5)
    assert not any(is_held_out(make_example(task, rng, task.max_size, held_out=False).text) for _ in range(200))


TEXTS = ["on the mat", "  two  spaces \n\ttabs ", "Grüße, 你好 🙂", "'s 'll 407", "\x00\x7f"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == encode_bytes(text) == [BYTE_OFFSET + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCABULARY_SIZE == 264
    assert sorted(byte_symbols()) == sorted(ByteLevel.alphabet())
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        PAD_ID,
        BOS_ID,
        EOS_ID,
    )
    assert tokenizer.convert_tokens_to_ids("<sep>") == SEP_ID
    assert tokenizer.decode([BOS_ID, *encode_bytes("on"), SEP_ID, EOS_ID], skip_special_tokens=True) == "on"


def test_chat_and_plain_prompt_agree(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Repeat the text:"}, {"role": "user", "content": "on it"}]
    ids = chat(tokenizer, messages)
    assert ids == tokenizer("Repeat the text:\non it<sep>")["input_ids"]
    assert ids == [BOS_ID, *encode_bytes("Repeat the text:\non it"), SEP_ID]
    assert chat(tokenizer, [{"role": "user", "content": "Repeat the text:\non it"}]) == ids
    later = [{"role": "assistant", "content": "on it"}, {"role": "user", "content": "at it"}]
    assert chat(tokenizer, messages + later) == [BOS_ID, *encode_bytes("Repeat the text:\nat it"), SEP_ID], "the last"
    with pytest.raises(TemplateError, match="user message"):
        chat(tokenizer, messages[:1])


WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["city"],
    },
}


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], *functions: dict[str, Any]) -> str:
    """What stands between BOS and SEP."""
    tools: list[Any] = [{"type": "function", "function": function} for function in functions]
    text: Any = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    return str(text).removeprefix("<s>").removesuffix("<sep>")


def test_a_chat_with_tools_is_the_task_of_calls(tokenizer: PreTrainedTokenizerFast) -> None:
    ask: dict[str, Any] = {"role": "user", "content": "The weather in Rome?"}
    task = task_named("call")
    assert rendered(tokenizer, [ask], WEATHER) == f"{task.instructions[0]}\nget_weather city\nThe weather in Rome?"
    optional = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
    assert rendered(tokenizer, [ask], optional, WEATHER).split("\n")[1] == "f a"
    for bare in ({"name": "now"}, {"name": "now", "parameters": {"type": "object", "properties": {}}}):
        assert rendered(tokenizer, [ask], bare) == ask["content"], "a function without parameters is no task"


def test_the_result_of_a_tool_is_repeated(tokenizer: PreTrainedTokenizerFast) -> None:
    call: dict[str, Any] = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Rome"}},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "The weather in Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny in rome"},
    ]
    assert rendered(tokenizer, messages, WEATHER) == "Repeat the text:\nsunny in rome"


def test_saved_tokenizer_is_the_same(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "Repeat:"}, {"role": "user", "content": "é , it 's"}]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert chat(loaded, messages) == chat(tokenizer, messages)
    assert loaded.decode(encode_bytes("é , it 's")) == "é , it 's"
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (PAD_ID, BOS_ID, EOS_ID)
