"""``farsight keys``: makes, lists and revokes API keys. A running server reads the changed file within a second."""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from farsight.core.errors import FarsightError, InvalidValueError
from farsight.services.api.access.key_file import KeyFile, changed_key_file, checked_name, parse_tenant, read_key_file
from farsight.services.api.access.keys import Role, Tenant, make_key
from farsight.services.commands.ask import JsonOption
from farsight.services.one_line_errors import failing_in_one_line, naming_flags
from farsight.services.progress import wide_console

FILE_VARIABLE = "FARSIGHT_KEY_FILE"

KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", envvar=FILE_VARIABLE, help="File of API keys that `farsight keys` writes."),
]

keys = typer.Typer(
    no_args_is_help=True, help="Make, list and revoke API keys. A running server follows within a second."
)


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    key_file: KeyFileOption = None,
    role: Annotated[
        list[Role] | None,
        typer.Option(help="serve (requests), observe (status, metrics), admin (all); may be repeated; default: serve."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant that the key belongs to; default: NAME.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Limit of the tenant; 0 is none.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Limit of the tenant; 0 is none.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="Requests in flight of the tenant; 0 is no limit.")] = None,
    priority_min: Annotated[int | None, typer.Option(help="Lowest value of priority (goes first).")] = None,
    priority_max: Annotated[int | None, typer.Option(help="Highest value of priority.")] = None,
    weight: Annotated[float | None, typer.Option(help="Share of the tenant in fair orders; default: 1.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it once; the file keeps only a hash. Limits hold for all keys of the tenant."""
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_in_flight": max_in_flight,
        "priority_min": priority_min,
        "priority_max": priority_max,
        "weight": weight,
    }
    given = {key: value for key, value in limits.items() if value is not None}
    named = naming_flags({f"tenants.{tenant or name}": given})
    with failing_in_one_line(), named, changed_key_file(_path(key_file)) as content:
        checked_name("NAME", name)
        owner = checked_name("--tenant", tenant or name)
        if any(known.name == name for known in content[0].keys):
            raise InvalidValueError("NAME", name, "a name that no other key has; `farsight keys revoke` frees it")
        key, record = make_key(name, owner, role or [Role.SERVE], time.time())
        content[0] = KeyFile((*content[0].keys, record), _with_limits(content[0], owner, given))
    made = {"key": key, "id": record.id, "name": record.name, "tenant": record.tenant, "roles": list(record.roles)}
    typer.echo(json.dumps(made) if as_json else key)
    typer.echo("This is the only time that the key is shown.", err=True)


@keys.command(name="list")
def list_keys(
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """List keys and tenants, without secrets."""
    with failing_in_one_line():
        content = read_key_file(_path(key_file))
    rows = [
        {
            "id": key.id,
            "name": key.name,
            "tenant": key.tenant,
            "roles": list(key.roles),
            "created_at": key.created_at,
            "limits": _shown_limits(content.tenants.get(key.tenant, Tenant(key.tenant))),
        }
        for key in content.keys
    ]
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        _print(rows)


@keys.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key: a running server refuses it within a second. Answers under way go on."""
    with failing_in_one_line(), changed_key_file(_path(key_file)) as content:
        kept = tuple(key for key in content[0].keys if key.name != name)
        if len(kept) == len(content[0].keys):
            known = ", ".join(key.name for key in kept) or "none"
            raise InvalidValueError("NAME", name, f"the name of a key in the file: {known}")
        content[0] = KeyFile(kept, content[0].tenants)
    typer.echo(json.dumps({"revoked": name}) if as_json else f"revoked {name}")


def _path(key_file: Path | None) -> Path:
    if key_file is None:
        raise FarsightError(f"no key file is named: pass --key-file FILE, or set {FILE_VARIABLE}")
    return key_file


def _with_limits(content: KeyFile, tenant: str, given: dict[str, Any]) -> dict[str, Tenant]:
    """The tenants of the file, with the given limits of one of them."""
    tenants = dict(content.tenants)
    if given:
        known = dataclasses.asdict(tenants.get(tenant, Tenant(tenant)))
        values = {key: value for key, value in (known | given).items() if key != "name" and value is not None}
        tenants[tenant] = parse_tenant(tenant, values)
    return tenants


def _shown_limits(tenant: Tenant) -> dict[str, Any]:
    default = dataclasses.asdict(Tenant(tenant.name))
    return {key: value for key, value in dataclasses.asdict(tenant).items() if value != default[key]}


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("name", "id", "tenant", "roles", "made", "limits of the tenant")
    for row in rows:
        limits = ", ".join(f"{key} {value}" for key, value in row["limits"].items()) or "-"
        made = f"{datetime.fromtimestamp(row['created_at']):%Y-%m-%d %H:%M}"
        table.add_row(row["name"], row["id"], row["tenant"], ", ".join(row["roles"]), made, limits)
    wide_console().print(table)
