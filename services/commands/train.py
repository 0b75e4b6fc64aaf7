"""``farsight train``: trains a predictor of output lengths on finished requests, or of times on finished batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from farsight.core.errors import ConfigError
from farsight.core.forecast import Example
from farsight.services.commands.ask import JsonOption
from farsight.services.one_line_errors import failing_by_flag
from farsight.services.progress import hide_downloads, progress_bar
from farsight.services.words import counted

if TYPE_CHECKING:
    from farsight.estimator.knn import ServedBatch
    from farsight.predictor.artefact import TrainedModel
    from farsight.predictor.training import Recipe

Training: TypeAlias = "Callable[[Sequence[Example], int, Callable[[int], None] | None], TrainedModel]"
"""Makes an artefact of examples, with a version, and reports its progress."""

FLAGS = {"num_trees": "--trees", "examples": "DATA"}
"""Flags of the fields that have another name than their flag."""

_MAX_SHOWN = 10
"""Most rejected rows that are listed one by one."""

_BATCH = "num_requests, batch_len, generation_len, serving_time_s"
_FIRST_WITH_BATCHES = 2
"""Schema version of the log from which on it holds batches."""

DataArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DATA", help="JSON lines (.gz or not) with instruction, user_input, output or output_len, perhaps task."
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", help="tokenizer.json of the served model, or its directory; default: the embedded one."
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="Device of the text encoder: auto, cpu, cuda or cuda:0.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first unusable row.")]


def train(
    data: DataArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory for the trained predictor.")],
    kind: Annotated[str, typer.Option(help="words, forest, magnus, linear or bert.")] = "words",
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            "--predictor-encoder",
            help="Directory, hub id, minilm (offline) or auto: LaBSE if the hub's cache has it, else minilm; behind "
            "sentence-transformers: that library computes it. Default: auto; for bert a small one trained from "
            "nothing; none for words.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    d_user: Annotated[int | None, typer.Option(help="Dimensions kept of a user input's embedding.")] = None,
    d_app: Annotated[int | None, typer.Option(help="Dimensions kept of an instruction's embedding.")] = None,
    trees: Annotated[int, typer.Option(help="Number of trees of a forest.")] = 100,
    max_features: Annotated[float, typer.Option(help="Share of the features tried at each split of a tree.")] = 1.0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes of --kind bert over the data.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request that --kind bert reads.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed and data give the same predictor.")] = 0,
    strict: StrictOption = False,
    estimator: Annotated[
        bool,
        typer.Option(
            "--estimator", help="Learn how long batches take; DATA is then the log file of a server in batch mode."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a predictor of output lengths on finished requests; with --estimator, of times on finished batches."""
    from farsight.predictor.models import BERT

    with failing_by_flag(FLAGS):
        if estimator:
            path, num_batches = _train_estimator(data, out)
            line = f'{path}: learned from {num_batches} batches; serve with [batch] artefact = "{out}"'
            typer.echo(json.dumps({"path": str(path), "num_batches": num_batches}) if as_json else line)
            return
        if as_json:
            hide_downloads()
        if kind == BERT:
            made = _fine_tuning(encoder, device, epochs, max_tokens, seed)
        else:
            forest = {"num_trees": trees, "max_features": max_features, "seed": seed}
            made = _training(_recipe(kind, encoder, d_user, d_app, forest), encoder, device)
        _train(data, out, made, tokenizer, strict, as_json)


def _recipe(kind: str, encoder: str | None, d_user: int | None, d_app: int | None, forest: dict[str, Any]) -> Recipe:
    """The recipe of a kind with the given options; ``forest`` holds fields of ``ForestOptions``."""
    from dataclasses import replace

    from farsight.predictor.models import BERT
    from farsight.predictor.training import RECIPES

    if kind not in RECIPES:
        raise ConfigError("--kind", kind, f"one of {', '.join((*RECIPES, BERT))}")
    recipe = RECIPES[kind]
    if recipe.reads == "words":
        for flag, value in (("--encoder", encoder), ("--d-user", d_user), ("--d-app", d_app)):
            if value is not None:
                raise ConfigError(flag, value, "none with --kind words, which reads no embeddings")
    return replace(
        recipe,
        forest=replace(recipe.forest, **forest),
        d_user=recipe.d_user if d_user is None else d_user,
        d_app=recipe.d_app if d_app is None else d_app,
    )


def _training(recipe: Recipe, encoder: str | None, device: str) -> Training:
    from farsight.predictor.encoders import AUTO
    from farsight.predictor.training import train as train_artefact

    def made(examples: Sequence[Example], version: int, progress: Callable[[int], None] | None) -> TrainedModel:
        loaded = None
        if recipe.reads != "words":
            from farsight.engine.encoders.loading import load_encoder

            loaded = load_encoder(encoder or AUTO, device)
            typer.echo(f"encoder: {loaded.name}, {loaded.dim} dimensions", err=True)
        return train_artefact(examples, loaded, recipe, version, progress)

    return made


def _fine_tuning(encoder: str | None, device: str, epochs: int, max_tokens: int, seed: int) -> Training:
    from farsight.engine.encoders.finding import encoder_dir, settled_name
    from farsight.engine.encoders.fine_tuning import FineTuning, fine_tune

    options = FineTuning(epochs, max_tokens, seed=seed)

    def made(examples: Sequence[Example], version: int, progress: Callable[[int], None] | None) -> TrainedModel:
        folder = None if encoder is None else encoder_dir(settled_name(encoder))
        return fine_tune(examples, folder, options, device=device, version=version, progress=progress)

    return made


def _train(data: Path, out: Path, training: Training, tokenizer: Path | None, strict: bool, as_json: bool) -> None:
    from farsight.predictor.artefact import FILE_NAME, load
    from farsight.services.commands.forecast_data import EMBEDDED_TOKENIZER, TokenCounter, read_examples

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(out), f"a directory, new or not ({error.strerror})") from error
    # The version counts up from the existing file; a damaged file is reported, not overwritten.
    version = load(out).metadata["version"] + 1 if (out / FILE_NAME).exists() else 1
    counter = TokenCounter(tokenizer or EMBEDDED_TOKENIZER)
    with progress_bar("rows", as_json=as_json) as progress:
        found = read_examples(data, counter, strict, progress)
    report_rejected(found.rejected)
    with progress_bar("texts read", as_json=as_json) as progress:
        artefact = training(found.examples, version, progress)
    path = artefact.save(out)
    left_out = sum(each.censored for each in found.examples)
    num_examples = artefact.metadata["num_examples"]
    if as_json:
        result = {"path": str(path), "version": version, "num_examples": num_examples, "num_left_out": left_out}
        typer.echo(json.dumps(result))
        return
    note = f", {left_out} left out that were cut off" if left_out else ""
    typer.echo(f"{path}: version {version}, trained on {counted(num_examples, 'request')}{note}")


def _train_estimator(log: Path, out: Path) -> tuple[Path, int]:
    """Writes what the batches of a log teach; returns the file and the number of batches.

    Raises:
        ConfigError: There is no log, it holds no batches, or the directory cannot be written.
    """
    from farsight.core.costs import A100_7B
    from farsight.estimator.knn import BatchTimes, write_batch_times

    batches = _served_batches(log)
    if not batches:
        raise ConfigError("DATA", str(log), "the log of a server that ran in batch mode; this one has no batches")
    times = BatchTimes(A100_7B, batches)  # The file holds no step cost: a server measures its own.
    try:
        return write_batch_times(out, times), times.num_batches
    except OSError as error:
        raise ConfigError("--out", str(out), f"a directory, new or not ({error.strerror})") from error


def _served_batches(log: Path) -> list[ServedBatch]:
    """Batches that generated something, in the order of their ends."""
    from farsight.estimator.knn import ServedBatch
    from farsight.services.commands.logged_traffic import opened_log

    with opened_log(log, "DATA") as (connection, version):
        if version < _FIRST_WITH_BATCHES:
            return []
        rows = connection.execute(f"SELECT {_BATCH} FROM finished_batches ORDER BY finished_at").fetchall()
    return [ServedBatch(*row) for row in rows if min(row[:3]) >= 1 and row[3] > 0]


def report_rejected(rejected: Sequence[str]) -> None:
    """Lists skipped rows on stderr."""
    for message in rejected[:_MAX_SHOWN]:
        typer.echo(f"skipped: {message}", err=True)
    if len(rejected) > _MAX_SHOWN:
        typer.echo(f"skipped: {len(rejected) - _MAX_SHOWN} more rows", err=True)
