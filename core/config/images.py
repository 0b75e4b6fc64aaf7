"""``[images]``: pictures in prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.config.checks import require
from core.config.image_hosts import parse_image_hosts

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
