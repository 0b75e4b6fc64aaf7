"""How a service stops taking requests: messages of ingress replicas, the Supervisor and the launcher."""

from __future__ import annotations

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
