"""``farsight evaluate``: measures a trained predictor of output lengths on requests it was not trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farsight.core.errors import ConfigError
from farsight.services.commands.ask import JsonOption
from farsight.services.commands.train import (
    FLAGS,
    DataArgument,
    DeviceOption,
    StrictOption,
    TokenizerOption,
    report_rejected,
)
from farsight.services.one_line_errors import failing_by_flag
from farsight.services.progress import hide_downloads, progress_bar, wide_console

if TYPE_CHECKING:
    from farsight.core.forecast import Forecast
    from farsight.predictor.metrics import Scores
    from farsight.predictor.text_predictor import TextPredictor
    from farsight.services.commands.forecast_data import Examples

_BATCH = 256


def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Written by `farsight train`.")],
    data: DataArgument,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            "--predictor-encoder",
            help="Where the encoder of the training lies now; default: as then.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Plot forecasts against true lengths into this PNG file.")
    ] = None,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a predictor of output lengths: errors, ranking, and calibration of its quantiles."""
    with failing_by_flag(FLAGS):
        if plot is not None:
            _check_plot(plot)
        if as_json:
            hide_downloads()
        predictor = _load(directory, encoder, device)
        found = _read(data, tokenizer, strict, as_json)
        forecasts = _forecast(predictor, found, as_json)
        lens = [each.output_len for each in found.examples]
        scores, tasks = _scores(forecasts, lens, found.tasks)
        if as_json:
            values = {**scores.to_dict(), "tasks": {name: each.to_dict() for name, each in tasks.items()}}
            typer.echo(json.dumps(values))
        else:
            _print(scores, tasks)
        if plot is not None:
            from farsight.predictor.metrics import write_plot

            write_plot(plot, forecasts, lens, found.tasks, scores)
            typer.echo(f"written: {plot}", err=True)


def _check_plot(path: Path) -> None:
    """Checks that the plot can be written before texts are read for minutes."""
    from farsight.simulator.plots import check_matplotlib

    check_matplotlib()
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ConfigError("--plot", str(path), "a file that ends in .png, in an existing directory")


def _load(directory: Path, encoder: str | None, device: str) -> TextPredictor:
    from farsight.engine.encoders.regressor import text_model_of
    from farsight.predictor.artefact import load
    from farsight.predictor.history import HistoryPredictor
    from farsight.predictor.text_predictor import TextPredictor

    artefact = load(directory)
    return TextPredictor(artefact, text_model_of(artefact, encoder or "", device), HistoryPredictor())


def _read(data: Path, tokenizer: Path | None, strict: bool, as_json: bool) -> Examples:
    """The rows whose outputs were not cut off; the true length of the others is unknown."""
    from farsight.services.commands.forecast_data import EMBEDDED_TOKENIZER, Examples, TokenCounter, read_examples

    with progress_bar("rows", as_json=as_json) as progress:
        found = read_examples(data, TokenCounter(tokenizer or EMBEDDED_TOKENIZER), strict, progress)
    report_rejected(found.rejected)
    complete = [pair for pair in zip(found.examples, found.tasks, strict=True) if not pair[0].censored]
    if not complete:
        raise ConfigError("DATA", str(data), "outputs that were not cut off")
    return Examples([example for example, _ in complete], [task for _, task in complete], found.rejected)


def _forecast(predictor: TextPredictor, found: Examples, as_json: bool) -> list[Forecast]:
    questions = [each.question for each in found.examples]
    forecasts: list[Forecast] = []
    with progress_bar("forecasts", len(questions), as_json=as_json) as progress:
        for begin in range(0, len(questions), _BATCH):
            forecasts += predictor.forecast(questions[begin : begin + _BATCH])
            if progress is not None:
                progress(len(forecasts))
    return forecasts


def _scores(
    forecasts: Sequence[Forecast], lens: Sequence[int], tasks: Sequence[str]
) -> tuple[Scores, dict[str, Scores]]:
    """Scores of all rows, and by task where rows name one."""
    from farsight.predictor.metrics import score

    by_task = {}
    for task in sorted(set(tasks) - {""}):
        rows = [number for number, each in enumerate(tasks) if each == task]
        by_task[task] = score([forecasts[number] for number in rows], [lens[number] for number in rows])
    return score(forecasts, lens), by_task


def _print(scores: Scores, tasks: dict[str, Scores]) -> None:
    from rich.table import Table

    table = Table(
        "task", "requests", "RMSE", "MAE", "tau", "pinball", *(f"{level} covers" for level in scores.coverage)
    )
    for name, each in (*tasks.items(), ("all", scores)):
        errors = [f"{value:.1f}" for value in (each.rmse, each.mae)]
        covered = [f"{share:.1%}" for share in each.coverage.values()]
        table.add_row(name, str(each.n), *errors, f"{each.tau:.3f}", f"{each.pinball:.2f}", *covered)
    wide_console().print(table)
