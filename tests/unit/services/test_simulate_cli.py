"""``farsight simulate``, ``compare`` and ``advise`` as a user at a terminal meets them."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farsight.core.config.scheduling import DEFAULT_PRESET
from farsight.services.cli import app
from tests.command_line import CliRunner, Result

CONFIG_KEYS = """
batch block_size clients farsight_version host_kv_tokens kv_tokens latency max_batch_tokens max_num_seqs num_replicas
num_requests offload_hop_s placement predictor preset rate scaling scheduler seed sla watermark workload
"""


def invoke(command: str, *words: str) -> Result:
    return CliRunner().invoke(app, [command, "--requests", "40", *words], env={"COLUMNS": "200", "TERM": "dumb"})


def invoke_json(*words: str) -> dict[str, Any]:
    result = invoke("simulate", "--json", *words)
    assert result.exit_code == 0, result.output
    line = result.stdout.removesuffix("\n")
    assert "\n" not in line
    read: dict[str, Any] = json.loads(line)
    return read


def test_a_first_run_needs_no_options() -> None:
    result = CliRunner().invoke(app, ["simulate"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{DEFAULT_PRESET}: ") and "seed 0" in result.stdout
    assert re.search(r"requests +│ +1,000", result.stdout) and "JCT s" in result.stdout
    assert result.stderr == ""


def test_json_keys_are_a_contract() -> None:
    record = invoke_json()
    assert sorted(record) == ["config", "summary"]
    assert sorted(record["config"]) == CONFIG_KEYS.split()
    assert {"jct_s_p99", "ttft_s_mean", "goodput_share", "num_steps", "output_tokens_per_s"} <= record["summary"].keys()
    assert record["summary"]["num_requests"] == 40


def test_same_seed_same_bytes_in_one_process_and_in_another(tmp_path: Path) -> None:
    words = ["simulate", "--requests", "40", "--seed", "3", "--json"]
    first = CliRunner().invoke(app, words).stdout
    invoke("simulate", "--seed", "4", "--replicas", "3", "--clients", "7", "--kv-tokens", "3000")
    assert CliRunner().invoke(app, words).stdout == first
    again = [sys.executable, "-m", "farsight.services.cli", *words, "--out", str(tmp_path), "--plot", str(tmp_path)]
    assert subprocess.run(again, capture_output=True, text=True, check=True).stdout == first
    assert CliRunner().invoke(app, [*words, "--seed", "4"]).stdout != first


def test_options_arrive() -> None:
    config = invoke_json(
        *("--replicas", "2", "--seed", "9", "--clients", "5", "--max-num-seqs", "8", "--kv-tokens", "5000"),
        *("--sla-ttft", "2", "--sla-mtpot", "0.2", "--gpu", "h100", "--model", "llama-3-70b", "--tensor-parallel", "4"),
    )["config"]
    assert (config["num_replicas"], config["seed"], config["clients"], config["rate"]) == (2, 9, 5, None)
    assert (config["max_num_seqs"], config["kv_tokens"]) == (8, 5000)
    assert config["sla"] == {"ttft_s": 2, "mtpot_s": 0.2}
    assert config["latency"]["gpu"]["name"] == "h100" and config["latency"]["model"]["name"] == "llama-3-70b"
    assert config["latency"]["tensor_parallel"] == 4


def test_a_gpu_brings_its_pool_and_the_model_defaults() -> None:
    config = invoke_json("--gpu", "h100")["config"]
    assert config["latency"]["model"]["name"] == "llama-2-7b" and config["kv_tokens"] == 111770
    assert invoke_json("--model", "opt-13b")["config"]["latency"]["gpu"]["name"] == "a100-80g"


FREE = {"base_s": 0.5} | dict.fromkeys(("prefill_token_s", "decode_seq_s", "context_token_s", "prefill_pair_s"), 0.0)


def test_a_profile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**FREE, "kv_bytes": 1024}))
    record = invoke_json("--profile", str(path))
    no_pictures = dict.fromkeys(("batch_s", "token_s", "pair_s"), 0.0)
    expected = {"cost": FREE, "kv_bytes": 1024, "copy_bandwidth": 25e9, "image_cost": no_pictures}
    assert record["config"]["latency"] == expected
    assert record["summary"]["itl_s_mean"] == pytest.approx(0.5)


PICTURES = ["jct.png", "load.png", "memory.png", "queues.png"]


def test_files_and_pictures(tmp_path: Path) -> None:
    out, plot = tmp_path / "deep" / "out", tmp_path / "plots"
    result = invoke("simulate", "--out", str(out), "--plot", str(plot), "--replicas", "2")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "requests.jsonl", "summary.json"]
    assert sorted(path.name for path in plot.iterdir()) == PICTURES
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plot.iterdir())
    assert len((out / "requests.jsonl").read_text().splitlines()) == 40
    assert result.stderr.count("written: ") == 7


def test_batches_in_lockstep_have_all_pictures_and_nothing_between_tokens(tmp_path: Path) -> None:
    config = tmp_path / "farsight.toml"
    config.write_text('[scheduler]\npreset = "multi-bin"\nexecution = "static"\n')
    plots = tmp_path / "plots"
    record = invoke_json("--config", str(config), "--predictor", "oracle", "--plot", str(plots))
    assert sorted(path.name for path in plots.iterdir()) == PICTURES
    assert 0 < record["summary"]["memory_peak_share"] <= 1 and record["summary"]["itl_s_mean"] is None
    assert record["summary"]["total_tokens_per_s"] > record["summary"]["output_tokens_per_s"]


def test_a_closed_loop_of_batch_mode() -> None:
    record = invoke_json("--preset", "magnus-vs", "--clients", "3")
    assert record["summary"]["num_requests"] == 40 and record["config"]["clients"] == 3


def test_pictures_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = invoke("simulate", "--plot", str(tmp_path / "plots"))
    assert result.exit_code == 1 and result.stdout == "" and not (tmp_path / "plots").exists()
    assert result.stderr.startswith("farsight: --plot needs matplotlib, which is not installed: pip install")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "fcsf"], "--preset: got 'fcsf', expected one of fcfs"),
        (["--replicas", "0"], "--replicas: got 0, expected an integer >= 1"),
        (["--rate", "-1"], "--rate: got -1.0, expected requests per second above 0"),
        (["--rate", "2", "--clients", "3"], "--rate: got 2.0, expected none beside clients"),
        (["--predictor", "orcale"], "--predictor: got 'orcale', expected one of none, history, shuffled"),
        (["--trace", "unifrom"], "--trace: got 'unifrom', expected "),
        (["--requests", "0"], "--requests: got 0, expected an integer >= 1"),
        (["--kv-tokens", "3"], "--kv-tokens: got 3, expected an integer >= 16"),
        (["--max-num-seqs", "0"], "--max-num-seqs: got 0"),
        (["--sla-ttft", "0"], "--sla-ttft: got 0.0, expected seconds above 0"),
        (["--sla-mtpot", "-1"], "--sla-mtpot: got -1.0, expected seconds above 0"),
        (["--seed", "-1"], "--seed: got -1, expected an integer >= 0"),
        (["--gpu", "h20"], "--gpu: got 'h20', expected one of v100-32g, "),
        (["--model", "gpt"], "--model: got 'gpt', expected one of opt-2.7b, "),
        (["--model", "opt-66b"], "--model: got 'opt-66b', expected weights below the 72 GB that 1 x a100-80g have"),
        (["--tensor-parallel", "0"], "--tensor-parallel: got 0, expected an integer >= 1"),
        (["--profile", "/nope.json"], "--profile: got '/nope.json', expected a JSON file "),
        (["--profile", "x.json", "--gpu", "h100"], "--profile: got 'x.json', expected none beside --gpu"),
        (["--out", "/dev/null"], "--out: got '/dev/null', expected a directory, new or not (File exists)"),
        (["--plot", "/dev/null/x"], "--plot: got '/dev/null/x', expected a directory, new or not (Not a directory)"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str) -> None:
    result = invoke("simulate", *words)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith(f"farsight: {message}") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--profile", "{", "bad.csv: got '{', expected a JSON object ("),
        ("--profile", json.dumps(FREE | {"copy_bandwidth": 0}), "copy_bandwidth: got 0, expected a number above 0"),
        ("--trace", "", "bad.csv:0: the file is empty"),
        ("--trace", "arrival_s,input_tokens,output_tokens\n0,5,-3\n", "bad.csv:2: output_tokens is negative: -3"),
    ],
)
def test_a_bad_file_ends_with_file_and_reason(tmp_path: Path, flag: str, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    result = CliRunner().invoke(app, ["simulate", flag, str(path)])
    assert result.exit_code == 1 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_a_trace_that_is_not_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSIGHT_DATA", str(tmp_path))
    result = invoke("simulate", "--trace", "azure-conv")
    assert result.exit_code == 1 and "azure2023_conv.csv.gz does not exist; get it from https://" in result.stderr


def test_requests_that_never_fit_are_told(tmp_path: Path) -> None:
    """If none has ended there is nothing to draw."""
    result = invoke("simulate", "--kv-tokens", "16", "--plot", str(tmp_path))
    assert result.exit_code == 0 and not list(tmp_path.iterdir())
    assert result.stderr == "refused: 40 requests may grow beyond the 16 KV tokens of a replica\n"


def test_compare_prints_a_row_for_each_preset() -> None:
    words = ["--presets", "fcfs, magnus", "--seeds", "2", "--seed", "5", "--json"]
    result = invoke("compare", *words)
    assert result.exit_code == 0, result.output
    base, other = [json.loads(line) for line in result.stdout.splitlines()]
    for row, preset in ((base, "fcfs"), (other, "magnus")):
        assert sorted(row) == ["base", "metrics", "preset", "seeds"]
        assert (row["preset"], row["base"], row["seeds"]) == (preset, "fcfs", [5, 6])
    ratio = base["metrics"]["jct_s_mean"]
    assert (ratio["ratio"], ratio["ratio_low"], ratio["ratio_high"]) == (1, 1, 1) and len(ratio["values"]) == 2
    assert other["metrics"]["ttft_s_mean"]["ratio"] > 1
    assert invoke("compare", *words).stdout == result.stdout


@pytest.mark.parametrize(("rate", "said"), [("0.2", True), ("inf", False)])
def test_compare_says_where_nothing_waited(rate: str, said: bool) -> None:
    words = ("--presets", "fcfs,farsight", "--seeds", "1", "--requests", "40", "--rate", rate)
    result = invoke("compare", *words)
    assert result.exit_code == 0
    assert ("nothing waited at this load" in result.stderr) == said
    assert "nothing waited" not in result.stdout


def test_compare_prints_a_table() -> None:
    result = invoke("compare", "--presets", "fcfs,past-future", "--seeds", "2")
    assert "past-future / fcfs" in result.stdout
    assert result.exit_code == 0 and "seeds 0 to 1" in result.stdout and "JCT s, p99" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--presets", "fcfs,fcfs"], "--presets: got 'fcfs,fcfs', expected names as fcfs,fastserve, each once"),
        (["--presets", ""], "--presets: got '', expected names"),
        (["--presets", "fcfs,x"], "--presets: got 'x', expected one of fcfs"),
        (["--presets", "fcfs", "--seeds", "0"], "--seeds: got 0, expected an integer >= 1"),
    ],
)
def test_compare_errors(words: list[str], message: str) -> None:
    result = invoke("compare", *words)
    assert result.exit_code == 1 and result.stderr.startswith(f"farsight: {message}")


def test_a_saved_run_again(tmp_path: Path) -> None:
    first = invoke("simulate", "--preset", "past-future", "--rate", "inf", "--out", str(tmp_path / "a"))
    assert first.exit_code == 0, first.output
    saved = (tmp_path / "a" / "config.json").rename(tmp_path / "under another name")
    words = ["simulate", "--config", str(saved)]
    again = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "b")])
    assert again.exit_code == 0, again.output
    assert saved.read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    for name in ("summary.json", "requests.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    other = CliRunner().invoke(app, [*words, "--rate", "3"])
    assert other.exit_code == 1 and "--rate: got 3.0, expected nothing beside --config" in other.stderr


def advise(*words: str) -> Result:
    return CliRunner().invoke(app, ["advise", *words], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty requests, two a second."""
    path = tmp_path / "trace.jsonl"
    lines = [{"arrived_at": index / 2, "prompt_len": 50, "output_len": 20 + index % 7} for index in range(60)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_table_advice_and_picture(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "advice.png"
    result = advise(
        str(trace),
        "--presets",
        "fcfs,farsight",
        "--max-replicas",
        "2",
        "--requests",
        "20",
        "--seconds",
        "600",
        "--plot",
        str(picture),
    )
    assert result.exit_code == 0, result.output
    assert "2 replicas: good %" in result.stdout
    assert f"Advised: farsight serve --preset {DEFAULT_PRESET} --replicas 1" in result.stdout
    assert "Uncertain: 3 windows of 20 requests" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_advice_as_json_is_a_contract(trace: Path) -> None:
    result = advise(str(trace), "--presets", "fcfs", "--max-replicas", "1", "--requests", "30", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert sorted(record) == sorted(
        ["good", "holds", "not_told_apart", "options", "reason", "recommended", "source", "uncertain", "windows"]
    )
    assert record["recommended"] == {"preset": "fcfs", "replicas": 1}
    assert record["windows"] == 2
    (option,) = record["options"]
    assert math.isclose(option["goodput_share"]["mean"], 1.0)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("no-such-trace",), "--trace"),
        (("zipf", "--presets", "fcfs,fcfs"), "--presets: got 'fcfs,fcfs', expected names as fcfs,fastserve, each once"),
        (("zipf", "--presets", "nothing"), "--presets: got 'nothing'"),
        (("zipf", "--good", "0"), "--good: got 0.0, expected a share above 0, at most 1"),
        (("zipf", "--plot", "advice.pdf"), "--plot: got 'advice.pdf', expected a file that ends in .png or .svg"),
    ],
)
def test_wrong_arguments_are_named(words: tuple[str, ...], error: str) -> None:
    result = advise(*words)
    assert result.exit_code == 1
    assert error in result.output
