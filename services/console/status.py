"""``farsight status``: what a running server does, in one line, and then each of its components."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import typer

from farsight.services.commands.ask import ApiKeyOption, JsonOption, ask, key_for, read
from farsight.services.one_line_errors import failing_in_one_line
from farsight.services.progress import wide_console
from farsight.services.server_address import HostOption, PortOption, UrlOption, address_of

STATUS_TIMEOUT_S = 5.0

MEASURED_S = 2.0
"""So long ``farsight status`` watches what the processes use, and what goes through the server."""

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def status(
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a running server does, and every logical component of it."""
    with failing_in_one_line():
        server = address_of(url, host, port)
        key = key_for(server, api_key)
        body = ask(server, "/status", STATUS_TIMEOUT_S, key)
        if as_json:
            typer.echo(json.dumps(body))
            return
        [card, *_] = ask(server, "/v1/models", STATUS_TIMEOUT_S, key)["data"]
        numbers = counts(server, key)
        time.sleep(MEASURED_S)
        before, body = body["processes"], ask(server, "/status", STATUS_TIMEOUT_S, key)
        later = counts(server, key)
    typer.echo(headline(server, card, numbers, later, body))
    if body["emulated"]:
        typer.echo(f"Emulated device ({body['emulated']}): answers are made up.")
    print_components(body["actors"], body["learned"])
    print_processes(before, body["processes"], body["actors"])


def counts(server: str, key: str) -> Counts:
    """Returns the sums of the metrics that the headline shows, over all processes of a server."""
    from prometheus_client.parser import text_string_to_metric_families

    found = dict.fromkeys(_SHOWN, 0.0)
    text = read(server, "/metrics", STATUS_TIMEOUT_S, key).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return found


Counts = Mapping[str, float]

_SHOWN = ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:num_requests_waiting")


def headline(server: str, card: Mapping[str, Any], before: Counts, after: Counts, body: Mapping[str, Any]) -> str:
    """Returns a server's model, age, rates, memory, queue and address in one line.

    Args:
        card: The model, as ``/v1/models`` lists it.
        before, after: Two looks, ``MEASURED_S`` apart.
        body: What ``/status`` says.
    """
    requests, tokens = [(after[name] - before[name]) / MEASURED_S for name in _SHOWN[:2]]
    kv = body["kv"]
    used = 1 - kv["free_blocks"] / kv["num_blocks"] if kv["num_blocks"] else 0.0
    delay = "" if body["queue_delay_s"] is None else f" (a new request: {body['queue_delay_s']:.2f} s)"
    parts = [
        f"{card['id']}: up {age(time.time() - card['created'])}",
        f"{requests:.1f} requests/s",
        f"{tokens:.0f} tokens/s",
        f"KV {used:.0%} in use",
        f"{after[_SHOWN[2]]:.0f} waiting{delay}",
        server,
    ]
    return ", ".join(parts)


def age(seconds: float) -> str:
    """Returns a time in its two largest units, as ``3 h 12 min``."""
    left = max(0, round(seconds))
    found: list[str] = []
    for unit, size in _UNITS:
        number, left = divmod(left, size)
        if number or found:
            found.append(f"{number} {unit}")
    return " ".join(found[:2]) or "0 s"


def print_table(headers: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table, unless it has no rows."""
    from rich.table import Table

    table = Table(*headers)
    for row in rows:
        table.add_row(*map(str, row))
    if table.row_count:
        wide_console().print(table)


def print_components(actors: list[dict[str, Any]], learned: list[dict[str, Any]]) -> None:
    rows = []
    for row in actors:
        age = row["last_step_age_s"]
        shown = "-" if age is None else f"{age:.1f} s ago"
        state = "degraded" if row["degraded"] and row["state"] == "ready" else row["state"]
        rows.append((row["name"], row["kind"], row["pid"], row["node"], state, row["queue"], shown))
    print_table(("name", "kind", "pid", "node", "state", "queue", "last step"), rows)
    print_table(("degraded", "reason"), ((row["name"], row["degraded"]) for row in actors if row["degraded"]))
    replaced = ((row["name"], row["restarts"], row["last_end"]) for row in actors if row["last_end"])
    print_table(("replaced", "times", "last reason"), replaced)
    servers = ((row["name"], row["url"], row["breaker"]) for row in actors if row["url"])
    print_table(("replica", "server URL", "breaker"), servers)
    versions = []
    for row in learned:
        score = "-" if row["score"] is None else f"{row['score']:.4g}"
        at = f"{datetime.fromtimestamp(row['created_at']):%Y-%m-%d %H:%M:%S}"
        used = "yes" if row["current"] else ""
        versions.append((row["kind"], row["version"], score, row["num_examples"], at, used))
    print_table(("learned while serving", "version", "score", "examples", "created at", "in use"), versions)


def print_processes(before: list[dict[str, Any]], after: list[dict[str, Any]], actors: list[dict[str, Any]]) -> None:
    """Prints what each process used between two looks ``MEASURED_S`` apart, and its memory."""
    if not after:
        return
    spent = {row["pid"]: row["cpu_s"] for row in before}
    shares = [max(0.0, row["cpu_s"] - spent.get(row["pid"], row["cpu_s"])) / MEASURED_S for row in after]
    rows = []
    for share, row in sorted(zip(shares, after, strict=True), key=lambda pair: -pair[1]["memory_bytes"]):
        hosted = ", ".join(actor["name"] for actor in actors if actor["pid"] == row["pid"])
        rows.append((row["name"], row["pid"], hosted, f"{share:.1%}", f"{row['memory_bytes'] / 2**20:.0f}"))
    memory = sum(row["memory_bytes"] for row in after) / 2**20
    rows.append(("all", "", "", f"{sum(shares):.1%}", f"{memory:.0f}"))
    print_table(("process", "pid", "components", "of a core", "memory, MiB"), rows)
