"""Submission against a scripted Jobs API, the entry point of the job, how it finds its cluster, and the command; Ray
itself is not started."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from farsight.core.config.load import FarsightConfig
from farsight.core.errors import FarsightError
from farsight.services.api.backend import Generator
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.batch import job, submit
from farsight.services.batch.progress import ProgressStore, partial_path
from farsight.services.batch.submit import BatchOptions, entrypoint, submit_entrypoint
from farsight.services.cli import app as cli
from farsight.services.launch.stages import Stages
from tests.command_line import CliRunner
from tests.unit.services.api.api_support import ScriptedBackend, write_model_dir
from tests.unit.services.batch.batch_support import echo, numbered, read_output, request, write_batch


class Stop:
    """As ``StopSignal``, without touching the signals of the test process."""

    def __init__(self) -> None:
        self.received = False

    def running(self) -> None:
        pass


@dataclass
class Info:
    status: str = "RUNNING"
    message: str = ""
    driver_exit_code: int | None = None


@dataclass
class FakeClient:
    """Plays one connection to the log after another; an exception in one breaks it."""

    logs: list[list[str | Exception]]
    end: Info
    stop: Stop | None = None
    submitted: list[dict[str, Any]] = field(default_factory=list)
    info: Info = field(default_factory=Info)
    stopped: list[str] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)
    takes_refused: bool = False

    def submit_job(self, **options: Any) -> str:
        if self.refusals and not self.takes_refused:
            raise self.refusals.pop()
        self.submitted.append(options)
        if self.refusals:
            raise self.refusals.pop()
        return str(options["submission_id"])

    def get_job_info(self, job_id: str) -> Info:
        if not self.submitted:
            raise RuntimeError(f"{job_id} does not exist")
        return self.info

    def stop_job(self, job_id: str) -> bool:
        self.stopped.append(job_id)
        self.info = self.end
        return True

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for text in self.logs.pop(0):
            if isinstance(text, Exception):
                raise text
            yield text
        if self.stop is not None:
            self.stop.received = True  # as a signal would, while the log is silent
            await asyncio.Event().wait()
        self.info = self.end


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_RECONNECT_S", 0.01)
    monkeypatch.setattr(submit, "_POLL_S", 0.01)
    monkeypatch.setattr(submit, "StopSignal", Stop)


def _submit(client: FakeClient) -> tuple[int, str]:
    said: list[str] = []
    stop: Any = client.stop or Stop()
    status = submit_entrypoint(client, "echo hi", {"A": "1"}, stop, said.append)
    submitted, *rest = said
    assert submitted.startswith("farsight batch: Job: submitted after ")
    return status, "".join(rest)


def test_what_ray_writes_into_every_log_is_left_out() -> None:
    news = "2026-11-21 03:37:51,282\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
    entry = "Running entrypoint for job job-1: exec python -m farsight.services.batch.job a b\n"
    logs: list[list[str | Exception]] = [[news + entry[:9], entry[9:], "one\n" + entry, "no end"]]
    assert _submit(FakeClient(logs, Info("SUCCEEDED"))) == (0, f"one\n{entry}no end")
    assert _submit(FakeClient([[entry, "no end"]], Info("SUCCEEDED"))) == (0, "no end")
    assert _submit(FakeClient([["no env\n", entry]], Info("SUCCEEDED"))) == (0, f"no env\n{entry}")


@pytest.mark.parametrize("taken", [False, True])
def test_cluster_that_does_not_take_the_job_is_asked_again_but_never_given_it_twice(taken: bool) -> None:
    lost, no_agent = OSError("the answer was lost"), RuntimeError("no agent")
    client = FakeClient([["one\n"]], Info("SUCCEEDED"), refusals=[lost] if taken else [no_agent, lost])
    client.takes_refused = taken
    assert _submit(client) == (0, "one\n")
    assert len(client.submitted) == 1


def test_cluster_that_takes_no_job_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "SUBMIT_WAIT_S", 0.05)
    client = FakeClient([], Info(), refusals=[RuntimeError("no agent") for _ in range(100)])
    with pytest.raises(FarsightError, match="the job cannot be submitted: no agent"):
        _submit(client)


def test_failure_has_the_status_of_the_job() -> None:
    assert _submit(FakeClient([["bad\n"]], Info("FAILED", "exit code 3", 3))) == (3, "bad\n")


@pytest.mark.parametrize(("code", "reason"), [(None, "is FAILED: it died"), (-9, "was ended by signal 9")])
def test_job_that_did_not_end_by_itself_is_explained(code: int | None, reason: str) -> None:
    client = FakeClient([[]], Info("FAILED", "it died", code))
    status, said = _submit(client)
    (submitted,) = client.submitted
    job_id = submitted.pop("submission_id")
    assert job_id.startswith("farsight-batch-")
    assert submitted == {"entrypoint": "echo hi", "runtime_env": {"env_vars": {"A": "1"}}}
    assert status == 1
    assert said == f"The job {job_id} {reason}\nRun the same command again to resume.\n"


def test_broken_connection_is_made_again_and_nothing_is_said_twice() -> None:
    logs: list[list[str | Exception]] = [
        ["one\n", "tw", RuntimeError("closed")],
        [OSError("no")],
        ["one\ntwo\nthree\n"],
    ]
    assert _submit(FakeClient(logs, Info("SUCCEEDED"))) == (0, "one\ntwo\nthree\n")


def test_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "UNREACHABLE_S", 0.05)
    client = FakeClient([[OSError("refused")] for _ in range(100)], Info())
    with pytest.raises(FarsightError, match=r"no answer from the cluster for 0\.05 s \(refused\)"):
        _submit(client)


def test_job_that_will_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "STOP_WAIT_S", 0.05)
    with pytest.raises(FarsightError, match=r"has not stopped within 0\.05 s"):
        _submit(FakeClient([[]], Info("RUNNING"), stop=Stop()))


def test_entrypoint_has_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    plain = entrypoint("python", Path("in.jsonl"), Path("out.jsonl"), BatchOptions(model="org/name"))
    assert plain == (
        f"exec python -m farsight.services.batch.job {tmp_path}/in.jsonl {tmp_path}/out.jsonl"
        " --concurrency 64 --model org/name"
    )
    options = BatchOptions("my model", Path("my.toml"), 5, overwrite=True)
    words = shlex.split(entrypoint("python", Path("in.jsonl"), Path("out.jsonl"), options))
    more = ["--config", f"{tmp_path}/my.toml", "--model", f"{tmp_path}/my model", "--overwrite"]
    assert words[6:] == ["--concurrency", "5", *more]


def test_interrupt_stops_the_job_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, stop = numbered(tmp_path / "in.jsonl", 3).path, tmp_path / "out.jsonl", Stop()
    client = FakeClient([["one\n"]], Info("STOPPED"), stop=stop)
    monkeypatch.setattr(submit, "connect", lambda address: client)
    monkeypatch.setattr(submit, "StopSignal", lambda: stop)
    result = CliRunner().invoke(cli, ["batch", str(source), str(target), "--address", "http://there:8265"])
    assert result.exit_code == 130
    assert client.stopped == [client.submitted[0]["submission_id"]]
    kept = f"Finished results are kept in {partial_path(target)}; run the same command again to resume."
    assert "one\n" in result.stdout and kept in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--address", "there:8265"], "--address: got 'there:8265', expected the address of a cluster's dashboard"),
        (["--config", "none.toml"], "--config: got 'none.toml', expected a readable TOML file"),
        (["--address", "http://127.0.0.1:1"], "no Ray cluster with the Jobs API answers at http://127.0.0.1:1"),
        ([], "{source} line 2, custom_id: got 'a'"),
    ],
)
def test_errors_of_the_command(tmp_path: Path, words: list[str], message: str) -> None:
    source = write_batch(tmp_path / "in.jsonl", [request("a"), request("b" if words else "a")])
    result = CliRunner().invoke(cli, ["batch", str(source), str(tmp_path / "out.jsonl"), *words])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"farsight: {message.format(source=source)}")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedBackend:
    backend = ScriptedBackend(echo)
    encoder = PromptEncoder(write_model_dir(tmp_path / "model"))

    @asynccontextmanager
    async def open_backend(
        config: FarsightConfig, stages: Stages
    ) -> AsyncGenerator[tuple[Generator, PromptEncoder, None], None]:
        yield backend, encoder, None

    monkeypatch.setattr(job, "open_backend", open_backend)
    return backend


def test_job_from_beginning_to_end(tmp_path: Path, backend: ScriptedBackend) -> None:
    target = tmp_path / "out.jsonl"
    requests = [request("a", prompt=[0, 5]), request("b", temperature=-1), request("c", prompt=[0, 6])]
    source = write_batch(tmp_path / "in.jsonl", requests)
    result = CliRunner().invoke(job.app, [str(source), str(target), "--concurrency", "2"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "farsight batch: 3 requests to run, 2 at once; the model is starting",
        f"farsight batch: 3/3 done, 1 failed; the answers are in {target}",
    ]
    assert [line["response"]["status_code"] for line in read_output(target)] == [200, 400, 200]

    again = CliRunner().invoke(job.app, [str(source), str(target)])
    assert again.exit_code == 1
    assert again.stderr.startswith(f"farsight: OUT {target}: got 'an existing file'")
    assert len(backend.calls) == 2


def test_job_goes_on_and_needs_no_backend_when_all_is_done(
    tmp_path: Path, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    run = (numbered(tmp_path / "in.jsonl", 3).path, target, FarsightConfig(), 2, False)
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(ProgressStore, "finish", lambda store: (_ for _ in ()).throw(FarsightError("ended")))
        with pytest.raises(FarsightError, match="ended"):
            job.run_job(*run, said.append)
    job.run_job(*run, said.append)
    assert len(backend.calls) == 3
    assert said == [
        "farsight batch: 3 requests to run, 2 at once; the model is starting",
        "farsight batch: resumes with 3/3 done",
        f"farsight batch: 3/3 done, 0 failed; the answers are in {target}",
    ]


def test_progress_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = job.Progress(500, said.append)
    for num_done in range(0, 500, 10):
        now += 1.0
        progress(num_done, num_done // 100)
    assert said[:2] == ["farsight batch: 40/500 done, 0 failed", "farsight batch: 90/500 done, 0 failed"]
    assert len(said) == 10


class Process:
    """What ``psutil`` says of one: without words, its command line is hidden."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def cmdline(self) -> list[str]:
        if not self._words:
            raise psutil.AccessDenied
        return list(self._words)

    def parents(self) -> list[Process]:
        return [Process("ray::JobSupervisor"), self, Process("/sbin/init")]


@pytest.mark.parametrize(
    ("raylet", "address"),
    [
        (Process("/x/raylet", "--worker=python --gcs-address=no", "--gcs-address=127.0.0.1:7"), "127.0.0.1:7"),
        (Process("bash"), None),
        (Process(), None),
    ],
)
def test_the_raylet_above_the_job_knows_its_cluster(
    monkeypatch: pytest.MonkeyPatch, raylet: Process, address: str | None
) -> None:
    monkeypatch.setattr(psutil, "Process", lambda: raylet)
    assert job._cluster_address() == address


def test_each_job_has_names_of_its_own_that_end_with_it() -> None:
    one, other = job._own_site(FarsightConfig()), job._own_site(FarsightConfig())
    assert one.namespace != other.namespace
    assert not one.detached
