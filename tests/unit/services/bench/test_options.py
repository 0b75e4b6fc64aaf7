"""Options that make no sense together are refused by name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import FarsightError
from services.bench.cases import make_cases
from services.bench.options import BenchOptions, check_options
from services.bench.targets import BodyForm, make_call

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
        ({"prompt_form": "ids"}, "--vocab-size"),
        ({"prompt_form": "ids", "vocab_size": 99, "endpoint": "chat"}, "--prompt-form"),
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
    path.write_text("timestamp,input_length,output_length\n5,300,40\n7,10,600\n")
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
