"""``images.allow_urls``: which hosts pictures may be fetched from."""

from __future__ import annotations

import ipaddress

import pytest

from core.config.image_hosts import ImageHost, host_of, is_private_host, is_public, parse_image_hosts
from core.errors import ConfigError


def test_entries_are_names_or_addresses_with_a_port_or_without() -> None:
    found = parse_image_hosts(
        "Pictures.example, a.b:8443,private:store.internal,10.0.0.7:9000,[::1]:81,[2606:4700::1111]"
    )
    assert found == (
        ImageHost("pictures.example", None, may_be_private=False),
        ImageHost("a.b", 8443, may_be_private=False),
        ImageHost("store.internal", None, may_be_private=True),
        ImageHost("10.0.0.7", 9000, may_be_private=True),
        ImageHost("::1", 81, may_be_private=True),
        ImageHost("2606:4700::1111", None, may_be_private=True),
    )
    assert parse_image_hosts("") == ()


@pytest.mark.parametrize(
    "entry",
    [
        "*", "*.example.org", "http://a.example", "a.example/path", "user@a.example", "a.example:0", "a.example:65536",
        "a.example:http", "a..example", ".example", "a.example:", "127.1", "2130706433", "0177.0.0.1", "[a.example]",
        "::1", "[::1", "[fe80::1%eth0]", "169.254.169.254", "0.0.0.0", "224.0.0.1", "[::ffff:169.254.169.254]",
        "private:", "b\u00fccher.example", "a b",
    ],
)  # fmt: skip
def test_other_entries_are_refused_with_the_setting(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"images\.allow_urls"):
        parse_image_hosts(f"a.example,{entry}")


def test_a_host_is_taken_on_its_port_alone() -> None:
    hosts = parse_image_hosts("a.example,a.example:8443")
    taken = {
        (scheme, name, port)
        for scheme in ("http", "https")
        for name in ("a.example", "b.a.example", "example")
        for port in (80, 443, 8443, 0)
        if host_of(hosts, scheme, name, port) is not None
    }
    assert taken == {
        ("http", "a.example", 80),
        ("https", "a.example", 443),
        ("http", "a.example", 8443),
        ("https", "a.example", 8443),
    }


@pytest.mark.parametrize("text", ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert is_public(address)
    assert not is_private_host(address)


@pytest.mark.parametrize(
    "text", ["10.1.2.3", "172.31.0.1", "192.168.0.1", "127.0.0.1", "::1", "fd00::1", "::ffff:10.0.0.1"]
)
def test_addresses_of_private_networks_are_not(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not is_public(address)
    assert is_private_host(address)
