"""``farsight cache``: shows, bounds and clears the KV that servers keep in a folder (``engine.disk_kv``)."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from farsight.core.config.engine import parse_memory
from farsight.engine import kv_files
from farsight.services.commands.ask import JsonOption
from farsight.services.one_line_errors import failing_in_one_line

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", envvar="FARSIGHT_DISK_KV", help="Folder that `serve --disk-kv` was given.")
]

cache = typer.Typer(
    no_args_is_help=True,
    help="Show, bound and clear the KV that servers keep on disk. A running server computes again what is gone.",
)


def _folder(path: Path) -> Path:
    return kv_files.open_folder(path, "DIR")


@cache.command()
def show(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Shows what a folder holds, by model and tenant."""
    with failing_in_one_line():
        kept = kv_files.kept_in(_folder(folder))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(each) for each in kept]))
        return
    for each in kept:
        used = f"{datetime.fromtimestamp(each.used_at):%Y-%m-%d %H:%M}" if each.num_files else "-"
        about = f"{each.about.get('model', '?')}, {each.about.get('dtype', '?')}, {each.about.get('rounding', '?')}"
        tenant = each.tenant or "(no key)"
        typer.echo(
            f"{each.identity[:8]}  {tenant}  {each.num_files} blocks  {each.num_bytes / 2**20:.1f} MiB  {used}  {about}"
        )
    total = sum(each.num_bytes for each in kept)
    typer.echo(f"{sum(each.num_files for each in kept)} blocks, {total / 2**20:.1f} MiB in {folder}")


@cache.command()
def bound(
    folder: FolderArgument,
    size: Annotated[str, typer.Option(help="Most bytes that stay, as 5GiB; the least recently used leave.")],
    as_json: JsonOption = False,
) -> None:
    """Deletes the least recently used blocks of a folder until it has at most so many bytes."""
    with failing_in_one_line():
        _told(kv_files.bound(_folder(folder), parse_memory(size)), as_json)


@cache.command()
def clear(
    folder: FolderArgument,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's blocks; default: all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Deletes the blocks of a folder, or of one tenant."""
    with failing_in_one_line():
        _told(kv_files.clear(_folder(folder), tenant), as_json)


def _told(num_blocks: int, as_json: bool) -> None:
    typer.echo(json.dumps({"deleted_blocks": num_blocks}) if as_json else f"{num_blocks} blocks deleted")
