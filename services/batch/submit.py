"""Runs a batch as a Ray job: on a cluster that is there (``--address``), or on a private one of this machine.

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

from core.errors import FarsightError, InvalidValueError
from services.batch.lines import read_batch
from services.batch.progress import ProgressStore, partial_path
from services.batch.runner import DEFAULT_CONCURRENCY
from services.launch.signals import INTERRUPTED, StopSignal
from services.launch.stages import Stage, Stages

SUBMIT_WAIT_S = 120.0
"""A cluster that has just started, or is busy, takes no job for a while."""

LOCK_WAIT_S = 10.0
"""How long the end of a run that was killed a moment ago is waited for."""

STOP_WAIT_S = 60.0
"""How long a job that was told to stop may take. Ray kills it after three seconds; a busy cluster is late to say so."""

UNREACHABLE_S = 60.0
"""After so long without an answer from the cluster its job is no longer followed."""

_JOB_MODULE = "services.batch.job"
_POLL_S = 0.2
_RECONNECT_S = 1.0
_SUCCEEDED = "SUCCEEDED"
_ENDED = (_SUCCEEDED, "FAILED", "STOPPED")

_RAYS_NEWS = re.compile(
    r"(?:\S+ \S+\tINFO job_manager\.py:\d+ -- Runtime env is setting up\.|Running entrypoint for job \S+: .*)\n"
)
"""What Ray writes at the beginning of every job's log."""

Say = Callable[[str], None]
"""Prints a text as it is; line ends are the text's own."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What the command line says besides IN, OUT and the address."""

    model: str | None = None
    config: Path | None = None
    concurrency: int = DEFAULT_CONCURRENCY
    overwrite: bool = False


class JobClient(Protocol):
    """What is used of Ray's ``JobSubmissionClient``; any call may raise ``RuntimeError`` or ``OSError``."""

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]) -> str: ...

    def get_job_info(self, job_id: str) -> Any:
        """Has ``status`` (a string), ``message`` and ``driver_exit_code`` (None if there was no exit)."""
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
        address: Of a cluster's dashboard, as ``http://host:8265``; None starts a private cluster.
        patience_s: How long that may take, and until it takes a job.

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
        say(f"Stopped. What is done is kept in {partial_path(target)}; the same command goes on from there.\n")
    return status


def entrypoint(python: str, source: Path, target: Path, options: BatchOptions) -> str:
    """The shell command of the job. Its paths are absolute: the job starts in a directory of Ray's choice.

    The shell hands its process over, so that the parent of the job is the actor that watches over it.
    """
    words = ["exec", python, "-m", _JOB_MODULE, str(source.resolve()), str(target.resolve())]
    words += ["--concurrency", str(options.concurrency)]
    if options.config is not None:
        words += ["--config", str(options.config.resolve())]
    if options.model is not None:
        is_directory = Path(options.model).is_dir()
        words += ["--model", str(Path(options.model).resolve()) if is_directory else options.model]
    if options.overwrite:
        words.append("--overwrite")
    return shlex.join(words)


def connect(address: str) -> JobClient:
    """A client of the cluster behind a dashboard. Ray's token comes from RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH.

    Raises:
        FarsightError: Nothing answers there, or it wants another token.
    """
    # Imported here: Ray reads those variables as it is imported.
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    # RAY_ADDRESS would win over the argument; this variable wins over both.
    before = os.environ.get("RAY_API_SERVER_ADDRESS")
    os.environ["RAY_API_SERVER_ADDRESS"] = address
    try:
        client: JobClient = JobSubmissionClient(address)
        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # it tells of every connection
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
        FarsightError: The job cannot be submitted, or the cluster is gone.
    """
    with _line_stages(say, SUBMIT_WAIT_S).stage("Job", lambda: "the cluster to take it") as stage:
        job_id = submit_job(client, command, env, SUBMIT_WAIT_S)
        stage.outcome = "submitted"
    return follow_job(client, job_id, stop, say)


def submit_job(client: JobClient, command: str, env: Mapping[str, str], patience_s: float) -> str:
    """Submits a shell command, again and again until the cluster takes it; returns the id of the job.

    Raises:
        FarsightError: It has not for so long.
    """
    job_id = f"farsight-batch-{uuid.uuid4().hex[:12]}"
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return client.submit_job(entrypoint=command, submission_id=job_id, runtime_env={"env_vars": dict(env)})
        except (RuntimeError, OSError) as error:
            if _is_known(client, job_id):
                return job_id  # it was taken, only the answer was lost
            if time.monotonic() > deadline:
                raise FarsightError(f"the job cannot be submitted: {error}") from error
        time.sleep(_POLL_S)


def follow_job(
    client: JobClient, job_id: str, stop: StopSignal, say: Say, end: Callable[[], None] | None = None
) -> int:
    """Prints the log of a job until it ends; returns its exit status, or 130 once ``stop`` is received.

    Args:
        end: How the job is ended then; through the Jobs API if not given.

    Raises:
        FarsightError: The cluster is gone.
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
    # It did not end by itself: its log does not say why.
    reason = f"was ended by signal {-code}" if code else f"is {info.status}: {info.message}"
    say(f"The job {job_id} {reason}\nThe same command goes on from what is kept.\n")
    return 1


def _check(source: Path, target: Path, overwrite: bool) -> None:
    """Finds what is wrong before a cluster is started for it; the job itself checks again."""
    with ProgressStore.open(target, read_batch(source), overwrite=overwrite, lock_wait_s=LOCK_WAIT_S) as store:
        store.remove_if_empty()


def _line_stages(say: Say, patience_s: float) -> Stages:
    return Stages(lambda line: say(f"farsight batch: {line}\n"), patience_s)


def _submit_locally(command: str, stop: StopSignal, say: Say, patience_s: float) -> int:
    from services.launch.cluster import private_cluster

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
            return INTERRUPTED  # the signal has ended the cluster as well, and the job ends with it


def _connect_patiently(address: str, stages: Stages, stage: Stage) -> JobClient:
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

    Not through the Jobs API: Ctrl-C reaches the dashboard as well, which then leaves such a call without an answer.
    """
    drivers = [each for each in psutil.Process().children(recursive=True) if _is_driver(each)]
    for driver in drivers:
        with suppress(psutil.NoSuchProcess):
            driver.kill()  # progress is on disk; a line torn by this runs again
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
    """Prints a log without Ray's own news at its beginning."""

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
        """From here on everything is the job's."""
        if self._held:
            self._say(self._held)
        self._held = None


async def _tail(client: JobClient, job_id: str, log: _Log) -> None:
    """A connection that breaks is made again; each begins with the whole log, of which the known part is skipped.

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
                hint = f"the job {job_id} may be running there still; the same command goes on from what is kept"
                raise FarsightError(f"no answer from the cluster for {UNREACHABLE_S:g} s ({error}); {hint}") from error
        await asyncio.sleep(_RECONNECT_S)


def _stop(client: JobClient, job_id: str) -> None:
    """Ends a job and waits until it has ended, so that the next run finds its lock free.

    Raises:
        FarsightError: It has not; the cluster may be gone, or the job may be running still.
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
        raise FarsightError(f"the job {job_id} has ended, but the cluster does not say how: {error}") from error
