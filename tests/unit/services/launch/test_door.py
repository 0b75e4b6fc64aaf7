"""What ``farsight serve`` refuses before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from farsight.core.config.load import FarsightConfig, load_config
from farsight.core.config.server import AccessConfig, ServerConfig
from farsight.core.errors import ConfigError
from farsight.services.api.access.key_file import KeyFile, changed_key_file
from farsight.services.api.access.keys import Role, make_key
from farsight.services.launch.access import absolute_paths, check_access, write_tls_file
from farsight.services.launch.proxy import http_options
from farsight.services.proxy.haproxy_config import TLS_FILE
from tests.unit.services.certificates import make_certificate

GOOD_KEY = "k" * 32


def configured(host: str = "127.0.0.1", **access: object) -> FarsightConfig:
    return FarsightConfig(server=ServerConfig(host=host), access=AccessConfig(**access))  # type: ignore[arg-type]


def key_file(folder: Path) -> Path:
    path = folder / "keys.json"
    with changed_key_file(path) as content:
        content[0] = KeyFile((make_key("one", "one", [Role.SERVE], 0.0)[1],))
    return path


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_the_loopback_interface_needs_no_key(host: str) -> None:
    assert check_access(configured(host), {}) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_any_other_address_needs_one(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.host.*farsight keys add NAME --key-file"):
        check_access(configured(host), {})
    (clear,) = check_access(configured(host), {"FARSIGHT_API_KEY": GOOD_KEY})
    assert "clear text" in clear
    assert check_access(configured(host, key_file=str(key_file(tmp_path))), {}) == [clear]
    every_client, clear = check_access(configured(host, insecure=True), {})
    assert "every client" in every_client
    certificate = make_certificate(tmp_path)
    tls = {"tls_cert": str(certificate), "tls_key": str(tmp_path / "key.pem")}
    assert check_access(configured(host, **tls), {"FARSIGHT_API_KEY": GOOD_KEY}) == []


@pytest.mark.parametrize("key", ["short", "k" * 15, "has a space in its text", "ключ" * 8, "k" * 20 + "\n"])
def test_a_key_that_cannot_be_used_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="FARSIGHT_API_KEY") as caught:
        check_access(configured(), {"FARSIGHT_API_KEY": key})
    assert key not in str(caught.value)


def test_the_key_file_must_hold_a_key_and_be_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(ConfigError, match=r"access\.key_file.*farsight keys add"):
        check_access(configured(key_file=str(path)), {})
    with changed_key_file(path):
        pass
    with pytest.raises(ConfigError, match="a file with a key"):
        check_access(configured(key_file=str(path)), {})
    path = key_file(tmp_path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        check_access(configured(key_file=str(path)), {})


def test_certificate_and_key_must_belong_together(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificate, other = make_certificate(tmp_path), make_certificate(tmp_path / "other")
    for cert, key in ((certificate, other.with_name("key.pem")), (tmp_path / "none.pem", certificate)):
        with pytest.raises(ConfigError, match=r"access\.tls_cert"):
            check_access(configured(tls_cert=str(cert), tls_key=str(key)), {})
    with pytest.raises(ConfigError, match=r"access\.tls_key"):
        configured(tls_cert=str(certificate))


def test_haproxy_gets_both_in_a_file_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_certificate(tmp_path)
    monkeypatch.chdir(tmp_path)
    access = absolute_paths(AccessConfig(tls_cert="cert.pem", tls_key="key.pem"))
    assert access.tls_cert == str(tmp_path / "cert.pem")
    write_tls_file(access, tmp_path)
    written = tmp_path / TLS_FILE
    assert written.stat().st_mode & 0o777 == 0o600
    assert "BEGIN CERTIFICATE" in written.read_text()
    assert "PRIVATE KEY" in written.read_text()


def test_rays_servers_stay_on_the_loopback_interface_behind_haproxy() -> None:
    server = ServerConfig(host="0.0.0.0", port=8443)
    access = AccessConfig(tls_cert="/chain.pem", tls_key="/key.pem")
    assert http_options(server, access, "haproxy") == {"host": "127.0.0.1"}
    tls = {"ssl_certfile": "/chain.pem", "ssl_keyfile": "/key.pem"}
    assert http_options(server, access, "serve") == {"host": "0.0.0.0", "port": 8443, **tls}
    assert http_options(server, AccessConfig(), "serve") == {"host": "0.0.0.0", "port": 8443}


@pytest.mark.parametrize(
    "setting",
    [
        {"allowed_hosts": "http://a"},
        {"allowed_hosts": "a b"},
        {"cors_origins": "a.example.org"},
        {"cors_origins": "https://a.example.org/path"},
        {"failures_per_minute": 0},
    ],
)
def test_a_wrong_setting_is_named(setting: dict[str, object]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=rf"access\.{name}"):
        load_config(None, {"access": setting})


def test_a_deployment_to_other_machines_needs_a_key() -> None:
    """Under ``serve deploy`` the address is the cluster's, whatever ``server.host`` says."""
    with pytest.raises(ConfigError, match=r"http_options.host: got '0.0.0.0', expected 127.0.0.1, or keys"):
        check_access(configured("127.0.0.1"), {}, "0.0.0.0")
    assert len(check_access(configured("127.0.0.1"), {"FARSIGHT_API_KEY": GOOD_KEY}, "0.0.0.0")) == 1
    assert check_access(configured("127.0.0.1"), {}, "127.0.0.1") == []
