"""Farsight beside a peer: ``python -m benchmarks.peers --model DIR --peer vllm --peer-venv VENV``.

Starts both on the same model with the same number of compute threads, loads them by turns (one idles while the other
works) and ends both. Ratios are Farsight / peer. Versions and flags go into the JSON file. Exits with 1 if a request
failed or Farsight left a process behind.

With ``--peer llama.cpp``, ``--peer-venv`` names the directory of ``llama-server``, and ``--peer-model`` the GGUF
file. Pass that file as ``--model`` too, and the directory that it was made of as ``--vocab-from``: then both compute
with the same weights. With ``--peer farsight`` the peer is this checkout with the flags of ``--peer-option``: another
preset, say.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.servers import RunningServer, ServerCommand, vocab_size
from benchmarks.peers.commands import PEERS, Peer, PeerOptions, own_command, peer, versions
from farsight.services.bench.compare import num_errors, run_bench
from farsight.services.bench.options import CHATS, BenchOptions
from farsight.services.bench.report import write_json
from farsight.services.bench.workloads import WORKLOADS

PROGRAM = ("python", "-m", "benchmarks.peers")


def main() -> int:
    """Measures and prints the tables."""
    args = _parse()
    model, most = args.peer_model or args.model, max(args.concurrency)
    options = PeerOptions(
        args.peer_venv or Path(sys.prefix),
        model,
        args.max_model_len,
        args.threads,
        most,
        tuple(args.peer_option),
        args.dtype,
    )
    other = peer(args.peer, options)
    own = own_command(replace(options, model=args.model, more=tuple(args.farsight_option)))
    logs = args.logs or Path(tempfile.mkdtemp(prefix="farsight-peers-"))
    logs.mkdir(exist_ok=True)
    ends: dict[str, Any] = {}
    print(f"server logs: {logs}", file=sys.stderr)
    with _running(other.command, logs / f"{other.name}.log", ends) as peer_server:
        print(f"{other.name} ready after {peer_server.wait_until_ready(args.ready_timeout):.0f} s", flush=True)
        with _running(own, logs / "farsight.log", ends) as own_server:
            print(f"Farsight ready after {own_server.wait_until_ready(args.ready_timeout):.0f} s", flush=True)
            servers = {"peer": _facts(other.command), "farsight": _facts(own)}
            facts = {"peer": other.name, "peer_versions": versions(other.name, options.installed), "servers": servers}
            record = run_bench(_options(other, peer_server, own_server, args), print, PROGRAM, facts)
    print(json.dumps(ends))
    write_json(args.json, {**record, "ends": ends})
    # A peer that does not end properly is no failure: `transformers serve` has to be killed.
    return 1 if num_errors(record) or ends["farsight"]["left_behind"] else 0


@contextlib.contextmanager
def _running(command: ServerCommand, log: Path, ends: dict[str, Any]) -> Iterator[RunningServer]:
    server = RunningServer(command, log)
    try:
        yield server
    finally:
        ends[log.stem] = server.stop()


def _facts(command: ServerCommand) -> dict[str, Any]:
    return {**asdict(command), "words": list(command.words)}


def _options(
    other: Peer, peer_server: RunningServer, own_server: RunningServer, args: argparse.Namespace
) -> BenchOptions:
    """The targets, the peer first: ratios are relative to it. Neither gets a field that the other does not support."""
    options = BenchOptions(
        url=(peer_server.command.base_url, own_server.command.base_url),
        label=(other.name, "farsight"),
        model=(peer_server.command.model_name, own_server.command.model_name),
        server_pid=(peer_server.pid, own_server.pid),
        workload=() if args.chat_texts else tuple(args.workloads),
        chat_texts=args.chat_texts,
        num_requests=args.n,
        concurrency=tuple(args.concurrency),
        repeats=args.repeats,
        seed=args.seed,
        warm_up=args.warm_up,
        ignore_eos=other.takes_extensions,
        usage=other.takes_extensions,
        vocab_size=vocab_size(args.vocab_from or args.model) if other.takes_ids and not args.chat_texts else None,
        sla=args.sla,
        json=args.json,
        plots=args.plots,
    )
    return replace(options, **{**CHATS, "temperature": args.temperature}) if args.chat_texts else options


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--peer-venv", type=Path, help="virtual environment in which it is installed [this one]")
    parser.add_argument("--peer-model", type=Path, help="the peer's model, if it needs another file [that of --model]")
    parser.add_argument("--vocab-from", type=Path, help="model directory whose vocabulary prompts use [--model]")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each server")
    parser.add_argument("--dtype", default="bfloat16", help="of both; float32 where processors lack bfloat16")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["skewed", "uniform", "hol"])
    parser.add_argument("--chat-texts", type=Path, help="chats, as in farsight bench, in place of the workloads")
    parser.add_argument("--temperature", type=float, default=CHATS["temperature"], help="of chats")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n", type=int, default=256, help="requests of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=32, help="requests before each load, not counted")
    parser.add_argument("--sla", help="as ttft=500,tpot=50 (ms)")
    parser.add_argument("--max-model-len", type=int, default=2048, help="of the peer, in tokens")
    parser.add_argument(
        "--peer-option", action="append", default=[], help="more for the peer's server: --peer-option=--x"
    )
    parser.add_argument("--farsight-option", action="append", default=[], help="the same for farsight serve")
    parser.add_argument("--ready-timeout", type=float, default=300.0, help="seconds")
    parser.add_argument("--logs", type=Path, help="directory for the servers' output [a temporary one]")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("--plots", type=Path, help="write pictures into this directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
