"""How a service stops taking requests, and how its replicas change their weights: messages of the Supervisor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IngressReport:
    """Ingress replica -> Supervisor, twice a second.

    Attributes:
        num_open: Requests to generate that have come in and are not fully answered.
        is_draining: Whether the ingress replica refuses new requests.
        model_version: Version of the weights that new requests run on.
        oldest_version: The lowest version of an open request, or ``model_version``.
    """

    ingress_id: str
    num_open: int
    is_draining: bool
    model_version: int = 0
    oldest_version: int = 0


@dataclass(frozen=True, slots=True)
class IngressOrders:
    """The answer to an ``IngressReport``.

    Attributes:
        drain_s: Seconds after which open requests end with an error; None as long as the service does not drain.
        model_version: Version of the weights for new requests.
        oldest_version: Open requests of lower versions are ended with an error.
        switch_in_s: Seconds until new requests run on this version: the same instant at all ingress replicas, though
            they hear of it one after the other.
        limits: Settings of ``[server]`` that differ from the start's, by section, as JSON.
    """

    drain_s: float | None = None
    model_version: int = 0
    oldest_version: int = 0
    switch_in_s: float = 0.0
    limits: str = "{}"


@dataclass(frozen=True, slots=True)
class DrainService:
    """Launcher -> Supervisor, again and again while the service drains.

    Attributes:
        drain_s: Seconds that open requests still have.
        num_ingress: Ingress replicas that there should be.
    """

    drain_s: float
    num_ingress: int


@dataclass(frozen=True, slots=True)
class DrainReplica:
    """Ingress replica -> Supervisor: takes a replica out, or takes it back.

    Attributes:
        cancel: Whether it is to take requests again.
    """

    replica: str
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The answer to a ``DrainService``.

    Attributes:
        num_open: Requests that have not ended, as far as is known.
        is_over: Whether every ingress replica refuses new requests and has none open.
    """

    num_open: int
    is_over: bool


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Ingress replica -> Supervisor: replaces the weights of all replicas, or the settings of their workers, or both.

    Attributes:
        model_dir: Directory of the new model; its tokenizer files are those of the running one. Empty: the running one.
        surge: Whether one more replica runs meanwhile, so that new requests never wait.
        drain_s: Seconds that the last requests on the old weights may take; the rest ends with an error.
        settings: Tables of a configuration file as JSON; empty for none.
    """

    model_dir: str
    surge: bool = True
    drain_s: float = 600.0
    settings: str = ""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """From the Supervisor.

    Attributes:
        version: Number of the weights that new requests run on; 0 for the weights that the service started with.
        model_dir: Directory of these weights.
    """

    version: int
    model_dir: str


@dataclass(frozen=True, slots=True)
class WeightsState:
    """The state that a Supervisor leaves to its successor.

    Attributes:
        dirs: Model directory of each version in use.
        num_versions: Versions so far; numbers of upgrades that failed are not used again.
        version_of: The version of each replica that does not run ``current``.
        current: Version of new requests.
        oldest: Lowest version whose requests may run; requests of lower versions are ended.
        target: Version that all replicas are to run; ``current`` if no upgrade is under way.
        surge: The additional replica while an upgrade is under way; empty for none.
        drain_s: As of ``Upgrade``.
        since: When every request on other weights had come in, in seconds since the epoch; 0 if there was none.
        since_of_current: Whether ``since`` is known for the current version.
        settings: For each version in use, its settings that differ from the start's, by section, as JSON.
        renewed: Kinds of components of the whole service that start again once new requests run on ``target``.
    """

    dirs: tuple[tuple[int, str], ...]
    version_of: tuple[tuple[str, int], ...] = ()
    current: int = 0
    oldest: int = 0
    target: int = 0
    surge: str = ""
    drain_s: float = 0.0
    since: float = 0.0
    since_of_current: bool = True
    num_versions: int = 1
    settings: tuple[tuple[int, str], ...] = ()
    renewed: tuple[str, ...] = ()

    def of(self, replica: str) -> int:
        """Returns the version that a replica runs."""
        return dict(self.version_of).get(replica, self.current)

    def dir_of(self, version: int) -> str:
        return dict(self.dirs)[version]

    def settings_of(self, version: int) -> str:
        return dict(self.settings).get(version, "{}")

    def with_settings(self, settings: str, renewed: tuple[str, ...]) -> WeightsState:
        """Returns the state with these settings for the current version; no replica starts again."""
        changed = tuple((dict(self.settings) | {self.current: settings}).items())
        return dataclasses.replace(self, settings=changed, renewed=renewed)

    def with_replica(self, replica: str, version: int) -> WeightsState:
        """Returns the state in which the replica runs that version from its next start on."""
        return dataclasses.replace(self, version_of=tuple((dict(self.version_of) | {replica: version}).items()))

    def begun(
        self,
        model_dir: str,
        settings: str,
        replicas: Iterable[str],
        surge: str,
        drain_s: float,
        renewed: tuple[str, ...] = (),
    ) -> WeightsState:
        """Returns the state of an upgrade of these replicas that begins; an empty ``model_dir`` keeps the weights."""
        target = self.num_versions
        version_of = dict.fromkeys(replicas, self.current) | ({surge: target} if surge else {})
        return dataclasses.replace(
            self,
            dirs=(*self.dirs, (target, model_dir or self.dir_of(self.current))),
            settings=(*self.settings, (target, settings)),
            num_versions=target + 1,
            version_of=tuple(version_of.items()),
            target=target,
            surge=surge,
            drain_s=drain_s,
            since_of_current=not model_dir,
            renewed=renewed,
        )

    def ended(self) -> WeightsState:
        """Returns the state in which all replicas run the current version and no other is in use."""
        return dataclasses.replace(
            self,
            dirs=((self.current, self.dir_of(self.current)),),
            settings=((self.current, self.settings_of(self.current)),),
            version_of=(),
            oldest=self.current,
            target=self.current,
            surge="",
            since_of_current=True,
            renewed=(),
        )
