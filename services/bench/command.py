"""``farsight bench``: the command's options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from farsight.core.errors import ConfigError
from farsight.services.one_line_errors import failing_by_flag
from farsight.services.server_address import HostOption, PortOption, server_url

KEY_VARIABLES = ["FARSIGHT_BENCH_API_KEY", "FARSIGHT_API_KEY"]
"""Environment variables with the key; the first goes before the second."""


def bench(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Server, as http://127.0.0.1:8000, in place of --host and --port; several are compared in "
            "alternating rounds."
        ),
    ] = None,
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    label: Annotated[list[str] | None, typer.Option(help="Name of each server in tables.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Model name, for all servers or one each; default: ask the server.")
    ] = None,
    server_pid: Annotated[list[int] | None, typer.Option(help="Process id of each server, to measure its CPU.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar=KEY_VARIABLES, help="API key, sent as a bearer token.")] = None,
    endpoint: Annotated[
        Literal["completions", "chat"] | None,
        typer.Option(help="Endpoint of the requests (default: completions; --chat-texts: chat)."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="uniform, skewed, hol, hol-burst, zipf, gamma, prefix (default: skewed); may be repeated."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV or JSONL of arrivals and lengths, .gz or not.")] = None,
    texts: Annotated[Path | None, typer.Option(help="JSONL with prompt, or instruction and user_input.")] = None,
    chat_texts: Annotated[
        Path | None,
        typer.Option(help="Real chats, answered to their natural ends: a prompt per line, JSONL, or ShareGPT's JSON."),
    ] = None,
    prefix_groups: Annotated[Path | None, typer.Option(help="JSONL of prefixes with their requests.")] = None,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="Conversations of 10 turns, as many as --concurrency (default: 8).")
    ] = False,
    num_requests: Annotated[int, typer.Option(help="Most requests per run.")] = 256,
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: in flight at once, as 1,32,128 (default: 32).")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second.")] = None,
    cv: Annotated[
        float | None, typer.Option(help="Variation of the gaps: 1 is Poisson, more is burstier (default: 1, gamma 4).")
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="Seconds of the run per second of --trace (default: 1).")
    ] = None,
    warm_up: Annotated[int, typer.Option(help="Number of short warm-up requests, not counted.")] = 32,
    seed: Annotated[int, typer.Option(help="Random seed of lengths, arrivals and drawn tokens.")] = 1,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature (default: 0; --chat-texts: 0.8).")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Share of likely tokens to draw from (default: 1; --chat-texts: 0.95).")
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(help="Ask for full lengths, an extension of OpenAI's API (default; not with --chat-texts)."),
    ] = None,
    usage: Annotated[bool, typer.Option(help="Ask for the usage at the end of the stream.")] = True,
    extra_body: Annotated[str | None, typer.Option(help="JSON object, merged into every request.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of a request in seconds.")] = 600.0,
    keep_alive: Annotated[bool, typer.Option(help="Reuse connections.")] = False,
    vocab_size: Annotated[int | None, typer.Option(help="Send prompts as token ids below it, not as text.")] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Longest drawn prompt in tokens; longer ones are cut, longer chats left out.")
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="Longest output in tokens; longer ones are cut (--chat-texts: 512).")
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Output length where a text gives none.")] = 128,
    num_groups: Annotated[int, typer.Option(help="Number of prefixes of --workload prefix.")] = 16,
    prefix_tokens: Annotated[int, typer.Option(help="Length of each prefix in tokens.")] = 512,
    same_prompts: Annotated[
        bool, typer.Option("--same-prompts", help="Send the same prompts in all runs, so that caches help.")
    ] = False,
    salt: Annotated[int | None, typer.Option(help="Repeats the prompts of an earlier call; default: random.")] = None,
    hide_lengths: Annotated[
        bool, typer.Option("--hide-lengths", help="One max_tokens for all; for a server in benchmark mode.")
    ] = False,
    sla: Annotated[
        str | None, typer.Option(help="Bounds in ms on ttft, tpot, mtpot, jct, for goodput: ttft=500,tpot=50.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this JSON file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write plots into this directory.")] = None,
) -> None:
    """Load OpenAI-compatible servers and measure them; exit status 1 if a request failed."""
    given: dict[str, Any] = dict(locals())
    from farsight.services.bench.compare import num_errors, run_bench
    from farsight.services.bench.options import CHATS, BenchOptions

    with failing_by_flag():
        del given["host"], given["port"]
        given |= {"url": url or [server_url(host, port)], "concurrency": _counts(concurrency)}
        fields: dict[str, Any] = dict(CHATS) if chat_texts is not None else {}
        for name, value in given.items():
            if value is not None:
                fields[name] = tuple(value) if isinstance(value, list) else value
        record = run_bench(BenchOptions(**fields), typer.echo)
    if num_errors(record):
        raise typer.Exit(1)


def _counts(text: str | None) -> list[int]:
    try:
        return [int(item) for item in text.split(",")] if text is not None else []
    except ValueError:
        raise ConfigError("--concurrency", text, "numbers as 32 or 1,32,128") from None
