"""Runs a batch as a Ray job: on an existing cluster (``--address``), or on a private cluster of this machine.

On a cluster, IN and OUT (and ``--config``, and ``--model`` if it is a directory) must be on a file system that this
machine and the cluster's head node see at the same paths, with locks (``flock``), and Farsight must be installed
there. The job's driver runs on the head node; it alone reads and writes these files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from farsight.core.errors import FarsightError, InvalidValueError
from farsight.engine.checkpoint.catalogue import catalogue
from farsight.services.api.batches.lines import read_batch, read_result
from farsight.services.batch.progress import LOCK_WAIT_S, ProgressStore, partial_path
from farsight.services.launch.signals import INTERRUPTED, StopSignal
from farsight.services.launch.stages import Stages, StartStage

DEFAULT_CONCURRENCY = 64
SUBMIT_WAIT_S = 120.0
"""Seconds to retry a submission: a new or busy cluster accepts no job for a while."""

STOP_WAIT_S = 60.0
"""Seconds that a stopped job may take to end. Ray kills it after 3 s; a busy cluster reports that late."""

UNREACHABLE_S = 60.0
"""Seconds without an answer from the cluster after which the command stops following its job."""

_JOB_MODULE = "farsight.services.batch.job"
_POLL_S = 0.2
_RECONNECT_S = 1.0
_SUCCEEDED = "SUCCEEDED"
_ENDED = (_SUCCEEDED, "FAILED", "STOPPED")

_RAYS_NEWS = re.compile(
    r"(?:\S+ \S+\tINFO job_manager\.py:\d+ -- Runtime env is setting up\.|Running entrypoint for job \S+: .*)\n"
)
"""The lines that Ray writes at the beginning of every job's log."""

Say = Callable[[str], None]
"""Prints a text unchanged; it brings its own line ends."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of the command line besides IN, OUT and the address."""

    model: str | None = None
    config: Path | None = None
    concurrency: int = DEFAULT_CONCURRENCY
    overwrite: bool = False


class JobClient(Protocol):
    """The used part of Ray's ``JobSubmissionClient``; any call may raise ``RuntimeError`` or ``OSError``."""

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]) -> str: ...

    def get_job_info(self, job_id: str) -> Any:
        """The job's ``status`` (a string), ``message`` and ``driver_exit_code`` (None if there was no exit)."""
        ...

    def stop_job(self, job_id: str) -> bool: ...

    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """The log from its beginning, until the job ends."""
        ...


def submit(source: Path, target: Path, address: str | None, options: BatchOptions, say: Say, patience_s: float) -> int:
    """Runs a batch to its end; returns the exit status: 0, the job's own, or 130 after Ctrl-C.

    Args:
        source: IN.
        target: OUT.
        address: Address of a cluster's dashboard, as ``http://host:8265``; None starts a private cluster.
        patience_s: Seconds that the start of a private cluster, up to its first accepted job, may take.

    Raises:
        FarsightError: Input, output or address cannot be used, or the cluster cannot be reached.
    """
    if address is not None and not address.startswith(("http://", "https://")):
        raise InvalidValueError("--address", address, "the address of a cluster's dashboard, as http://host:8265")
    _check(source, target, options.overwrite)
    stop = StopSignal()
    if address is not None:
        stop.running()
        status = submit_entrypoint(connect(address), entrypoint("python", source, target, options), {}, stop, say)
    else:
        status = _submit_locally(entrypoint(sys.executable, source, target, options), stop, say, patience_s)
    if stop.received:
        say(f"Stopped. Finished results are kept in {partial_path(target)}; run the same command again to resume.\n")
    return status


def count_answers(target: Path) -> dict[str, int]:
    """How many lines of a finished output hold an answer, and how many a failure."""
    with target.open("rb") as lines:
        failed = [result.failed for result in map(read_result, lines) if result is not None]
    return {"completed": len(failed) - sum(failed), "failed": sum(failed)}


def entrypoint(python: str, source: Path, target: Path, options: BatchOptions) -> str:
    """The shell command of the job. Its paths are absolute, because Ray picks the job's directory.

    The shell replaces itself by the job, so that the job's parent is the actor that supervises it.
    """
    words = ["exec", python, "-m", _JOB_MODULE, str(source.resolve()), str(target.resolve())]
    words += ["--concurrency", str(options.concurrency)]
    if options.config is not None:
        words += ["--config", str(options.config.resolve())]
    if options.model is not None:
        is_local = options.model not in catalogue() and Path(options.model).exists()  # a directory or a GGUF file
        words += ["--model", str(Path(options.model).resolve()) if is_local else options.model]
    if options.overwrite:
        words.append("--overwrite")
    return shlex.join(words)


def connect(address: str) -> JobClient:
    """A client of the cluster behind a dashboard. Ray's token comes from RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH.

    Raises:
        FarsightError: No cluster answers there, or it requires another token.
    """
    # Imported here: Ray reads those variables as it is imported.
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    # RAY_ADDRESS would win over the argument; this variable wins over both.
    before = os.environ.get("RAY_API_SERVER_ADDRESS")
    os.environ["RAY_API_SERVER_ADDRESS"] = address
    try:
        client: JobClient = JobSubmissionClient(address)
        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # It logs every connection.
    except AuthenticationError as error:
        hint = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file with the cluster's token"
        raise FarsightError(f"the Ray cluster at {address} refuses this user; {hint}") from error
    except (RuntimeError, OSError) as error:
        raise FarsightError(f"no Ray cluster with the Jobs API answers at {address}: {error}") from error
    finally:
        if before is None:
            del os.environ["RAY_API_SERVER_ADDRESS"]
        else:
            os.environ["RAY_API_SERVER_ADDRESS"] = before
    return client


def submit_entrypoint(client: JobClient, command: str, env: Mapping[str, str], stop: StopSignal, say: Say) -> int:
    """Runs a shell command as a job and prints its log; returns its exit status, or 130 once ``stop`` is received.

    Raises:
        FarsightError: The job cannot be submitted, or the cluster cannot be reached any more.
    """
    with _line_stages(say, SUBMIT_WAIT_S).stage("Job", lambda: "the cluster to take it") as stage:
        job_id = submit_job(client, command, env, SUBMIT_WAIT_S)
        stage.outcome = "submitted"
    return follow_job(client, job_id, stop, say)


def submit_job(client: JobClient, command: str, env: Mapping[str, str], patience_s: float) -> str:
    """Submits a shell command, with retries until the cluster accepts it; returns the id of the job.

    Raises:
        FarsightError: The cluster did not accept it in time.
    """
    job_id = f"farsight-batch-{uuid.uuid4().hex[:12]}"
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return client.submit_job(entrypoint=command, submission_id=job_id, runtime_env={"env_vars": dict(env)})
        except (RuntimeError, OSError) as error:
            if _is_known(client, job_id):
                return job_id  # The cluster accepted it; only the answer was lost.
            if time.monotonic() > deadline:
                raise FarsightError(f"the job cannot be submitted: {error}") from error
        time.sleep(_POLL_S)


def follow_job(
    client: JobClient, job_id: str, stop: StopSignal, say: Say, end: Callable[[], None] | None = None
) -> int:
    """Prints the log of a job until it ends; returns its exit status, or 130 once ``stop`` is received.

    Args:
        end: Ends the job after a signal; default: through the Jobs API.

    Raises:
        FarsightError: The cluster cannot be reached any more.
    """
    asyncio.run(_follow(client, job_id, stop, say))
    if stop.received:
        if end is not None:
            end()
        else:
            _stop(client, job_id)
        return INTERRUPTED
    info = _info(client, job_id)
    if info.status == _SUCCEEDED:
        return 0
    code = info.driver_exit_code or 0
    if code > 0:
        return int(code)
    # The job did not end by itself, so its log does not say why.
    reason = f"was ended by signal {-code}" if code else f"is {info.status}: {info.message}"
    say(f"The job {job_id} {reason}\nRun the same command again to resume.\n")
    return 1


def _check(source: Path, target: Path, overwrite: bool) -> None:
    """Checks input and output before a cluster is started; the job itself checks again."""
    with ProgressStore.open(target, read_batch(source), overwrite=overwrite, lock_wait_s=LOCK_WAIT_S) as store:
        store.remove_if_empty()


def _line_stages(say: Say, patience_s: float) -> Stages:
    return Stages(lambda line: say(f"farsight batch: {line}\n"), patience_s)


def _submit_locally(command: str, stop: StopSignal, say: Say, patience_s: float) -> int:
    from farsight.services.launch.cluster import private_cluster

    say("Starting a private Ray cluster.\n")
    stages = _line_stages(say, patience_s)
    with private_cluster(stop, stages=stages, dashboard=True) as cluster:
        with stages.stage("Job", lambda: "Ray to take it") as stage:
            client = _connect_patiently(cluster.dashboard_url, stages, stage)
            job_id = submit_job(client, command, {}, stages.remaining_s)
            stage.outcome = "submitted"
        stop.running()
        try:
            return follow_job(client, job_id, stop, say, _end_drivers)
        except FarsightError:
            if not stop.received:
                raise
            return INTERRUPTED  # The signal also ends the cluster, and the job ends with it.


def _connect_patiently(address: str, stages: Stages, stage: StartStage) -> JobClient:
    """The dashboard of a cluster that has just started may not answer yet."""
    while True:
        try:
            return connect(address)
        except FarsightError as error:
            if stages.remaining_s <= 0:
                raise stages.timed_out(stage) from error
        time.sleep(_POLL_S)


def _end_drivers() -> None:
    """Ends the job of a private cluster.

    It does not use the Jobs API: Ctrl-C also reaches the dashboard, which then leaves such a call without an answer.
    """
    drivers = [each for each in psutil.Process().children(recursive=True) if _is_driver(each)]
    for driver in drivers:
        with suppress(psutil.NoSuchProcess):
            driver.kill()  # The progress is on disk; a request whose line this tears runs again.
    psutil.wait_procs(drivers, timeout=STOP_WAIT_S)


def _is_driver(process: psutil.Process) -> bool:
    try:
        return _JOB_MODULE in process.cmdline()
    except psutil.Error:
        return False


async def _follow(client: JobClient, job_id: str, stop: StopSignal, say: Say) -> None:
    """Prints the log until the job has ended or ``stop`` is received."""
    log = _Log(say)
    tail = asyncio.create_task(_tail(client, job_id, log))
    while not stop.received and not tail.done():
        await asyncio.wait((tail,), timeout=_POLL_S)
    if not tail.done():
        tail.cancel()
        with suppress(asyncio.CancelledError):
            await tail
    log.flush()
    if not tail.cancelled():
        tail.result()


class _Log:
    """Prints a log without the lines that Ray puts at its beginning."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._held: str | None = ""

    def add(self, text: str) -> None:
        if self._held is None:
            self._say(text)
            return
        self._held += text
        while news := _RAYS_NEWS.match(self._held):
            self._held = self._held[news.end() :]
        if "\n" in self._held:
            self.flush()

    def flush(self) -> None:
        """From here on, all lines are the job's."""
        if self._held:
            self._say(self._held)
        self._held = None


async def _tail(client: JobClient, job_id: str, log: _Log) -> None:
    """Follows the log over reconnects; each connection begins with the whole log, and the known part is skipped.

    Raises:
        FarsightError: The cluster has not answered for ``UNREACHABLE_S``.
    """
    from aiohttp import ClientError

    num_said = 0
    last_answer = time.monotonic()
    while True:
        try:
            num_read = 0
            async for text in client.tail_job_logs(job_id):
                last_answer = time.monotonic()
                log.add(text[max(0, num_said - num_read) :])
                num_read += len(text)
                num_said = max(num_said, num_read)
            if (await asyncio.to_thread(client.get_job_info, job_id)).status in _ENDED:
                return
            last_answer = time.monotonic()
        except (RuntimeError, OSError, ClientError) as error:
            if time.monotonic() - last_answer > UNREACHABLE_S:
                hint = f"the job {job_id} may still be running there; run the same command again to resume"
                raise FarsightError(f"no answer from the cluster for {UNREACHABLE_S:g} s ({error}); {hint}") from error
        await asyncio.sleep(_RECONNECT_S)


def _stop(client: JobClient, job_id: str) -> None:
    """Stops a job and waits until it has ended, so that the next run can take its lock.

    Raises:
        FarsightError: The job did not end; the cluster may be gone, or the job may still be running.
    """
    deadline = time.monotonic() + STOP_WAIT_S
    try:
        client.stop_job(job_id)
        while client.get_job_info(job_id).status not in _ENDED:
            if time.monotonic() > deadline:
                raise FarsightError(f"the job {job_id} has not stopped within {STOP_WAIT_S:g} s")
            time.sleep(_POLL_S)
    except (RuntimeError, OSError) as error:
        raise FarsightError(f"the job {job_id} cannot be stopped: {error}") from error


def _is_known(client: JobClient, job_id: str) -> bool:
    try:
        client.get_job_info(job_id)
    except (RuntimeError, OSError):
        return False
    return True


def _info(client: JobClient, job_id: str) -> Any:
    try:
        return client.get_job_info(job_id)
    except (RuntimeError, OSError) as error:
        raise FarsightError(f"the job {job_id} has ended, but its status is unknown: {error}") from error
