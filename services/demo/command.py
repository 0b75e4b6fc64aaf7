"""``farsight demo``: two presets side by side on emulated devices, live, on a page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from farsight.core.errors import ConfigError
from farsight.services.commands.ask import JsonOption
from farsight.services.commands.simulate import FLAGS, preset_names
from farsight.services.one_line_errors import failing_by_flag


def demo(
    presets: Annotated[
        str, typer.Option(help="Two presets; the ratio is that of the second to the first.")
    ] = "fcfs,farsight-mean",
    trace: Annotated[
        str,
        typer.Option(
            "--trace", metavar="NAME|FILE", help="Workload by name, or a trace file in Azure's or Mooncake's format."
        ),
    ] = "chat-and-reports",
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 150,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second (default: 6, or the pace of a trace file)."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in one step of a device.")] = 6,
    kv_tokens: Annotated[int, typer.Option(help="KV pool of each device in tokens.")] = 30_000,
    seed: Annotated[int, typer.Option(help="Random seed of the arrivals.")] = 0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page on 127.0.0.1; 0: any.")] = 8100,
    once: Annotated[bool, typer.Option("--once", help="End when every request has ended.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="At the end write the lanes of all requests into this JSON file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Two presets under the same arrivals on emulated A100s, live, on a page: no model, no GPU."""
    with failing_by_flag(FLAGS):
        from farsight.services.demo.run import results_text, run_demo
        from farsight.services.demo.settings import DemoSettings

        names = preset_names("--presets", presets)
        if len(names) != 2:
            raise ConfigError("--presets", presets, "two presets, as fcfs,farsight-mean")
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError("--rate", rate, "requests per second above 0")
        if record is not None and not record.absolute().parent.is_dir():
            raise ConfigError("--record", str(record), "a file in an existing directory")
        pace = rate if rate is not None or Path(trace).is_file() else 6.0
        settings = DemoSettings((names[0], names[1]), trace, requests, pace, max_num_seqs, kv_tokens, seed)
        result = run_demo(settings, port, once, record, lambda line: typer.echo(line, err=as_json))
        typer.echo(json.dumps(result) if as_json else results_text(result))
