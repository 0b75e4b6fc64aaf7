"""Waits for starting components, reports their progress, and says what a user can do with the started service."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from farsight.actors.calls.message import Asked
from farsight.actors.calls.supervisor import SupervisorCalls
from farsight.actors.runtime.names import SUPERVISOR
from farsight.actors.runtime.peer import Site
from farsight.core.errors import FarsightError
from farsight.core.messages.status import StartState
from farsight.services.launch.cluster import ServiceFailed
from farsight.services.launch.stages import Stages, StartStage
from farsight.services.words import counted

if TYPE_CHECKING:
    from farsight.services.launch.proxy import ProxyStart


LOOK_S = 0.1
"""Seconds between two checks of a start."""

_ANSWER_S = 10.0
_NAMED = 5
"""Most missing hosts that a report names."""

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))
_COMPUTING = ("worker", "rank-")
"""Name prefixes of the hosts that load the model or emulate a device."""

_Watched = list[tuple[StartStage, Callable[[], bool]]]


class StartingComponents:
    """The Supervisor, which begins to start here, and every component that it starts.

    Args:
        host: Handle of the Supervisor's host.
    """

    def __init__(self, site: Site, host: Any) -> None:
        self._site = site
        self._host = host
        self._supervisor = host.add.remote([SUPERVISOR])
        self._started: Asked[None] | None = None
        self._seen: StartState | None = None
        self._told = ""

    def wait(self, stages: Stages, start_proxy: Callable[[], ProxyStart] | None = None) -> None:
        """Waits until every component has started; reports the end of each stage.

        Args:
            start_proxy: Begins to start the HTTP proxy, if there is one, and makes this wait for it too.

        Raises:
            StartTimedOut: The start took longer than ``server.start_patience_s``.
            FarsightError: A component cannot start; the message says why.
        """
        supervisor = stages.begin("Supervisor", lambda: "its process")
        components = stages.begin("Components", lambda: self._awaited(computing=False))
        watched: _Watched = [(supervisor, lambda: self._started is not None)]
        watched.append((components, lambda: self._all_up(components, computing=False)))
        if self._site.config.model.replicas:
            model = stages.begin("Model", self._loading)
            watched.append((model, lambda: self._all_up(model, computing=True)))
        try:
            if start_proxy is not None:
                stage = stages.begin("Proxy", lambda: "the HTTP proxy to listen")
                watched.append((stage, lambda: False))
                proxy = start_proxy()
                watched[-1] = (stage, lambda: proxy.ready(0))
            self._watch(stages, watched)
        finally:
            for stage, _ in watched:
                stages.abandon(stage)

    def _watch(self, stages: Stages, watched: _Watched) -> None:
        while watched:
            self._look()
            self._tell(stages)
            for each in [each for each in watched if each[1]()]:
                watched.remove(each)
                stages.end(each[0])
            for stage, _ in watched:
                stages.check(stage)

    def _tell(self, stages: Stages) -> None:
        """Says, once, what delays this start and no later one."""
        preparing = "" if self._seen is None else self._seen.preparing
        if preparing not in ("", self._told):
            self._told = preparing
            stages.say(f"Model: {preparing}.")

    def supervised(self, wait_s: float | None) -> bool:
        """Returns whether the Supervisor has started; waits at most this long, None for as long as it takes.

        Raises:
            FarsightError, RayError: It cannot start.
        """
        import ray

        if self._started is None and ray.wait([self._supervisor], timeout=wait_s)[0]:
            ray.get(self._supervisor)
            self._started = Asked(self._host, SUPERVISOR, SupervisorCalls.started)
        return self._started is not None

    def _look(self) -> None:
        """Asks the Supervisor; raises a component's own error without the chain of actors it passed through."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            if not self.supervised(LOOK_S) or self._started is None:
                return
            state = Asked(self._host, SUPERVISOR, SupervisorCalls.start_state)
            done, _ = ray.wait([self._started.ref], timeout=LOOK_S)
            ray.get(done)
            self._seen = state.read(ray.get(state.ref, timeout=_ANSWER_S))
        except GetTimeoutError:
            return  # The machine is busy; the last answer still holds.
        except RayTaskError as error:
            if isinstance(error.cause, FarsightError):
                raise error.cause from None
            raise ServiceFailed(f"a component could not start: {error.cause!r}") from error
        except RayError as error:
            raise ServiceFailed(f"the supervisor died while it started: {error}") from error

    def _all_up(self, stage: StartStage, *, computing: bool) -> bool:
        if self._seen is None or self._missing(computing=computing):
            return False
        number = _number(self._seen.ready, computing=computing)
        stage.outcome = f"{number} of {counted(number, 'process')} ready"
        if computing:
            stage.outcome = f"{self._model()}, {stage.outcome}"
        return True

    def _missing(self, *, computing: bool) -> list[str]:
        waiting = () if self._seen is None else self._seen.waiting
        return [host for host in waiting if _computes(host) == computing]

    def _loading(self) -> str:
        seen = self._seen
        if seen is not None and seen.preparing:
            return f"{', '.join(self._missing(computing=True)[:_NAMED])}: {seen.preparing}"
        done = "" if seen is None or seen.loaded is None else f", {100 * seen.loaded:.0f} % loaded"
        return f"{self._awaited(computing=True)} to load {self._model()}{done}"

    def _awaited(self, *, computing: bool) -> str:
        """Such as "router, log-store (3 of 5 processes ready)"."""
        seen = self._seen
        if seen is None:
            return "the Supervisor to answer"
        missing, ready = self._missing(computing=computing), _number(seen.ready, computing=computing)
        named = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        return f"{named} ({ready} of {counted(ready + len(missing), 'process')} ready)"

    def _model(self) -> str:
        config = self._site.config
        if config.engine.profile:
            return f"{config.model.name} (emulated)"
        return f"{config.model.name} ({self._size()})"

    def _size(self) -> str:
        """What the weights take on disk."""
        model = Path(self._site.model_dir)
        files = model.glob("*.safetensors") if model.is_dir() else [model]
        num_bytes = sum(file.stat().st_size for file in files)
        name, unit = next((each for each in _UNITS if num_bytes >= 10 * each[1]), _UNITS[-1])
        return f"{num_bytes / unit:.0f} {name}"


def _computes(host: str) -> bool:
    return host.startswith(_COMPUTING)


def _number(hosts: tuple[str, ...], *, computing: bool) -> int:
    return sum(_computes(host) == computing for host in hosts)


Example = Literal["embedded", "vision", "chat", "text", "embeddings", "scores"]
"""Which request fits the model: one of the two embedded models, one that chats, completes, embeds or compares texts."""

_PICTURE = Path(__file__).parents[1] / "embedded_vision" / "example.png"


def welcome(url: str, model: str, example: Example, key: str) -> list[str]:
    """A request that fits the model, and addresses.

    Args:
        model: Its name.
        key: Words of curl that bring an API key; empty where none is needed.
    """
    path = _PATHS.get(example, "/v1/chat/completions")
    generates = example not in ("embeddings", "scores")
    fields = {"model": model, **(_seeing() if example == "vision" else _EXAMPLES[example])}
    post = f"curl{' -N' if generates else ''} {url}{path} -H 'Content-Type: application/json'{key}"
    body = shlex.quote(json.dumps(fields | ({"stream": True} if generates else {})))
    chat = f"   Chat: {url}/play" if generates else ""
    return [
        f"Try:\n  {post} \\\n    -d {body}",
        f"OpenAI API: {url}/v1   First: curl {url}/v1/models{key}   Stop: Ctrl-C",
        f"Dashboard: {url}/dashboard{chat}",
    ]


def _seeing() -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(_PICTURE.read_bytes()).decode()
    picture = {"type": "image_url", "image_url": {"url": url}}
    question = {"type": "text", "text": "Count each kind."}
    return {"messages": [{"role": "user", "content": [picture, question]}], "temperature": 0}


_EXAMPLES: dict[Example, dict[str, Any]] = {
    "embedded": {
        "messages": [
            {"role": "system", "content": "Write in upper case:"},
            {"role": "user", "content": "hello world"},
        ],
        "temperature": 0,
    },
    "chat": {"messages": [{"role": "user", "content": "Say hello in three languages."}], "max_tokens": 64},
    "text": {"prompt": "Once upon a time", "max_tokens": 32},
    "embeddings": {"input": ["a cat on a mat", "a dog in a bog"]},
    "scores": {"text_1": "Where do cats sleep?", "text_2": ["A cat sleeps on a mat.", "Ships sail on the sea."]},
}
_PATHS: dict[Example, str] = {"text": "/v1/completions", "embeddings": "/v1/embeddings", "scores": "/v1/score"}
"""Paths of the examples that are no chats."""
