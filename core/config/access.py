"""``[access]``: who may use the HTTP side, and from where."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.config.checks import require

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
