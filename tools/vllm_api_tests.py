"""Runs vLLM's own API tests against any server of OpenAI's API: Farsight, or vLLM itself for comparison.

    git clone --filter=blob:none https://github.com/vllm-project/vllm && git -C vllm checkout 5df63a720
    farsight serve MODEL_DIR $(python -m tools.vllm_api_tests names)
    python -m tools.vllm_api_tests run vllm --python VENV/bin/python --model MODEL_DIR --url http://127.0.0.1:8000

VENV holds vLLM, whose classes the tests import; nothing of it runs. The tests start servers of several models: each
here finds the server that runs already, which has the names of all of them. docs/vllm_api_tests.md has the counts.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

COMMIT = "5df63a720"
"""The commit of vLLM 0.32.0."""

FILES = (
    "completion/test_completion.py",
    "completion/test_prompt_validation.py",
    "chat_completion/test_chat.py",
    "chat_completion/test_chat_completion.py",
    "chat_completion/test_chat_echo.py",
    "chat_completion/test_chat_logit_bias_validation.py",
    "chat_completion/test_logprob_token_ids.py",
    "models/test_models.py",
    "test_chunked_prompt.py",
    "test_return_token_ids.py",
    "test_return_tokens_as_ids.py",
    "../serve/tokenize/test_tokenization.py",
)
"""Below ``tests/entrypoints/openai``: those that ask a server for text."""

NAMES = (
    "facebook/opt-125m",
    "openai-community/gpt2",
    "HuggingFaceH4/zephyr-7b-beta",
    "zephyr-lora",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
)
"""What the tests call the served model."""

_URL, _MODEL = "VLLM_API_TESTS_URL", "VLLM_API_TESTS_MODEL"


class RunningServer:
    """Stands where a test starts a server: the one that runs already."""

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        self.url_root = os.environ[_URL]

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leaves the server as it is."""

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **settings: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), api_key="none", max_retries=0, timeout=600, **settings)

    def get_async_client(self, **settings: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="none", max_retries=0, timeout=600, **settings)


def pytest_configure(config: Any) -> None:
    """Puts the running server in the place of vLLM's helpers, before a test imports them. This file is the plugin."""
    utils = types.ModuleType("tests.utils")
    utils.RemoteOpenAIServer = RunningServer  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = utils
    tokenizers = importlib.import_module("vllm.tokenizers")
    load = tokenizers.get_tokenizer
    tokenizers.get_tokenizer = lambda *_, **settings: load(  # type: ignore[attr-defined]
        os.environ[_MODEL], **{name: value for name, value in settings.items() if name != "tokenizer_name"}
    )
    repositories = importlib.import_module("vllm.transformers_utils.repo_utils")
    # The adapter of some tests: its name is one of the served model, whose weights it would change.
    hub = types.SimpleNamespace(snapshot_download=lambda **_: os.environ[_MODEL])
    repositories.hf_api = lambda: hub  # type: ignore[attr-defined]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out the tests of vLLM's own classes, which ask no server and pass whatever runs."""

    def asks(item: Any) -> bool:
        fixtures = {"server", "client"} & set(item.fixturenames)
        return bool(fixtures) or "RemoteOpenAIServer(" in inspect.getsource(item.function)

    config.hook.pytest_deselected(items=[item for item in items if not asks(item)])
    items[:] = [item for item in items if asks(item)]


def run(checkout: Path, python: Path, url: str, model: Path, files: list[str]) -> dict[str, str]:
    """Returns what became of each test: ``passed``, ``skipped``, or why it failed in one line."""
    folder = "tests/entrypoints/openai"
    paths = [os.path.normpath(f"{folder}/{name}") for name in files or FILES]
    environment = os.environ | {_URL: url, _MODEL: str(model), "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), "."])
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        plugins = ["-p", Path(__file__).stem, "-p", "tests.entrypoints.conftest"]
        command = [str(python), "-m", "pytest", "-q", "--noconftest", *plugins, f"--junitxml={report}", *paths]
        subprocess.run([*command, "--asyncio-mode=auto", "-o", "addopts="], cwd=checkout, env=environment, check=False)
        return dict(map(_outcome, ElementTree.parse(report).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    module = case.get("classname", "").removeprefix("tests.entrypoints.")
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return f"{module}::{case.get('name')}", " ".join(found.get("message", kind).split())[:200]
    return f"{module}::{case.get('name')}", "passed" if case.find("skipped") is None else "skipped"


def main() -> None:
    """Prints the names to serve, or runs the tests and prints what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    naming = commands.add_parser("names", help="print the flags of the names under which the model has to be served")
    naming.add_argument("--bare", action="store_true", help="names without flags, for one flag of vLLM's own")
    running = commands.add_parser("run", help="run the tests")
    running.add_argument("checkout", type=Path, help=f"vLLM's sources at {COMMIT}")
    running.add_argument("--python", type=Path, required=True, help="interpreter with vLLM, openai, pytest-asyncio")
    running.add_argument(
        "--model", type=Path, required=True, help="directory of the served model: its tokenizer is read"
    )
    running.add_argument("--url", default="http://127.0.0.1:8000")
    running.add_argument("--json", type=Path, help="write what became of each test to this file")
    running.add_argument("--than", type=Path, help="such a file of another server: count what passed there")
    running.add_argument("--files", nargs="*", default=[], help="instead of FILES")
    arguments = parser.parse_args()
    if arguments.command == "names":
        names = NAMES if arguments.bare else [f"--served-model-name={name}" for name in NAMES]
        sys.stdout.write(" ".join(names) + "\n")
        return
    python = arguments.python.absolute()  # not resolved: a link leads out of its environment
    found = run(arguments.checkout, python, arguments.url, arguments.model.resolve(), arguments.files)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1, sort_keys=True), "utf-8")
    if arguments.than is not None:
        passed = {name for name, what in json.loads(arguments.than.read_text("utf-8")).items() if what == "passed"}
        found = {name: what for name, what in found.items() if name in passed}
    failed = {name: what for name, what in found.items() if what not in ("passed", "skipped")}
    for name, what in failed.items():
        sys.stdout.write(f"{name}: {what}\n")
    num_passed = sum(what == "passed" for what in found.values())
    sys.stdout.write(f"{num_passed} of {len(found)} passed, {len(failed)} failed\n")


if __name__ == "__main__":
    main()
