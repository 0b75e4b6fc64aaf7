"""Edits the configuration that Ray writes for HAProxy before HAProxy reads it.

It runs as a program at each start of HAProxy, so it imports only the standard library.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

CHECK_PATH = "/-/healthz"
"""The health check that Ray configures for HAProxy's servers."""

HEALTH_PATH = "/health"
READY_PATH = "/health/ready"
LIVENESS_FOLDER = "liveness"
"""Subdirectory of HAProxy's files: a file for each ingress replica, named by its id, that holds its liveness port."""

_HEALTH_BACKEND = "farsight-health"
TLS_FILE = "tls.pem"
"""File of HAProxy's directory with certificate chain and private key."""

CLIENT_HEADER = "X-Farsight-Client"
_FRONTEND = "frontend http_frontend"
_SERVER = re.compile(r"^    server (\S+) \S+ check\b(?! backup)")

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

LIMITS_FILE = "limits.json"
"""In HAProxy's directory: the connections' limits (``services.proxy.timed_http.ConnectionLimits``)."""

_STARTING = "The service has not started yet or has stopped."


def edited(
    text: str,
    metrics_port: int,
    stats_port: int,
    liveness: Mapping[str, int],
    *,
    host: str = "",
    tls_file: str = "",
    limits: Mapping[str, float] | None = None,
) -> str:
    """The edited configuration.

    - The frontend listens on ``host``, and with ``tls_file`` speaks TLS. Ray configures it with the loopback address,
      where the servers behind it listen.
    - Servers learn a client's address from a header that clients cannot set.
    - The two pages of statistics move from all interfaces to the loopback interface.
    - ``splice-request`` is removed: with it, HAProxy misses the disconnect of a client whose body came after its head.
    - Health checks and ``/health`` go to the replica's liveness port, if it has one.
    - HAProxy's own errors and Ray's plain texts get the shape of the OpenAI API, and an honest status.
    - Connections get their limits.

    Args:
        liveness: Liveness port by replica id. Other servers keep Ray's health check.
        host: Address of the frontend; empty leaves Ray's.
        tls_file: Certificate chain and private key in PEM; empty for plain HTTP.
        limits: As ``ConnectionLimits`` has them; without them Ray's timeouts stay.
    """
    lines: list[str] = []
    health: list[str] = []
    for line in text.splitlines():
        found = _SERVER.match(line)
        port = liveness.get(re.split(r"[^A-Za-z0-9]", found[1])[-1]) if found else None
        if found and port is not None:
            line += f" port {port}"
            health.append(f"    server {found[1]} 127.0.0.1:{port} check")
        lines += _edited_line(line, metrics_port, stats_port)
    lines = _with_frontend(lines, host, tls_file)
    if health:
        lines = [*_with_health_rule(lines), *_health_backend(health)]
    if limits:
        lines = _limited(lines, limits)
    return "\n".join(lines) + "\n"


def _edited_line(line: str, metrics_port: int, stats_port: int) -> list[str]:
    stripped = line.strip()
    indent = line[: len(line) - len(line.lstrip())]
    if stripped == "option splice-request" or stripped.startswith("errorfile "):
        return []
    if stripped == f"bind :{metrics_port}":
        return [f"{indent}bind 127.0.0.1:{metrics_port}"]
    if stripped == f"bind *:{stats_port}":
        return [f"{indent}bind 127.0.0.1:{stats_port}"]
    if stripped.startswith("http-request return status 404 content-type text/plain"):
        return [f"{indent}http-request return status 503 {_json(503, _STARTING)} hdr Retry-After {RETRY_AFTER_S}"]
    if stripped == "defaults":
        return [line, *(f"    http-error status {status} {_json(status)}{_retry(status)}" for status in _MESSAGES)]
    if stripped == _FRONTEND:
        plain = "{ res.hdr(content-type) -m beg text/plain }"
        return [
            line,
            *(_replaced(status, plain) for status in sorted({*_MESSAGES, *HONEST_STATUS})),
        ]
    return [line]


def _with_frontend(lines: list[str], host: str, tls_file: str) -> list[str]:
    """Its address, TLS, and the header with the client's address; what a client sent under that name is dropped."""
    bind = next(number for number in range(lines.index(_FRONTEND), len(lines)) if lines[number].strip()[:5] == "bind ")
    address = lines[bind].split()[1]
    if host:
        address = f"{'*' if host in ('0.0.0.0', '::') else host}:{address.rpartition(':')[2]}"
    tls = f" ssl crt {tls_file} ssl-min-ver TLSv1.2 alpn http/1.1" if tls_file else ""
    header = f"    http-request set-header {CLIENT_HEADER} %[src]"
    return [*lines[:bind], f"    bind {address}{tls}", header, *lines[bind + 1 :]]


def _replaced(status: int, condition: str) -> str:
    told = HONEST_STATUS.get(status, status)
    return f"    http-response return status {told} {_json(told)}{_retry(told)} if {{ status {status} }} {condition}"


def _retry(status: int) -> str:
    return f" hdr Retry-After {RETRY_AFTER_S}" if status == 503 else ""


def _limited(lines: list[str], limits: Mapping[str, float]) -> list[str]:
    """Timeouts and connections of clients.

    HAProxy knows one timeout for a body that stands still and a client that reads nothing: the longer of the two. The
    ingress replica ends the first sooner where it is shorter, the system the second.
    """
    timeouts = {
        "http-request": limits["head_s"],
        "client": max(limits["body_s"], limits["write_s"]),
        "http-keep-alive": limits["idle_s"],
    }
    found = []
    inside = False
    for line in lines:
        stripped = line.strip()
        inside = stripped == _FRONTEND if not line.startswith(" ") else inside
        if any(stripped.startswith(f"timeout {name} ") for name in timeouts):
            continue
        if inside and stripped.startswith("bind "):
            line += f" tcp-ut {_ms(limits['write_s'])}"
        found.append(line)
        if stripped == "defaults":
            found += [f"    timeout {name} {_ms(seconds)}" for name, seconds in timeouts.items()]
        if inside and stripped == _FRONTEND and limits["per_address"]:
            found += _address_rules(int(limits["per_address"]))
    return found


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


def _json(status: int, message: str = "") -> str:
    return f"content-type application/json string '{error_json(status, message)}'"


def _with_health_rule(lines: list[str]) -> list[str]:
    """Puts the rule for the paths of health before all others, since HAProxy takes the first that matches.

    The rule applies only while at least one replica's liveness port is up.
    """
    first = next(number for number, line in enumerate(lines) if line.strip().startswith("use_backend "))
    asked = f"{{ path {HEALTH_PATH} {READY_PATH} }}"
    rule = f"    use_backend {_HEALTH_BACKEND} if {asked} {{ nbsrv({_HEALTH_BACKEND}) gt 0 }}"
    return [*lines[:first], rule, *lines[first:]]


def _health_backend(servers: list[str]) -> list[str]:
    check = [f"    option httpchk GET {CHECK_PATH}", "    http-check expect status 200"]
    default = "    default-server inter 1s fastinter 250ms downinter 250ms fall 2 rise 1"
    return [f"backend {_HEALTH_BACKEND}", *check, default, *servers]


def read_liveness(directory: Path) -> dict[str, int]:
    """What the replicas of this node have published."""
    folder = directory / LIVENESS_FOLDER
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name: int(file.read_text()) for file in files if not file.name.startswith(".")}


def read_limits(directory: Path) -> dict[str, float] | None:
    """What the service's settings are; None where it has written none."""
    file = directory / LIMITS_FILE
    return json.loads(file.read_text()) if file.exists() else None


def main() -> None:
    """``haproxy_config.py FILE METRICS_PORT STATS_PORT DIRECTORY [HOST]``: edits the file in place.

    The directory is the one that replicas publish in; Ray puts the file into a folder of it for each node. A file
    ``TLS_FILE`` in it turns TLS on.
    """
    file, directory = Path(sys.argv[1]), Path(sys.argv[4])
    tls_file = directory / TLS_FILE
    text = edited(
        file.read_text("utf-8"),
        int(sys.argv[2]),
        int(sys.argv[3]),
        read_liveness(directory),
        host=sys.argv[5] if len(sys.argv) > 5 else "",
        tls_file=str(tls_file) if tls_file.exists() else "",
        limits=read_limits(directory),
    )
    file.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
