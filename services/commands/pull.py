"""``farsight pull`` and ``farsight models``: published models by name, what of them is here, and how it comes here."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.catalogue import PublishedModel, catalogue, models_dir
from farsight.services.commands.ask import JsonOption
from farsight.services.commands.model_sources import Say, fetch, partial_file
from farsight.services.one_line_errors import failing_in_one_line
from farsight.services.progress import wide_console


def pull(
    name: Annotated[str, typer.Argument(help="Name of a model, as `farsight models` lists it, or a hub id.")],
    as_json: JsonOption = False,
) -> None:
    """Download a model by its name, from where an interrupted download has ended."""
    with failing_in_one_line():
        path = _pulled(name, functools.partial(typer.echo, err=True), as_json)
    typer.echo(json.dumps({"name": name, "path": str(path)}) if as_json else f"{name} is here: {path}")


def _pulled(name: str, say: Say, as_json: bool) -> Path:
    if name in catalogue():
        return _fetched(catalogue()[name], say, as_json)
    if "/" not in name:
        raise InvalidValueError("NAME", name, f"one of {', '.join(catalogue())}, or a hub id such as OWNER/NAME")
    from farsight.engine.checkpoint.model_config import resolve_model_dir

    return resolve_model_dir(name)


def fetch_missing(model: str, say: Say, *, quiet: bool = False) -> None:
    """Downloads what ``--model`` names if that is a model of the catalogue which is not here.

    Raises:
        FarsightError: As ``fetch``.
    """
    listed = catalogue().get(model)
    if listed is None:
        return
    if Path(model).is_dir():
        say(f"{model} is a model of `farsight models`; the directory of that name is ./{model}.")
    if not listed.is_in(models_dir()):
        _fetched(listed, say, quiet)


def _fetched(model: PublishedModel, say: Say, quiet: bool) -> Path:
    try:
        return fetch(model, models_dir(), say, quiet=quiet)
    except KeyboardInterrupt:
        say(f"Stopped. `farsight pull {model.name}` takes it up again.")
        raise typer.Exit(130) from None


def models(as_json: JsonOption = False) -> None:
    """List the models that have a name: which are here, and which can be pulled."""
    directory = models_dir()
    rows = [(model, _state(model, directory)) for model in catalogue().values()]
    if as_json:
        listed = [{**asdict(model), "here": here, "path": str(directory / model.file)} for model, here in rows]
        typer.echo(json.dumps(listed))
        return
    from rich.table import Table

    table = Table("name", "here", "size", "licence", "what it is")
    for model, here in rows:
        table.add_row(model.name, here, model.size, model.licence, model.about)
    wide_console().print(table)
    typer.echo(f"They lie in {directory}; FARSIGHT_MODELS names another directory.")
    typer.echo("Download: farsight pull NAME   Serve: farsight serve NAME, which downloads it as well")
    typer.echo("Without a download: farsight serve (the embedded model), farsight serve embedded-vision")


def _state(model: PublishedModel, directory: Path) -> str:
    if model.is_in(directory):
        return "yes"
    partial = partial_file(model, directory)
    return f"{partial.stat().st_size >> 20} MiB of it" if partial.exists() else "no"
