"""``[server]``, ``[access]``, ``[files]`` and ``[traces]``: the HTTP side, and what its clients may do."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farsight.core.errors import require

PROXIES = ("auto", "serve", "haproxy")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("warning", "info", "debug")
PREFIX_SHARING = ("auto", "all", "tenant", "key")
_POSITIVE = (
    *("head_timeout_s", "body_timeout_s", "idle_timeout_s", "write_timeout_s"),
    *("start_patience_s", "first_token_deadline_s"),
)

_AT_LEAST_1 = (
    *("max_body_bytes", "max_queued_requests", "max_queued_tokens"),
    *("max_stream_bytes_per_tenant", "max_stream_bytes"),
)


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side.

    In ``engine.benchmark_mode`` the bounds on what waits (``UNBOUNDED``) are off unless they are set.

    Attributes:
        ingress_replicas: HTTP processes; 0 picks by the machine's size.
        max_body_bytes: Larger request bodies are refused.
        max_queued_requests: Requests in flight at once, at all ingress replicas together; more are refused with 429.
        max_queued_tokens: The same, counted in prompt tokens.
        max_queued_requests_per_key: The same for the requests of one tenant, where keys are in use; 0 is no limit.
        max_queued_tokens_per_key: The same, counted in prompt tokens.
        max_wait_s: A request is refused with 429 where the predicted queue delay exceeds so many seconds; 0 is off.
        prefix_sharing: Which requests share cached prefixes: ``all``, or only those of one ``tenant`` (``key`` is
            another name for it). A key belongs to a tenant; where no keys are in use, each key that clients send is a
            tenant, and requests without a key are one. ``auto`` is ``tenant`` where keys are in use, else ``all``.
            ``cache_salt`` of a request divides further.
        proxy: ``serve`` is Ray Serve's own proxy. ``haproxy`` carries several times the requests; the ingress
            replicas behind it listen on the loopback interface alone (ports 30000 to 32699). ``auto`` takes HAProxy
            where it is available.
        head_timeout_s: Seconds from the connection, or the first byte, to the end of a request's head.
        body_timeout_s: Seconds that a request's body may stand still.
        idle_timeout_s: Seconds that a connection stays open without a request.
        write_timeout_s: Seconds that a client may take nothing of its answer.
        max_connections_per_address: Connections that one client address may have open; 0 is no limit. Where all
            clients come through one address, as behind a load balancer, it bounds them together.
        start_patience_s: Seconds that a start may take, all its tries together, before the server gives up.
        first_token_deadline_s: With ``[[replica]]`` tables, a request without a token after so many seconds fails,
            wherever it has been by then. On our own engine, or without such tables, it fails after ``max_wait_s`` and
            this together; never where ``max_wait_s`` is 0.
        drain_s: Seconds that open requests have to end after TERM; the rest ends with an error.
        max_stream_bytes_per_tenant: Bytes of the logs of resumable streams that are kept for one tenant; where no keys
            are in use, for all clients.
        max_stream_bytes: The same for all tenants together.
        log_format: How the log's lines are written: ``text`` for readers, or ``json``, an object a line. No line
            holds a prompt or an answer.
        log_level: Least level of the lines: ``warning``, ``info`` or ``debug``, with which a start also says how many
            processor seconds each of its stages took, and of which processes.
        access_log: Whether each HTTP request that reaches the application gets a line, with the id of its answer.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    ingress_replicas: int = 0
    max_body_bytes: int = 4 * 1024 * 1024
    max_queued_requests: int = 2048
    max_queued_tokens: int = 2_000_000
    max_queued_requests_per_key: int = 0
    max_queued_tokens_per_key: int = 0
    max_wait_s: float = 300.0
    prefix_sharing: str = "auto"
    proxy: str = "auto"
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    max_connections_per_address: int = 8192
    start_patience_s: float = 600.0
    first_token_deadline_s: float = 120.0
    drain_s: float = 30.0
    max_stream_bytes_per_tenant: int = 64 * 1024 * 1024
    max_stream_bytes: int = 256 * 1024 * 1024
    log_format: str = "text"
    log_level: str = "warning"
    access_log: bool = False

    def __post_init__(self) -> None:
        require(1 <= self.port <= 65535, "server.port", self.port, "a port from 1 to 65535")
        sharing = self.prefix_sharing
        require(sharing in PREFIX_SHARING, "server.prefix_sharing", sharing, f"one of {', '.join(PREFIX_SHARING)}")
        formats = f"one of {', '.join(LOG_FORMATS)}"
        require(self.log_format in LOG_FORMATS, "server.log_format", self.log_format, formats)
        require(self.log_level in LOG_LEVELS, "server.log_level", self.log_level, f"one of {', '.join(LOG_LEVELS)}")
        require(self.proxy in PROXIES, "server.proxy", self.proxy, f"one of {', '.join(PROXIES)}")
        require(self.ingress_replicas >= 0, "server.ingress_replicas", self.ingress_replicas, "an integer >= 0")
        for name in _AT_LEAST_1:
            value = getattr(self, name)
            require(value >= 1, f"server.{name}", value, "an integer >= 1")
        for name in ("max_connections_per_address", "max_queued_requests_per_key", "max_queued_tokens_per_key"):
            require(getattr(self, name) >= 0, f"server.{name}", getattr(self, name), "an integer >= 0")
        require(self.max_wait_s >= 0, "server.max_wait_s", self.max_wait_s, "a number >= 0 (0 is off)")
        require(0 <= self.drain_s < math.inf, "server.drain_s", self.drain_s, "a number of seconds >= 0")
        for name in _POSITIVE:
            require(getattr(self, name) > 0, f"server.{name}", getattr(self, name), "a number > 0")

    def unbounded(self) -> ServerConfig:
        """Returns a copy with the bounds on waiting requests lifted (``UNBOUNDED``), except bounds that were set."""
        standard = ServerConfig()
        lifted = {name: value for name, value in UNBOUNDED.items() if getattr(self, name) == getattr(standard, name)}
        return dataclasses.replace(self, **lifted)


UNBOUNDED: Mapping[str, Any] = {"max_queued_requests": 1_000_000, "max_queued_tokens": 2**40, "max_wait_s": 0.0}
"""Bounds on waiting requests that are in effect off: a measurement waits for its answers instead of being refused."""


_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9\-]+(\.[A-Za-z0-9\-]+)*|\[[0-9A-Fa-f:.]+\]|\*")


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Keys, hosts, origins and TLS of the HTTP side.

    Attributes:
        key_file: File of API keys and tenants that ``farsight keys`` writes; empty: no file. With a file, or with
            ``FARSIGHT_API_KEY`` in the environment, every request needs a key.
        insecure: Serve without keys on an address other than the loopback interface.
        allowed_hosts: Names that a request's ``Host`` header may have, separated by commas; ``*`` allows every name,
            ``*.example.org`` every name below. Empty: with ``server.host`` on the loopback interface and no keys,
            only names of the loopback interface; else every name.
        cors_origins: Origins whose web pages may call the API from a browser, separated by commas, or ``*``; empty:
            none.
        tls_cert: File of the TLS certificate chain in PEM; empty serves plain HTTP.
        tls_key: File of its private key in PEM.
        failures_per_minute: Wrong keys that one client address may send in a minute before its further wrong keys are
            answered late and with 429. Right keys are never slowed.
    """

    key_file: str = ""
    insecure: bool = False
    allowed_hosts: str = ""
    cors_origins: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    failures_per_minute: int = 30

    def __post_init__(self) -> None:
        for host in listed(self.allowed_hosts):
            ok = _HOST.fullmatch(host) is not None
            require(ok, "access.allowed_hosts", host, "names as api.example.org, *.example.org or *, without a port")
        for origin in listed(self.cors_origins):
            ok = origin == "*" or _ORIGIN.fullmatch(origin) is not None
            require(ok, "access.cors_origins", origin, "origins as https://app.example.org, or *")
        require(
            bool(self.tls_cert) == bool(self.tls_key), "access.tls_key", self.tls_key, "a file with access.tls_cert"
        )
        count = self.failures_per_minute
        require(count >= 1, "access.failures_per_minute", count, "an integer >= 1")


def listed(text: str) -> tuple[str, ...]:
    """Splits a list at its commas; drops spaces around items, and empty items."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


@dataclass(frozen=True, slots=True)
class FilesConfig:
    """Files, batches and responses of clients. They are kept in the log (``log.path``).

    Attributes:
        max_file_bytes: Larger files are refused; 0 turns files and batches off.
        max_owner_bytes: Most bytes of the files of one tenant, or of all clients where no keys are in use; 0 is no
            limit.
        max_age_s: Seconds after which a file or an ended batch is dropped, unless its client asked for less.
        max_batch_lines: Most requests of one batch.
        store_responses: Whether a response of ``/v1/responses`` is kept where its client does not say ``store``.
        batch_in_flight: Most requests of batches in flight at once, at each ingress replica. No more begin than the
            replicas have places free.
    """

    max_file_bytes: int = 64 * 1024 * 1024
    max_owner_bytes: int = 1024 * 1024 * 1024
    max_age_s: float = 30 * 86_400.0
    max_batch_lines: int = 50_000
    batch_in_flight: int = 256
    store_responses: bool = False

    def __post_init__(self) -> None:
        for name in ("max_file_bytes", "max_owner_bytes"):
            require(getattr(self, name) >= 0, f"files.{name}", getattr(self, name), "an integer >= 0")
        require(self.max_age_s > 0, "files.max_age_s", self.max_age_s, "a number > 0")
        for name in ("max_batch_lines", "batch_in_flight"):
            require(getattr(self, name) >= 1, f"files.{name}", getattr(self, name), "an integer >= 1")


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """Where spans go, and of which requests. A span holds names, numbers and decisions, never prompts or answers.

    Attributes:
        endpoint: URL that takes OTLP over HTTP, as ``http://127.0.0.1:4318/v1/traces``; empty for no spans.
        sample: Share of the requests that get a span, from 0 to 1, where the client's ``traceparent`` does not decide.
        service_name: ``service.name`` of the spans.
    """

    endpoint: str = ""
    sample: float = 1.0
    service_name: str = "farsight"

    def __post_init__(self) -> None:
        is_url = self.endpoint.startswith(("http://", "https://"))
        expected = "a URL of http:// or https://, or nothing"
        require(not self.endpoint or is_url, "traces.endpoint", self.endpoint, expected)
        require(0.0 <= self.sample <= 1.0, "traces.sample", self.sample, "a share from 0 to 1")
