"""The entry point of the Ray job: ``python -m farsight.services.batch.job IN OUT``. A second run resumes the first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import ray
import typer
import uvloop
from ray.exceptions import RayError

from farsight.actors.runtime.hosts import create_host
from farsight.actors.runtime.names import SUPERVISOR, host_of
from farsight.actors.runtime.peer import Site
from farsight.core.children import end_with_parent
from farsight.core.config.load import FarsightConfig, load_config
from farsight.services.api.app import build_app
from farsight.services.api.backend import Generator
from farsight.services.api.batches.lines import LineResult, read_batch
from farsight.services.api.batches.sender import ForecastLines, run_lines
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.batch.progress import LOCK_WAIT_S, ProgressStore
from farsight.services.batch.submit import DEFAULT_CONCURRENCY
from farsight.services.ingress.ingress import open_client
from farsight.services.ingress.predictor_client import line_forecasts
from farsight.services.launch.cluster import ServiceFailed
from farsight.services.launch.failures import failing_in_lines
from farsight.services.launch.launch import find_model, find_site, start_components
from farsight.services.launch.stages import Stages

PROGRESS_INTERVAL_S = 5.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Input file: one request per line.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Output file for the answers.")],
    model: Annotated[
        str | None, typer.Option(help="Model directory, GGUF file or hub id; default: the embedded model.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; flags override it.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at once.")] = DEFAULT_CONCURRENCY,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> None:
    """Run a batch inside a Ray job; exit status 0 means that every input line has its output line."""
    with failing_in_lines("batch-job"):
        loaded = load_config(config, {"model": {"path": model}})
        run_job(source, target, loaded, concurrency, overwrite, typer.echo)


def run_job(
    source: Path, target: Path, config: FarsightConfig, concurrency: int, overwrite: bool, say: Callable[[str], None]
) -> None:
    """Runs the unfinished requests of a batch and writes its output.

    Raises:
        FarsightError: Input, output or configuration cannot be used, or the service failed; progress is kept.
    """
    batch = read_batch(source)
    with ProgressStore.open(target, batch, overwrite=overwrite, lock_wait_s=LOCK_WAIT_S) as store:
        progress = Progress(len(batch.lines), say)
        if store.num_done:
            say(f"farsight batch: resumes with {store.num_done}/{len(batch.lines)} done")
        if store.num_done < len(batch.lines):
            num_left = len(batch.lines) - store.num_done
            say(f"farsight batch: {num_left} requests to run, {concurrency} at once; the model is starting")
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_run(store, config, concurrency, progress))
        store.finish()
        say(f"{progress.line(store.num_done, store.num_failed)}; the answers are in {target}")


async def _run(store: ProgressStore, config: FarsightConfig, concurrency: int, progress: Progress) -> None:
    async def keep(results: Sequence[LineResult]) -> None:
        await asyncio.to_thread(store.append, results)  # A slow disk must not delay the requests.
        progress(store.num_done, store.num_failed)

    stages = Stages(lambda line: progress.say(f"farsight batch: {line}"), config.server.start_patience_s)
    async with open_backend(config, stages) as (backend, encoder, forecast_lines):
        served = build_app(backend, encoder, max_body_bytes=config.server.max_body_bytes)
        places = asyncio.Semaphore(concurrency)
        await run_lines(served, store.left(), keep, places, forecast_lines=forecast_lines)


_GCS_FLAG = "--gcs-address="


@contextlib.asynccontextmanager
async def open_backend(
    config: FarsightConfig, stages: Stages
) -> AsyncGenerator[tuple[Generator, PromptEncoder, ForecastLines | None], None]:
    """The backend of one job, the encoder of its model and what forecasts its lines, if its preset reads forecasts.

    Closing it ends every component it started.

    Runs in the job's driver, on the event loop that will send the requests.

    Raises:
        FarsightError: The model cannot be served, or a component did not start.
    """
    site = _own_site(config)
    try:
        ray.init(address=_cluster_address(), namespace=site.namespace, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ServiceFailed(f"the job cannot connect to its own cluster: {error}") from error
    try:
        holder = asyncio.create_task(_hold(create_host(host_of(SUPERVISOR, site.placement), site, 0)))
        await asyncio.to_thread(start_components(site).wait, stages)
        client = await open_client(site)
        try:
            encoder = PromptEncoder(Path(site.model_dir), site.config.model)
            yield client, encoder, line_forecasts(client, encoder)
        finally:
            await client.close()
            holder.cancel()
    finally:
        ray.shutdown()


async def _hold(host: Any) -> None:
    """Keeps the handle exactly as long as the actor lives.

    An actor that is not detached ends with its creator's handle. While that handle exists, the name of a dead actor
    stays taken for the next one.
    """
    with contextlib.suppress(RayError):
        await host.ended.remote()


def _cluster_address() -> str | None:
    """The address of the cluster that runs this job, read from this process's raylet; None if there is no raylet.

    The RAY_ADDRESS that Ray sets for a job may name any cluster on the machine unless ``ray start`` began this one.
    """
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            words: list[str] = process.cmdline()
            for word in words:
                if word.startswith(_GCS_FLAG):
                    return word.removeprefix(_GCS_FLAG)
    return None


def _own_site(config: FarsightConfig) -> Site:
    """Unique names, since other services may run in the cluster, and no detached actor: all end with the job."""
    site = find_site(config, find_model(config))
    return Site(site.config, site.model_dir, site.placement, f"farsight-batch-{uuid.uuid4().hex[:8]}", detached=False)


class Progress:
    """Prints the progress of the batch at a limited rate."""

    def __init__(self, num_lines: int, say: Callable[[str], None]) -> None:
        self._num_lines = num_lines
        self.say = say
        self._next = time.monotonic() + PROGRESS_INTERVAL_S

    def __call__(self, num_done: int, num_failed: int) -> None:
        # The run prints its last line of progress itself.
        if time.monotonic() >= self._next and num_done < self._num_lines:
            self._next = time.monotonic() + PROGRESS_INTERVAL_S
            self.say(self.line(num_done, num_failed))

    def line(self, num_done: int, num_failed: int) -> str:
        return f"farsight batch: {num_done}/{self._num_lines} done, {num_failed} failed"


if __name__ == "__main__":
    end_with_parent()  # If the whole cluster was killed, nothing else ends the job.
    app()
