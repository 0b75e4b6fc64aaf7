"""The configuration of our HAProxy, and the proxies' own errors in the shape of the OpenAI API."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farsight.services.proxy.timed_http import ConnectionLimits

CHECK_PATH = "/-/healthz"
"""What HAProxy asks the ingress replicas for, at their liveness ports."""

HEALTH_PATH = "/health"
READY_PATH = "/health/ready"
LIVENESS_FOLDER = "liveness"
"""Subdirectory of HAProxy's files: a file for each ingress replica, named by its id, that holds its liveness port."""

TLS_FILE = "tls.pem"
"""File of HAProxy's directory with certificate chain and private key."""

SOCKET_FILE = "admin.sock"
CLIENT_HEADER = "X-Farsight-Client"

INGRESS_BACKEND = "ingress"
_HEALTH_BACKEND = "health"

_CONNECT_S = 30
"""Time limit of a connection to an ingress replica; in a burst it waits in the replica's accept queue."""

SILENCE_S = 3600.0
"""Default of ``FrontendSettings.silence_s``."""

_MESSAGES = {
    400: "The request is not valid HTTP.",
    408: "The request did not arrive within the time limit.",
    429: "Your address has too many connections open.",
    500: "The server failed to process the request; its log has the details.",
    502: "The server closed the connection before it answered. The request may be sent again.",
    503: "No ingress replica accepts requests now. The request may be sent again.",
    504: "The server did not answer within the time limit. The request may be sent again.",
}
_CODES = {400: "bad_request", 408: "request_timeout", 429: "rate_limit_exceeded", 500: "internal_error"}

HONEST_STATUS = {404: 503, 500: 503}
"""What plain text of Ray's with these statuses means: no replica has started, or one died. Our own errors are JSON."""

RETRY_AFTER_S = 1

_REPLACED = (400, 404, 408, 429, 500, 502, 503, 504)
"""Statuses whose plain text becomes JSON."""


@dataclass(frozen=True, slots=True)
class IngressServer:
    """An ingress replica as HAProxy sees it.

    Attributes:
        name: Its id.
        port: Where it serves, on the loopback interface or at ``host``.
        liveness_port: Where its life is told; 0 if it has not said.
    """

    name: str
    host: str
    port: int
    liveness_port: int = 0


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """What stays the same as long as the service runs.

    Attributes:
        descriptor: The listening socket, which HAProxy inherits.
        directory: HAProxy's files; with ``TLS_FILE`` in it the frontend speaks TLS.
        max_connections: Open at once; further ones wait.
        limits: Limits of clients' connections.
        check_interval: Between two health checks of an ingress replica, as HAProxy writes times.
        silence_s: An exchange ends where an ingress replica neither takes nor sends a byte for so many seconds.
        num_threads: HAProxy's threads. Each one that has work at a step is a wake-up of its own.
    """

    descriptor: int
    directory: Path
    max_connections: int
    limits: ConnectionLimits
    check_interval: str = "1s"
    silence_s: float = SILENCE_S
    num_threads: int = 1


def config_text(servers: Sequence[IngressServer], settings: FrontendSettings) -> str:
    """The whole configuration.

    - HAProxy's own errors, and plain texts of Ray's, get the shape of the OpenAI API and an honest status.
    - A slow accept is no death: in a burst connections wait, and only health checks find a replica dead. They, and
      the paths of health, go to its liveness port. A connection that is refused is tried at another replica.
    - Where a replica dies before it answers, a POST gets 502, and other requests are tried elsewhere.
    - Replicas learn a client's address from a header that clients cannot set.
    - There is no ``splice-request``: with it HAProxy misses the disconnect of a client whose body came after its head.
    """
    lines = [
        *_global(settings),
        *_defaults(settings.limits, settings.silence_s),
        *_frontend(settings, [server for server in servers if server.liveness_port]),
        *_ingress(servers, settings.check_interval),
        *_health(servers),
    ]
    return "\n".join(lines) + "\n"


def _global(settings: FrontendSettings) -> list[str]:
    return [
        "global",
        f"    stats socket {settings.directory / SOCKET_FILE} mode 600 level admin",
        f"    maxconn {settings.max_connections}",
        f"    nbthread {settings.num_threads}",
    ]


def _defaults(limits: ConnectionLimits, silence_s: float) -> list[str]:
    """HAProxy knows one timeout for a body that stands still and a client that reads nothing: the longer of the two.

    The ingress replica ends the first sooner where it is shorter, the system the second.

    A replica may be silent for very long before it answers. A bound is needed all the same: HAProxy arms no other
    timeout for a client that goes on sending a body which the replica no longer takes, so such a connection stayed
    for ever. HAProxy 2.8 cannot bound that alone, after the answer.

    Each request gets a connection of its own to a replica. One that waits for reuse may be closed by a replica that
    ends at the moment when a request is sent, and a POST that got no answer may not be repeated: it would be a 502.
    """
    return [
        "defaults",
        "    mode http",
        *(f"    http-error status {status} {_json(status)}{_retry(status)}" for status in _MESSAGES),
        f"    timeout connect {_CONNECT_S}s",
        f"    timeout http-request {_ms(limits.head_s)}",
        f"    timeout client {_ms(max(limits.body_s, limits.write_s))}",
        f"    timeout http-keep-alive {_ms(limits.idle_s)}",
        f"    timeout server {_ms(silence_s)}",
        "    option http-server-close",
        "    option abortonclose",
        "    option splice-response",
        "    option redispatch 1",
        "    retry-on conn-failure empty-response",
        "    option http-no-delay",
        "    option idle-close-on-response",
        "    balance leastconn",
    ]


def _frontend(settings: FrontendSettings, told: Sequence[IngressServer]) -> list[str]:
    tls_file = settings.directory / TLS_FILE
    tls = f" ssl crt {tls_file} ssl-min-ver TLSv1.2 alpn http/1.1" if tls_file.exists() else ""
    plain = "{ res.hdr(content-type) -m beg text/plain }"
    asked = f"{{ path {HEALTH_PATH} {READY_PATH} }}"
    health = [f"    use_backend {_HEALTH_BACKEND} if {asked} {{ nbsrv({_HEALTH_BACKEND}) gt 0 }}"]
    return [
        "frontend clients",
        f"    bind fd@{settings.descriptor}{tls}",
        *(_address_rules(settings.limits.per_address) if settings.limits.per_address else []),
        f"    http-request set-header {CLIENT_HEADER} %[src]",
        "    http-request disable-l7-retry if METH_POST",
        *(_replaced(status, plain) for status in _REPLACED),
        *(health if told else []),
        f"    default_backend {INGRESS_BACKEND}",
    ]


def _ingress(servers: Sequence[IngressServer], interval: str) -> list[str]:
    lines = [
        f"backend {INGRESS_BACKEND}",
        "    http-reuse never",
        f"    option httpchk GET {CHECK_PATH}",
        "    http-check expect status 200",
        f"    default-server inter {interval} fastinter 250ms downinter 250ms fall 3 rise 1",
    ]
    for server in servers:
        checked = f" port {server.liveness_port} addr 127.0.0.1" if server.liveness_port else ""
        lines.append(f"    server {_safe(server.name)} {server.host}:{server.port} check{checked}")
    return lines


def _health(servers: Sequence[IngressServer]) -> list[str]:
    """Lists the replicas by what tells of their lives, which is asked once: their states in the other backend count."""
    lines = [f"backend {_HEALTH_BACKEND}"]
    for server in servers:
        if server.liveness_port:
            name = _safe(server.name)
            lines.append(f"    server {name} 127.0.0.1:{server.liveness_port} track {INGRESS_BACKEND}/{name}")
    return lines if len(lines) > 1 else []


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _replaced(status: int, condition: str) -> str:
    told = HONEST_STATUS.get(status, status)
    return f"    http-response return status {told} {_json(told)}{_retry(told)} if {{ status {status} }} {condition}"


def _retry(status: int) -> str:
    return f" hdr Retry-After {RETRY_AFTER_S}" if status == 503 else ""


def _address_rules(most: int) -> list[str]:
    """A client over the limit is told so; one that goes on is not spoken to."""
    return [
        "    stick-table type ipv6 size 100k expire 1m store conn_cur",
        "    tcp-request connection track-sc0 src",
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {2 * most} }}",
        f"    http-request return status 429 {_json(429)} hdr Retry-After {RETRY_AFTER_S} "
        f"if {{ sc0_conn_cur gt {most} }}",
    ]


def _ms(seconds: float) -> str:
    return f"{max(1, round(1000 * seconds))}ms"


def error_json(status: int, message: str = "") -> str:
    """The body of a proxy's error, in the shape of the OpenAI API."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    code = _CODES.get(status, "unavailable" if status >= 500 else None)
    message = message or _MESSAGES.get(status, f"The request failed with status {status}.")
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def _json(status: int) -> str:
    return f"content-type application/json string '{error_json(status)}'"


def read_liveness(directory: Path) -> dict[str, int]:
    """What the replicas of this node have published."""
    folder = directory / LIVENESS_FOLDER
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name: int(file.read_text()) for file in files if not file.name.startswith(".")}
