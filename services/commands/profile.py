"""``farsight profile``: measures the step times of a worker on this machine and stores the fitted prices."""

from __future__ import annotations

import itertools
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError
from farsight.core.processors import compute_threads, usable_processors
from farsight.services.commands.ask import JsonOption
from farsight.services.one_line_errors import failing_by_flag, naming_flags
from farsight.services.progress import hide_downloads, progress_bar, share_bar, wide_console

if TYPE_CHECKING:
    from farsight.engine.steps.model_runner import ModelRunner
    from farsight.estimator.profile_file import ProfiledMachine, ProfileFile
    from farsight.services.commands.step_bench import MeasuredStep

BUSY_SHARE = 0.9
"""Below this share of CPU time in wall time the command warns that other programs ran."""

_EMBEDDED_MODEL = Path(__file__).parents[1] / "embedded_model"
_DEFAULTS = EngineConfig()


def profile(
    out: Annotated[Path, typer.Option(help="Write the profile to this JSON file.")],
    model: Annotated[
        str | None, typer.Option(help="Model directory, GGUF file or hub id; default: the embedded model.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in one step.")] = _DEFAULTS.max_num_seqs,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence, in tokens; 0: the model's context.")] = 0,
    threads: Annotated[int, typer.Option(help="Compute threads; 0: the number that farsight serve uses.")] = 0,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each step, at least 3.")] = 6,
    as_json: JsonOption = False,
) -> None:
    """Measure step times on this machine, for `farsight simulate --profile`."""
    with failing_by_flag():
        given: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "num_threads": threads}
        with naming_flags({"engine": given}):
            engine = EngineConfig(**given, prefix_cache=False)
        _profile(out, model, dtype, engine, rounds, as_json)


def _profile(out: Path, model: str | None, dtype: str, engine: EngineConfig, rounds: int, as_json: bool) -> None:
    from farsight.engine.build import build_worker
    from farsight.engine.checkpoint.model_config import resolve_model_dir
    from farsight.services.commands.step_bench import HELD_BACK_EVERY, fit

    if rounds < HELD_BACK_EVERY:
        raise ConfigError("--rounds", rounds, f"an integer >= {HELD_BACK_EVERY}")
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError("--out", str(out), "a file in an existing directory")
    if as_json:
        hide_downloads()
    model_dir = resolve_model_dir(model or str(_EMBEDDED_MODEL))
    with share_bar("% of the weights loaded", as_json=as_json) as progress:
        worker = build_worker(model_dir, dtype, engine, incarnation="profile", progress=progress)
    runner: ModelRunner = worker.runner  # type: ignore[assignment]  # what ``build_worker`` builds computes
    steps = _measure(runner, engine, rounds, as_json)
    num_threads = compute_threads(engine.num_threads, num_sharers=1)
    machine = _machine(model or _EMBEDDED_MODEL.name, runner, steps, num_threads)
    found = fit(steps, machine, runner.config.kv_bytes_per_token(runner.pool.dtype))
    found = _with_pictures(found, model_dir, dtype, engine, rounds)
    out.write_text(found.to_json(), "utf-8")
    if as_json:
        typer.echo(found.to_json(), nl=False)
    else:
        _print(found, steps)
    if machine.cpu_share < BUSY_SHARE:
        share = f"{100 * machine.cpu_share:.0f} %"
        typer.echo(f"warning: the worker had {share} of its cores; measure again when nothing else runs", err=True)
    typer.echo(f"written: {out}", err=True)


def _measure(runner: ModelRunner, engine: EngineConfig, rounds: int, as_json: bool) -> list[MeasuredStep]:
    from farsight.estimator.step_profile import MIN_SAMPLES, SMALLEST_CHUNK, StepLimits, step_grid
    from farsight.services.commands.step_bench import StepBench, measure, num_fitted

    pool, max_model_len = runner.pool, runner.max_model_len
    if max_model_len < SMALLEST_CHUNK:
        raise ConfigError("--max-model-len", max_model_len, f"an integer >= {SMALLEST_CHUNK}")
    limits = StepLimits(
        engine.max_num_seqs, engine.step_tokens, max_model_len, pool.block_size, pool.num_slots // pool.block_size
    )
    grid = step_grid(limits)
    if len(grid) * num_fitted(rounds) < MIN_SAMPLES:
        enough = next(each for each in itertools.count(rounds) if len(grid) * num_fitted(each) >= MIN_SAMPLES)
        raise ConfigError("--rounds", rounds, f"an integer >= {enough} with so few kinds of steps")
    with progress_bar("steps", rounds * len(grid), as_json=as_json) as progress:
        return measure(StepBench(runner), grid, rounds, progress)


def _with_pictures(found: ProfileFile, model_dir: Path, dtype: str, engine: EngineConfig, rounds: int) -> ProfileFile:
    """With the prices of pictures, where the model sees."""
    from farsight.actors.vision.encoding_cost import measure_model

    cost = measure_model(model_dir, dtype, engine.device, rounds)
    if cost is None:
        return found
    return replace(found, image_batch_s=cost.batch_s, image_token_s=cost.token_s, image_pair_s=cost.pair_s)


def _machine(model: str, runner: ModelRunner, steps: list[MeasuredStep], num_threads: int) -> ProfiledMachine:
    from farsight.estimator.profile_file import ProfiledMachine

    wall_s = sum(step.sample.duration_s for step in steps)
    return ProfiledMachine(
        model=model,
        dtype=str(runner.pool.dtype).removeprefix("torch."),
        processor=_processor(),
        num_cores=usable_processors(),
        num_threads=num_threads,
        cpu_share=min(1.0, sum(step.cpu_s for step in steps) / (num_threads * wall_s)),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def _print(found: ProfileFile, steps: list[MeasuredStep]) -> None:
    import numpy as np
    from rich.table import Table

    from farsight.services.commands.step_bench import fit_steps, is_held_back, relative_errors

    console = wide_console()
    prices = Table("price", "seconds", title="What a step costs")
    for name in ("base_s", "prefill_token_s", "decode_seq_s", "context_token_s", "prefill_pair_s"):
        prices.add_row(name.removesuffix("_s"), f"{getattr(found, name):.3e}")
    for name in ("image_batch_s", "image_token_s", "image_pair_s"):
        if getattr(found, name) is not None:
            prices.add_row(name.removesuffix("_s"), f"{getattr(found, name):.3e}")
    console.print(prices)
    learned = fit_steps([step.sample for step in steps if not is_held_back(step)])
    errors = Table("steps held back", "number", "shortest ms", "longest ms", "error p50", "p90")
    for kind in ("prefill", "decode", "mixed", "all"):
        samples = [step.sample for step in steps if is_held_back(step) and kind in (step.kind, "all")]
        if samples:
            off = relative_errors(learned, samples)
            times_ms = [1e3 * each.duration_s for each in samples]
            cells = [f"{min(times_ms):.2f}", f"{max(times_ms):.2f}"]
            cells += [f"{100 * float(np.quantile(off, level)):.1f} %" for level in (0.5, 0.9)]
            errors.add_row(kind, str(len(samples)), *cells)
    console.print(errors)
