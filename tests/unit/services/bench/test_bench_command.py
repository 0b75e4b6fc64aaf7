"""``farsight bench`` from its options to its table and files; those that make no sense together are refused by name."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farsight.core.errors import FarsightError
from farsight.services.bench.cases import make_cases
from farsight.services.bench.options import BenchOptions, check_options
from farsight.services.bench.targets import BodyForm, make_call
from farsight.services.cli import app
from tests.command_line import CliRunner, Result
from tests.unit.services.bench.fake_server import FakeServer, fake_server


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with fake_server() as first, fake_server() as second:
        yield first, second


@pytest.fixture
def server(servers: tuple[FakeServer, FakeServer]) -> FakeServer:
    servers[0].begin()
    return servers[0]


def invoke(*words: str) -> Result:
    return CliRunner().invoke(
        app, ["bench", "--num-requests", "6", "--warm-up", "2", "--max-output-tokens", "8", *words]
    )


def test_side_by_side(servers: tuple[FakeServer, FakeServer], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for server in servers:
        server.begin()
    path, pid = tmp_path / "out.json", str(os.getpid())
    words = [word for server in servers for word in ("--url", server.base_url, "--server-pid", pid)]
    words += ["--label", "old", "--label", "new", "--repeats", "3", "--concurrency", "1,4", "--sla", "ttft=240s"]
    words += ["--plots", str(tmp_path / "plots")]
    result = invoke(*words, "--json", str(path), "--api-key", "secret")
    assert result.exit_code == 0, result.output
    pictures = list((tmp_path / "plots").iterdir())
    assert len(pictures) == 2 and all(each.read_bytes().startswith(b"\x89PNG") for each in pictures)
    assert "new / old" in result.stdout and "skewed, 4 in flight" in result.stdout
    text = path.read_text()
    assert "secret" not in text
    record = json.loads(text)
    assert record["config"]["repeats"] == 3 and record["versions"]["aiohttp"]
    assert [case["load"] for case in record["cases"]] == [1, 4]
    for case in record["cases"]:
        assert [len(target["runs"]) for target in case["targets"]] == [3, 3]
        assert case["ratios"][0]["ratios"]["output_tokens"] == {"min": 1.0, "median": 1.0, "max": 1.0}
        run = case["targets"][1]["runs"][0]
        assert run["metrics"]["sla_percent"] == 100 and len(run["requests"]) == 6
        assert run["tokens_counted_by"] == {"usage": 6}


@pytest.mark.parametrize(("flags", "num_prompts"), [([], 6 + 6 + 2), (["--same-prompts"], 6)])
def test_prompts_differ_between_runs_unless_they_shall_not(
    server: FakeServer, flags: list[str], num_prompts: int
) -> None:
    assert invoke("--url", server.base_url, "--repeats", "2", *flags).exit_code == 0
    assert len({body["prompt"] for body in server.bodies}) == num_prompts


def test_servers_side_by_side_answer_the_same_prompts_and_none_twice(servers: tuple[FakeServer, FakeServer]) -> None:
    first, second = servers
    for server in servers:
        server.begin()
    words = ["--url", first.base_url, "--url", second.base_url, "--url", f"{first.base_url}/v1", "--warm-up", "0"]
    for number, label in enumerate("abc"):
        words += ["--label", label, *(["--repeats", "2"] if number == 0 else [])]
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    prompts, others = ([body["prompt"] for body in server.bodies] for server in servers)
    assert len(set(prompts)) == len(prompts) == 24 and len(set(others)) == len(others) == 12
    assert set(others) < set(prompts)


def test_chats_are_sent_as_they_are_and_end_by_themselves(server: FakeServer, tmp_path: Path) -> None:
    texts, path = tmp_path / "chats.txt", tmp_path / "out.json"
    texts.write_text("\n".join(f"Question {number}?" for number in range(24)))
    words = ["--url", server.base_url, "--chat-texts", str(texts), "--concurrency", "1,3", "--repeats", "2"]
    result = invoke(*words, "--json", str(path), "--seed", "4")
    assert result.exit_code == 0, result.output
    assert "ended by themselves" in result.stdout and "cut at the limit" in result.stdout
    sent = [body for body in server.bodies if body["messages"][0]["content"][0] != "("]
    assert len({body["messages"][0]["content"] for body in sent}) == len(sent) == 24
    assert sorted(body["seed"] for body in sent) == list(range(4, 28))
    assert all((body["temperature"], body["top_p"], "ignore_eos" in body) == (0.8, 0.95, False) for body in sent)
    for case in json.loads(path.read_text())["cases"]:
        for run in case["targets"][0]["runs"]:
            assert (run["metrics"]["answers_ended"], run["metrics"]["answers_cut"]) == (3, 3)
            assert run["metrics"]["output_tokens"] == 3 * 8 + 3 * 2
            assert {each["finish_reason"] for each in run["requests"]} == {"stop", "length"}
    server.begin()
    assert invoke(*words, "--temperature", "0", "--same-prompts", "--warm-up", "0").exit_code == 0
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 6 and len(server.bodies) == 24
    assert not any({"top_p", "seed"} & body.keys() for body in server.bodies)


def test_errors_are_told_and_end_with_one(server: FakeServer) -> None:
    result = invoke("--url", server.base_url, "--extra-body", '{"user": "full"}')
    assert result.exit_code == 1
    assert "6 times: HTTP 503" in result.stdout


@pytest.mark.parametrize(("flags", "least_words"), [([], 20), (["--hide-lengths"], 8)])
def test_without_limits_requests_are_cut_to_the_served_context(
    server: FakeServer, flags: list[str], least_words: int
) -> None:
    server.max_model_len = 160
    words = ["bench", "--url", server.base_url, "--num-requests", "12", "--warm-up", "0", *flags]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "skewed, 32 in flight: 12 of 12 requests are cut to fit the served context of 160 tokens" in result.stdout
    assert max(len(body["prompt"].split()) for body in server.bodies[1:]) >= least_words  # not cut more than need be


def test_limits_that_are_given_are_taken_as_they_are(server: FakeServer) -> None:
    server.max_model_len = 160
    result = invoke("--url", server.base_url)
    assert result.exit_code == 1
    assert "requests that do not fit the context" in result.stdout and "are cut" not in result.stdout


def test_a_wrong_option_is_refused() -> None:
    result = invoke("--url", "http://127.0.0.1:1", "--concurrency", "4;8")
    assert result.exit_code == 1
    assert "--concurrency: got '4;8', expected numbers as 32 or 1,32,128" in result.stderr


URL = "http://127.0.0.1:1"


def options(**fields: Any) -> BenchOptions:
    return BenchOptions(**{"url": (URL,), **fields})


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"url": ()}, "--url"),
        ({"url": ("localhost:8000",)}, "--url"),
        ({"label": ("a", "b")}, "--label"),
        ({"url": (URL, URL), "label": ("a", "a")}, "--label"),
        ({"url": (URL, URL), "server_pid": (1,)}, "--server-pid"),
        ({"model": ("a", "b", "c")}, "--model"),
        ({"workload": ("skwed",)}, "--workload"),
        ({"workload": ("gamma",)}, "--workload"),
        ({"workload": ("hol",), "trace": Path("t")}, "--trace --workload"),
        ({"texts": Path("a"), "trace": Path("t")}, "--trace --texts"),
        ({"concurrency": (0,)}, "--concurrency"),
        ({"concurrency": (4,), "rate": 2.0}, "--rate"),
        ({"rate": 0.0}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"cv": 2.0}, "--cv"),
        ({"rate": 1.0, "cv": -1.0}, "--cv"),
        ({"time_scale": 2.0}, "--time-scale"),
        ({"num_requests": 0}, "--num-requests"),
        ({"repeats": 0}, "--repeats"),
        ({"timeout": 0.0}, "--timeout"),
        ({"endpoint": "embeddings"}, "--endpoint"),
        ({"vocab_size": 3}, "--vocab-size"),
        ({"vocab_size": 99, "endpoint": "chat"}, "--vocab-size"),
        ({"chat_texts": Path("a"), "texts": Path("t")}, "--texts --chat-texts"),
        ({"chat_texts": Path("a")}, "--endpoint"),
        ({"top_p": 0.0}, "--top-p"),
        ({"hide_lengths": True, "ignore_eos": False}, "--hide-lengths"),
        ({"sla": "e2e=3"}, "--sla"),
        ({"extra_body": "[1]"}, "--extra-body"),
        ({"extra_body": "{"}, "--extra-body"),
        ({"json": Path("/nowhere/at/all.json")}, "--json"),
        ({"json": Path("/")}, "--json"),
    ],
)
def test_wrong_options_are_named(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(FarsightError, match=f"^{flag}: got"):
        check_options(options(**fields))


def test_plots_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FarsightError, match=r"pip install 'farsight\[bench\]'"):
        check_options(options(plots=tmp_path / "plots"))


def test_cases_of_closed_and_open_loops(tmp_path: Path) -> None:
    assert [case.name for case in make_cases(options())] == ["skewed, 32 in flight"]
    cases = make_cases(options(workload=("hol", "zipf"), concurrency=(1, 8), num_requests=5))
    assert [(case.load, len(case.requests)) for case in cases] == [(1, 5), (8, 5), (1, 5), (8, 5)]
    (gamma,) = make_cases(options(workload=("gamma",), rate=10.0))
    assert gamma.name == "gamma, 10 req/s, CV 4"
    assert gamma.file_name == "gamma__10_req_s__CV_4"


def test_cases_of_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n5,300,40\n7,10,600\n")
    (case,) = make_cases(options(trace=path, time_scale=0.5, max_prompt_tokens=100, max_output_tokens=50))
    assert case.load == [0.0, 1.0]
    assert [(each.prompt_tokens, each.output_tokens) for each in case.requests] == [(100, 40), (10, 50)]
    assert make_cases(options(trace=path, rate=4.0))[0].load == [0.0, 0.5]
    assert make_cases(options(trace=path, concurrency=(3,)))[0].load == 3


def test_lengths_are_hidden_in_a_field_of_their_own() -> None:
    (case,) = make_cases(options(num_requests=4))
    form = BodyForm(vocab_size=100, hidden_max_tokens=case.longest_output, extra={"top_k": 3})
    for request in case.requests:
        body = json.loads(make_call(request, "m", form, salt=1).body)
        assert body["max_tokens"] == case.longest_output
        assert body["benchmark_len"] == request.output_tokens
        assert (body["ignore_eos"], body["top_k"], len(body["prompt"])) == (True, 3, request.prompt_tokens)


def test_a_plain_body_has_no_extensions() -> None:
    (case,) = make_cases(options(num_requests=1))
    form = BodyForm(endpoint="chat", ignore_eos=False, usage=False)
    body = json.loads(make_call(case.requests[0], "m", form, salt=1, most_tokens=2).body)
    assert body.keys() == {"model", "messages", "max_tokens", "temperature", "stream"}
    assert body["max_tokens"] == 2
