"""The public Python API: the examples of its page run, and what they return is what a server would answer."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import farsight
from farsight import LLM, AsyncLLM, FarsightError, RequestOutput, SamplingParams, Server
from farsight.keywords import ModelSettings, ServerSettings
from farsight.server import _flag
from farsight.services.settings import SETTINGS, VLLM_NAMES, overrides_of
from tools.rooms import HOME

PAGE = (HOME / "docs" / "how_to" / "python.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
GREEDY = SamplingParams(temperature=0, max_tokens=30)
UPPER = [{"role": "system", "content": "Write in upper case:"}, {"role": "user", "content": "hello world"}]


def test_the_package_itself_loads_nothing() -> None:
    code = "import sys, farsight; print({name for name in sys.modules if name.startswith('farsight.')})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
    assert set(farsight.__all__) <= set(dir(farsight))
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = farsight.LLMs


@pytest.fixture(scope="module")
def namespace() -> Iterator[dict[str, Any]]:
    """What the examples of the page have defined; their model serves the other tests as well."""
    found: dict[str, Any] = {}
    exec(EXAMPLES[0], found)
    yield found
    found["llm"].close()


@pytest.fixture
def llm(namespace: dict[str, Any]) -> LLM:
    found: LLM = namespace["llm"]
    return found


def test_every_example_runs(namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES) == 11
    for example in EXAMPLES[1:]:
        if "Server(" not in example:
            exec(example, namespace)
    printed = capsys.readouterr().out
    assert namespace["answer"].text == "HELLO WORLD"
    assert "weather" in printed and '"city"' in printed
    assert "temperature: got 9, expected a number from 0 to 2" in printed
    assert namespace["chosen"].text in ("yes", "no")
    assert "HELLO WORLD True" in printed, "what AsyncLLM gave at the end"
    assert "First token" in printed, "the explanation"
    assert len(namespace["vectors"]) == 2 and len(namespace["vectors"][0]) > 8


@pytest.mark.nightly
def test_the_example_with_a_server_runs(namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(EXAMPLES[1], namespace)
    [example] = [each for each in EXAMPLES if "Server(" in each]
    exec(example, namespace)
    assert "finish_reason=" in capsys.readouterr().out
    assert namespace["server"]._process is None


def test_outputs_do_not_depend_on_what_runs_beside_them(llm: LLM) -> None:
    together = llm.chat([UPPER] * 3, [GREEDY, SamplingParams(seed=7, n=2, max_tokens=5), GREEDY])
    alone = llm.chat(UPPER, GREEDY)
    assert [each.text for each in together[::2]] == [alone[0].text] * 2
    assert [each.index for each in together[1].outputs] == [0, 1] and together[1].num_tokens > 2
    assert "".join(llm.stream(UPPER, GREEDY)) == alone[0].text
    ids = alone[0].prompt_token_ids
    assert llm.generate(list(ids), GREEDY)[0].outputs[0].token_ids == alone[0].outputs[0].token_ids


def test_log_probabilities_come_with_the_tokens(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    [chat] = llm.chat(UPPER, params)
    [text] = llm.generate("hello", params)
    assert len(chat.outputs[0].logprobs) == len(chat.outputs[0].token_ids)
    assert len(chat.outputs[0].logprobs[0]["top_logprobs"]) == 2
    assert len(text.outputs[0].logprobs["tokens"]) == len(text.outputs[0].token_ids)
    assert len(text.prompt_logprobs) == len(text.prompt_token_ids)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([[]], GREEDY), r"prompt: got \[\]"),
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "sampling_params: got '1 of them', expected one, or 2"),
        (
            lambda llm: llm.chat([{"role": "narrator", "content": "x"}]),
            "messages: the model's chat template refused them",
        ),
        (lambda llm: llm.generate("x", SamplingParams(extra={"tempo": 1})), "tempo: unknown field"),
        (
            lambda llm: llm.generate("x", SamplingParams(extra={"use_beam_search": True, "best_of": 2})),
            "use_beam_search",
        ),
        (lambda llm: llm.stream("x", tools=[]).__next__(), "tools: got .*, expected nothing beside a prompt"),
        (lambda llm: llm.explain("chatcmpl-1"), "id: got 'chatcmpl-1'"),
    ],
)
def test_what_the_model_cannot_answer_is_told(call: Any, message: str, llm: LLM) -> None:
    with pytest.raises(FarsightError, match=message):
        call(llm)


def test_a_reader_that_leaves_ends_its_answer(llm: LLM) -> None:
    endless = SamplingParams(ignore_eos=True, max_tokens=llm.max_model_len - 40, temperature=0)
    stream = llm.stream("x", endless)
    assert next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm._thread.call(llm._thread.service.until_idle())
    assert llm.generate("x", GREEDY)


def test_a_closed_model_says_so() -> None:
    model = AsyncLLM()
    with pytest.raises(FarsightError, match="not loaded"):
        asyncio.run(_first(model))


async def _first(model: AsyncLLM) -> RequestOutput:
    return await anext(model.generate("x"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memry": "1GiB"}, "kv_memry: got '1GiB', expected one of model, "),
        ({"kv_memory": "much"}, "kv_memory: got 'much'"),
        ({"quantization": "awq"}, "quantization: got 'awq', expected none: a quantised checkpoint says so itself"),
        ({"model": "no/such/model/here"}, "got 'no/such/model/here'"),
        ({"tensor_parallel_size": 2}, "model.tensor_parallel: got 2, expected 1"),
    ],
)
def test_a_wrong_keyword_is_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FarsightError, match=message):
        LLM(**settings)


def test_keywords_are_flags() -> None:
    taken = {*SETTINGS, *VLLM_NAMES, "swap_space", "served_model_name"}
    assert set(ModelSettings.__annotations__) <= taken
    assert set(ServerSettings.__annotations__) - {"api_key"} <= taken
    assert overrides_of({"swap_space": 1.5, "max_num_batched_tokens": 7, "tool_call_parser": "llama3_json"}) == {
        "engine": {"host_kv_memory": "1.500GiB", "max_batch_tokens": 7},
        "model": {"tool_format": "llama3"},
    }


def test_a_server_is_told_by_flags() -> None:
    server = Server("m", preset="farsight", prefix_cache=False, served_model_name=["a", "b"], insecure=True)
    words = " ".join(server._words)
    assert words.endswith(
        f"serve --port {server.port} --model m --preset farsight --no-prefix-cache "
        "--served-model-name a --served-model-name b --insecure"
    )
    assert _flag("drain_s", None) == []
    with pytest.raises(FarsightError, match=r"presets: got .x., expected one of"):
        Server(presets="x")  # type: ignore[call-arg]
    with pytest.raises(FarsightError, match="preset: got 'farsigth', expected one of"):
        Server(preset="farsigth")
    with pytest.raises(FarsightError, match="kv_memory: got 'lots', expected"):
        Server(kv_memory="lots")
