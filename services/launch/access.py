"""Checks, before anything starts, that no other machine may come in without a key unless the operator says so."""

from __future__ import annotations

import dataclasses
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from farsight.core.config.load import FarsightConfig
from farsight.core.config.server import AccessConfig, is_loopback
from farsight.core.errors import ConfigError, FarsightError
from farsight.services.api.access.access_control import API_KEY_VARIABLE
from farsight.services.api.access.key_file import read_key_file
from farsight.services.proxy.haproxy_config import TLS_FILE

MIN_KEY_LEN = 16
"""Characters of a key that the operator makes up: it is kept by one fast hash, so it must not be easy to guess."""

_MAKE_A_KEY = (
    "127.0.0.1, or keys: `farsight keys add NAME --key-file keys.json`, then "
    "`farsight serve --key-file keys.json`; `--insecure` serves every client that reaches the address"
)

_MAKE_A_KEY_THERE = (
    f"127.0.0.1, or keys: access.key_file on every node, or {API_KEY_VARIABLE} in the cluster's environment; "
    "access.insecure = true serves every client that reaches the address"
)


def check_access(config: FarsightConfig, environment: Mapping[str, str], deployed_at: str = "") -> list[str]:
    """Checks keys, key file and TLS files; returns what the operator should know.

    Args:
        deployed_at: The address that the Ray cluster's proxies listen on, under ``serve deploy``.

    Raises:
        ConfigError: A setting leaves the server open to other machines, or a file cannot be used.
    """
    access, host = config.access, deployed_at or config.server.host
    api_key = environment.get(API_KEY_VARIABLE, "")
    uses_keys = bool(access.key_file or api_key)
    if not is_loopback(host) and not uses_keys and not access.insecure:
        if deployed_at:
            raise ConfigError("http_options.host", host, _MAKE_A_KEY_THERE)
        raise ConfigError("server.host", host, _MAKE_A_KEY)
    if api_key and (len(api_key) < MIN_KEY_LEN or not api_key.isascii() or not api_key.isprintable() or " " in api_key):
        found = f"{len(api_key)} characters"
        expected = f"at least {MIN_KEY_LEN} printable ASCII characters without spaces; `openssl rand -hex 32` makes one"
        raise ConfigError(API_KEY_VARIABLE, found, expected)
    if access.key_file:
        _check_key_file(access)
    if access.tls_cert:
        check_tls(access)
    notes = []
    if not is_loopback(host) and not uses_keys:
        notes.append(f"Warning: every client that reaches {host} may use this server (--insecure).")
    if not is_loopback(host) and not access.tls_cert:
        notes.append("Warning: requests and keys cross the network in clear text; --tls-cert and --tls-key encrypt it.")
    return notes


def _check_key_file(access: AccessConfig) -> None:
    try:
        found = read_key_file(Path(access.key_file))
    except FarsightError as error:
        raise ConfigError("access.key_file", access.key_file, f"a key file ({error})") from error
    if not found.keys:
        expected = f"a file with a key: `farsight keys add NAME --key-file {access.key_file}`"
        raise ConfigError("access.key_file", access.key_file, expected)


def check_tls(access: AccessConfig) -> None:
    """Raises ConfigError unless certificate and key belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(access.tls_cert, access.tls_key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        expected = f"a certificate chain in PEM with its private key in access.tls_key, without a password ({reason})"
        raise ConfigError("access.tls_cert", access.tls_cert, expected) from error


def _no_password() -> str:
    raise ValueError("the private key asks for a password")


def absolute_paths(access: AccessConfig) -> AccessConfig:
    """The files by paths that hold in every process."""
    names = ("key_file", "tls_cert", "tls_key")
    paths = {name: getattr(access, name) for name in names}
    return dataclasses.replace(access, **{name: os.path.abspath(path) for name, path in paths.items() if path})


def write_tls_file(access: AccessConfig, directory: Path) -> None:
    """Chain and key in one file of this user alone, as HAProxy reads them; nothing without TLS."""
    if not access.tls_cert:
        return
    text = "\n".join(Path(path).read_text("ascii") for path in (access.tls_cert, access.tls_key))
    descriptor = os.open(directory / TLS_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
