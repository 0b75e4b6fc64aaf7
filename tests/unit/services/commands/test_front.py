"""What ``farsight front`` makes of what servers say about themselves; their answers are as the servers give them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farsight.core.config.load import make_config
from farsight.core.errors import FarsightError, InvalidValueError
from farsight.services.cli import app
from farsight.services.commands.front import front_tables
from farsight.services.launch.launch import EMBEDDED_MODEL, EMBEDDED_NAME

Pages = dict[str, Any]

VLLM: Pages = {
    "/v1/models": {
        "data": [
            {"id": "qwen", "owned_by": "vllm", "root": "/models/absent", "max_model_len": 2048},
            {"id": "lora", "owned_by": "vllm", "root": "/l", "parent": "qwen", "max_model_len": None},
        ],
    }
}
LLAMA_CPP: Pages = {
    "/v1/models": {"object": "list", "data": [{"id": "qwen", "owned_by": "llamacpp", "meta": {"n_ctx_train": 32768}}]},
    "/props": {"default_generation_settings": {"n_ctx": 8192}, "total_slots": 4, "model_path": "qwen.gguf"},
}
OLLAMA: Pages = {
    "/v1/models": {"object": "list", "data": [{"id": "qwen", "object": "model", "owned_by": "library"}]},
    "/api/ps": {"models": [{"name": "qwen", "model": "qwen", "context_length": 16384}]},
}
OTHER: Pages = {"/v1/models": {"data": [{"id": "qwen", "object": "model", "owned_by": "organization_owner"}]}}
FARSIGHT: Pages = {"/v1/models": {"data": [{"id": EMBEDDED_NAME, "owned_by": "farsight", "max_model_len": 1024}]}}

SERVERS = {"http://v": VLLM, "http://l": LLAMA_CPP, "http://o": OLLAMA, "http://x": OTHER, "http://f": FARSIGHT}


def ask(server: str, path: str, body: dict[str, Any] | None = None) -> Any:
    pages = SERVERS.get(server)
    if pages is None or path not in pages:
        raise FarsightError(f"no {path} at {server}")
    return pages[path]


def fronted(*urls: str, model: str | None = None, tokenizer: str | None = None, **given: Any) -> tuple[Any, list[str]]:
    """The configuration, checked as one from a file, and what was said."""
    said: list[str] = []
    tables = front_tables(list(urls), model, tokenizer, given, ask, said.append)
    return make_config(tables), said


def test_servers_of_several_kinds_become_replicas_of_one_model() -> None:
    config, said = fronted("http://v/v1", "http://l", "http://o/")
    assert (config.model.name, config.model.replicas) == ("qwen", 0)
    vllm, llama, ollama = config.replica
    assert (vllm.url, vllm.max_model_len, vllm.max_num_seqs) == ("http://v", 0, 128), "vLLM reports its length itself"
    assert (llama.max_model_len, llama.max_num_seqs) == (8192, 4)
    assert (ollama.max_model_len, ollama.max_num_seqs) == (16384, 1)
    assert said[1] == "http://l is llama.cpp and serves qwen: prompts as text, max_model_len 8192, max_num_seqs 4."
    assert said[-1].startswith("No tokenizer of qwen is on this machine")


def test_prompts_go_as_tokens_where_the_tokenizer_is_here_and_the_server_takes_them(tmp_path: Path) -> None:
    config, said = fronted("http://l", "http://o", tokenizer=str(tmp_path))
    assert [each.prompt for each in config.replica] == ["tokens", "text"]
    assert config.model.path == str(tmp_path)
    assert len(said) == 2


def test_a_model_that_lies_on_this_machine_brings_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VLLM["/v1/models"]["data"][0], "root", str(tmp_path))
    config, _ = fronted("http://v", model="qwen")
    assert (config.model.path, config.replica[0].prompt) == (str(tmp_path), "tokens")
    monkeypatch.setitem(VLLM["/v1/models"]["data"][0], "root", "../../etc")
    assert fronted("http://v", model="qwen")[0].model.path == ""
    served = {"id": "mine", "owned_by": "farsight", "max_model_len": 1024, "root": str(tmp_path)}
    monkeypatch.setitem(SERVERS, "http://mine", {"/v1/models": {"data": [served]}})
    config, _ = fronted("http://mine", probe_timeout_s=60.0)
    assert (config.model.path, config.replica[0].prompt) == (str(tmp_path), "tokens")
    assert config.replica[0].probe_timeout_s == 60
    config, _ = fronted("http://f")
    assert (config.model.path, config.replica[0].prompt) == (str(EMBEDDED_MODEL), "tokens")


def test_a_server_that_does_not_say_its_length_is_given_one_and_the_user_is_told() -> None:
    config, said = fronted("http://x")
    assert config.replica[0].max_model_len == 4096
    assert "--max-model-len" in said[0]
    config, said = fronted("http://x", max_model_len=32768, max_num_seqs=2)
    assert (config.replica[0].max_model_len, config.replica[0].max_num_seqs) == (32768, 2)
    assert "--max-model-len" not in said[0]


def test_several_models_must_be_chosen_from_and_a_missing_one_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"--model: got None, expected one model .*http://v serves qwen, lora"):
        fronted("http://v")
    with pytest.raises(InvalidValueError, match="--model: got 'phi'"):
        fronted("http://l", model="phi")
    with pytest.raises(InvalidValueError, match=f"http://f serves {EMBEDDED_NAME}"):
        fronted("http://l", "http://f")
    with pytest.raises(FarsightError, match="no /v1/models at http://gone"):
        fronted("http://gone")


@pytest.mark.parametrize("listed", [[], {"data": 3}, {"data": None}, "x", {"data": [{"id": 7}, 3]}])
def test_what_is_no_list_of_models_is_refused(listed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OTHER, "/v1/models", listed)
    with pytest.raises(FarsightError, match=r"no list of models|--model"):
        fronted("http://x")


@pytest.mark.parametrize("props", [None, [], {"default_generation_settings": 3, "total_slots": -1, "model_path": 7}])
def test_a_llama_cpp_that_says_nonsense_gets_defaults(props: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LLAMA_CPP, "/props", props)
    config, _ = fronted("http://l")
    assert (config.replica[0].max_model_len, config.replica[0].max_num_seqs) == (4096, 128)


def test_a_server_that_is_busy_may_be_given_longer() -> None:
    """One that computes in the process that answers, as llama-cpp-python's, has accepted and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        url = f"http://127.0.0.1:{busy.getsockname()[1]}"
        found = CliRunner().invoke(app, ["front", url, "--probe-timeout", "1"])
    assert f"no server answers at {url} within 1 s; it may be busy; --probe-timeout waits longer" in found.output
