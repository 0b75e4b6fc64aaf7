"""What a start says of itself, and of a model that loads. The clock is made up, but for how often something is said."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from farsight.actors.runtime.peer import Site
from farsight.core.config.load import load_config
from farsight.core.messages.status import ProcessUse, StartState
from farsight.services.launch.stages import Stages, StartTimedOut
from farsight.services.launch.starting import StartingComponents
from farsight.services.process_use import own_processes
from farsight.services.progress import StatusLine

LONG_S = 240.0


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_line_for_each_stage_with_its_time(clock: Clock) -> None:
    said: list[str] = []
    stages = Stages(said.append, 60, now=clock)
    with stages.stage("Ray", lambda: "its daemons"):
        clock.s += 4.2
    model, proxy = stages.begin("Model", lambda: ""), stages.begin("Proxy", lambda: "")
    clock.s += 1
    stages.end(proxy)
    clock.s += 2
    model.outcome = "tiny (2 MiB), loaded"
    stages.end(model)
    assert said == [
        "Ray: started after 4.2 s.",
        "Proxy: started after 1.0 s.",
        "Model: tiny (2 MiB), loaded after 3.0 s.",
    ]
    assert (stages.elapsed_s, stages.remaining_s) == pytest.approx((7.2, 52.8))
    with pytest.raises(ValueError), stages.stage("Ray", lambda: "its daemons"):
        raise ValueError
    assert len(said) == 3, "a stage that fails says nothing"


def test_a_stage_that_takes_long_says_so_again_and_again(clock: Clock) -> None:
    twice, said = threading.Event(), []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            twice.set()

    stages = Stages(say, 60, every_s=0.01, now=clock)
    clock.s += 20
    with stages.stage("Model", lambda: "worker-0 to load tiny (2 MiB)"):
        assert twice.wait(LONG_S)
    *while_waiting, last = said
    assert set(while_waiting) == {"Model: not ready after 0 s; waits for worker-0 to load tiny (2 MiB)."}
    assert last == "Model: started after 0.0 s."


def test_each_stage_says_which_processes_spent_how_much(clock: Clock) -> None:
    used: tuple[ProcessUse, ...]
    used = (ProcessUse(1, "farsight", 1.0, 0), ProcessUse(2, "raylet", 0.5, 0), ProcessUse(4, "agent", 2.0, 0))
    said: list[str] = []
    stages = Stages(said.append, 60, uses=lambda: used, now=clock)
    with stages.stage("Ray", lambda: "its daemons"):
        used = (
            *(ProcessUse(1, "farsight", 3.5, 0), ProcessUse(2, "raylet", 0.52, 0)),
            *(ProcessUse(3, "ServeController", 2.0, 0), ProcessUse(4, "ended", 0.0, 0)),
        )
    stages.say_use("Start")
    assert said == [
        "Ray: started after 0.0 s.",
        "Ray: 4.5 processor seconds (farsight 2.5, ServeController 2.0).",
        "Start: 6.0 processor seconds (farsight 3.5, ServeController 2.0, raylet 0.5).",
    ]


def test_the_processes_of_a_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        used = {each.pid: each for each in own_processes()}
        assert used[os.getpid()].name == "farsight" and used[os.getpid()].cpu_s > 0
        assert used[child.pid].name.startswith("python")
        child.communicate(b"\n")


def test_a_terminal_has_one_line_that_is_rewritten(clock: Clock) -> None:
    said: list[str] = []
    terminal = io.StringIO()
    stages = Stages(said.append, 60, line=StatusLine(terminal, lambda: 60), now=clock)
    waits = "worker-0 to load tiny (2 MiB)"
    model, proxy = stages.begin("Model", lambda: waits), stages.begin("Proxy", lambda: "the HTTP proxy to listen")
    clock.s += 12
    waits = "worker-0: compiling kernels for this processor, once"
    stages.end(proxy)
    with stages.above():
        terminal.write("a line of the log\n")
    clock.s += 30
    stages.end(model)
    stages.abandon(model)
    assert not said
    shown = terminal.getvalue().split("\r\x1b[K")
    compiling = f"{f'12 s, Model: waits for {waits}'[:56]}..."
    assert "0 s, Model: waits for worker-0 to load tiny (2 MiB)" in shown
    assert shown[-4:] == [compiling, "a line of the log\n", compiling, ""]
    stages.say("Ready")
    assert said == ["Ready"] and stages.summary == " (Proxy 12.0 s, Model 42.0 s)"


def test_patience_ends(clock: Clock) -> None:
    stages = Stages(lambda line: None, 60, now=clock)
    stage = stages.begin("Proxy", lambda: "the HTTP proxy to listen")
    clock.s += 59
    stages.check(stage)
    clock.s += 1
    with pytest.raises(StartTimedOut, match=r"^Proxy: not ready 60 s after .*; it waits for the HTTP proxy to listen$"):
        stages.check(stage)
    stages.abandon(stage)


@pytest.mark.parametrize(
    ("num_bytes", "loaded", "said"),
    [
        (13 << 30, None, "tiny (13 GiB)"),
        (13 << 30, 0.404, "tiny (13 GiB), 40 % loaded"),
        (2 << 30, 0.0, "tiny (2048 MiB), 0 % loaded"),
    ],
)
def test_what_a_slow_model_waits_for(tmp_path: Path, num_bytes: int, loaded: float | None, said: str) -> None:
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", num_bytes)  # takes no room on the disk
    config = load_config(None, {"model": {"name": "tiny"}})
    handle = SimpleNamespace(add=SimpleNamespace(remote=lambda names: None))
    starting = StartingComponents(Site(config, str(tmp_path), "fused"), handle)
    starting._seen = StartState(("router",), ("worker-0",), loaded)
    assert starting._loading() == f"worker-0 (0 of 1 process ready) to load {said}"
    starting._seen = StartState(("router",), ("worker-0",), 1.0, "compiling kernels for this processor, once")
    assert starting._loading() == "worker-0: compiling kernels for this processor, once"
    told: list[str] = []
    for _ in range(2):
        starting._tell(Stages(told.append, 60))
    assert told == ["Model: compiling kernels for this processor, once."]
