"""``[images]``: pictures in prompts, and the hosts that they may be fetched from."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from farsight.core.config.server import listed
from farsight.core.errors import require

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ImagesConfig:
    """Pictures that clients send to a model that sees. They have no effect on any other.

    Attributes:
        encoders: Number of ImageEncoders at the start; each has a process of its own.
        device: Where an ImageEncoder computes; ``cuda`` gives each a GPU of its own.
        num_threads: Threads that each computes with; 0 is half of the processors.
        cache_mib: Most memory of the rows that each keeps of pictures that it has encoded.
        max_per_request: Most pictures of one request.
        max_pixels: A picture of more pixels is refused; the default is a little more than one of 8K.
        max_waiting_mib: Files of pictures that wait at one ingress replica; beyond it requests get 429.
        allow_urls: Hosts that pictures may be fetched from by http and https, separated by commas; empty: none. A host
            is ``pictures.example.org`` or an address, on ports 80 and 443, or on the port behind it
            (``pictures.example.org:8443``). All addresses of a name must be public, unless ``private:`` stands before
            it.
        url_timeout_s: A picture that its host has not sent within so many seconds is refused.
        wait_s: A request whose pictures are not encoded within so many seconds gets 503.
    """

    encoders: int = 1
    device: str = "cpu"
    num_threads: int = 0
    cache_mib: int = 256
    max_per_request: int = 16
    max_pixels: int = 1 << 25
    max_waiting_mib: int = 64
    allow_urls: str = ""
    url_timeout_s: float = 10.0
    wait_s: float = 120.0

    def __post_init__(self) -> None:
        require(self.device in DEVICES, "images.device", self.device, f"one of {', '.join(DEVICES)}")
        for name in ("encoders", "max_per_request", "max_pixels", "max_waiting_mib"):
            require(getattr(self, name) >= 1, f"images.{name}", getattr(self, name), "an integer >= 1")
        for name in ("num_threads", "cache_mib"):
            require(getattr(self, name) >= 0, f"images.{name}", getattr(self, name), "an integer >= 0")
        for name in ("url_timeout_s", "wait_s"):
            require(0 < getattr(self, name) < math.inf, f"images.{name}", getattr(self, name), "a number > 0")
        parse_image_hosts(self.allow_urls)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_FIELD = "images.allow_urls"
_EXPECTED = (
    "hosts as pictures.example.org, pictures.example.org:8443 or 8.8.8.8, with private: before a name whose addresses "
    "may be private"
)
_PRIVATE = "private:"
_ENTRY = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)(?::(?P<port>[0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class ImageHost:
    """One host.

    Attributes:
        name: In lower case, without a final dot; an address without brackets.
        port: The only port; None for the default ports of http and https.
        may_be_private: Whether its addresses may be private, or of the loopback interface.
    """

    name: str
    port: int | None
    may_be_private: bool

    def takes(self, scheme: str, name: str, port: int) -> bool:
        return name == self.name and port == (_PORTS.get(scheme) if self.port is None else self.port)


def parse_image_hosts(text: str) -> tuple[ImageHost, ...]:
    """
    Raises:
        ConfigError: An entry that is no host.
    """
    return tuple(map(_host, listed(text)))


def host_of(hosts: Iterable[ImageHost], scheme: str, name: str, port: int) -> ImageHost | None:
    """Returns the entry that allows a URL's host; None if there is none."""
    return next((host for host in hosts if host.takes(scheme, name, port)), None)


def _host(entry: str) -> ImageHost:
    text = entry.lower()
    is_private = text.startswith(_PRIVATE)
    found = _ENTRY.fullmatch(text.removeprefix(_PRIVATE))
    require(found is not None, _FIELD, entry, _EXPECTED)
    assert found is not None
    name, port = found["host"].strip("[]"), None if found["port"] is None else int(found["port"])
    require(port is None or 1 <= port <= 65535, _FIELD, entry, "a port of 1 to 65535")
    address = parse_address(name)
    if address is None:
        is_name = not found["host"].startswith("[") and re.search("[a-z]", name.rsplit(".", 1)[-1]) is not None
        require(is_name, _FIELD, entry, _EXPECTED)
        return ImageHost(name, port, is_private)
    expected = "an address that is public, private or of the loopback interface"
    require(is_public(address) or is_private_host(address), _FIELD, entry, expected)
    return ImageHost(str(address), port, may_be_private=True)


def parse_address(text: str) -> Address | None:
    """Returns the IP address that a text spells; None for any other text, and for an address with a zone
    (``fe80::1%eth0``)."""
    try:
        return None if "%" in text else ipaddress.ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Returns whether an address is reachable on the internet: neither it nor an IPv4 address inside it is special."""
    inner = _inner(address)
    if inner is not None:
        return is_public(inner)
    special = (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )
    return address.is_global and not special


def is_private_host(address: Address) -> bool:
    """Returns whether an address belongs to a host of a private network, or to this machine's loopback interface."""
    inner = _inner(address)
    if inner is not None:
        return is_private_host(inner)
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_loopback or any(address in network for network in _PRIVATE_NETWORKS)
    return address.is_loopback or address in _UNIQUE_LOCAL


_PRIVATE_NETWORKS = tuple(map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
_UNIQUE_LOCAL = ipaddress.IPv6Network("fc00::/7")


def _inner(address: Address) -> ipaddress.IPv4Address | None:
    """Returns the IPv4 address inside an IPv6 address (mapped, 6to4, Teredo or NAT64); None if there is none."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (None if teredo is None else teredo[1])
