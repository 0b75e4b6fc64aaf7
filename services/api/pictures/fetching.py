"""Fetches pictures from the hosts that the operator has named, and from nowhere else.

A name is resolved once. Each of its addresses must be public unless its entry says ``private:``, and these very
addresses are connected to, so that a second answer of the name server changes nothing. A redirect is checked like the
first URL. Bytes, time, redirects and fetches at the same time are bounded; nothing is decompressed, and no cookie, key
or proxy of this process is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from farsight.core.config.images import ImageHost, host_of, is_private_host, is_public, parse_address
from farsight.core.errors import CapacityError, InvalidValueError
from farsight.core.images import ImageFile

MAX_URL = 4096
"""Characters of a URL."""

MAX_REDIRECTS = 3
MAX_FETCHES = 8
"""At the same time, in one ingress replica; further ones wait within their time."""

RETRY_AFTER_S = 2.0

_REDIRECTS = (301, 302, 303, 307, 308)
_FORM = re.compile("https?://[^/?#@]+(?:[/?#]|$)", re.IGNORECASE)
_CHUNK = 1 << 16
_HEADERS = {"User-Agent": "farsight", "Accept": "image/*", "Accept-Encoding": "identity"}
_SHOWN = 120
"""Characters of a URL that an error shows."""

Lookup = Callable[[str, int], Awaitable[list[str]]]
"""From a name and a port to addresses; raises OSError if there are none."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """
    Attributes:
        max_bytes: Size of one picture's file.
        max_waiting_bytes: Bytes of all files that are fetched or wait to be read, and so of those of one request.
        timeout_s: From the wait for a turn to the last byte, redirects included.
    """

    max_bytes: int = 32 << 20
    max_waiting_bytes: int = 64 << 20
    timeout_s: float = 10.0


class _Refused(Exception):
    """A URL that is not fetched; the text completes "expected ..."."""


class PictureFetcher:
    """For one event loop.

    Args:
        hosts: Where pictures may come from; none switches fetching off.
        lookup: In place of the system's.
        tls: In place of the system's certificates.
    """

    def __init__(
        self,
        hosts: Sequence[ImageHost],
        limits: FetchLimits | None = None,
        *,
        lookup: Lookup | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = tuple(hosts)
        self._limits = limits or FetchLimits()
        self._lookup = lookup or look_up
        self._tls = tls
        self._turns = asyncio.Semaphore(MAX_FETCHES)
        self.num_bytes = 0

    @contextlib.asynccontextmanager
    async def fetched(self, wanted: Sequence[ImageFile]) -> AsyncIterator[list[bytes]]:
        """Their files, in their order, which count as waiting until the block ends.

        Raises:
            InvalidValueError: A URL that is not fetched, or whose host sends no file in time.
            CapacityError: Too many bytes wait.
        """
        budget = _Budget(self)
        try:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._one(each, budget)) for each in wanted]
            except BaseExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
            yield [task.result() for task in tasks]
        finally:
            budget.give_back()

    async def _one(self, wanted: ImageFile, budget: _Budget) -> bytes:
        try:
            url, host = self._checked(wanted.url)
            async with asyncio.timeout(self._limits.timeout_s), self._turns:
                return await self._followed(url, host, budget)
        except TimeoutError as error:
            expected = f"a picture that its host sends within {self._limits.timeout_s:g} s (images.url_timeout_s)"
            raise InvalidValueError(wanted.field, _shown(wanted.url), expected) from error
        except _Refused as error:
            raise InvalidValueError(wanted.field, _shown(wanted.url), str(error)) from error

    async def _followed(self, url: URL, host: ImageHost, budget: _Budget) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._asked(url, host, budget)
            if isinstance(found, bytes):
                return found
            was_secret, (url, host) = url.scheme == "https", self._checked(str(found))
            if was_secret and url.scheme != "https":
                raise _Refused("redirects that do not leave https")
        raise _Refused(f"at most {MAX_REDIRECTS} redirects")

    async def _asked(self, url: URL, host: ImageHost, budget: _Budget) -> bytes | URL:
        """The file, or where it has gone."""
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(host, self._lookup), use_dns_cache=False, force_close=True, ssl=self._tls or True
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None),  # the caller's covers redirects too
        )
        try:
            async with session, session.get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS:
                    return _target(url, response.headers.get("Location", ""))
                return await self._body(response, budget)
        except aiohttp.ClientConnectorCertificateError as error:
            raise _Refused("a host whose certificate can be verified") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            # Neither its own words nor the system's: they tell addresses.
            raise _Refused("a host that can be reached and sends a whole answer") from error

    async def _body(self, response: aiohttp.ClientResponse, budget: _Budget) -> bytes:
        if response.status != 200:
            raise _Refused(f"a host that answers 200, not {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _Refused("a host that sends the file as it is, without a Content-Encoding")
        most = self._limits.max_bytes
        too_long = f"a file of at most {most} bytes"
        if response.content_length is not None and response.content_length > most:
            raise _Refused(too_long)
        data = bytearray()
        async for piece in response.content.iter_chunked(_CHUNK):
            if len(data) + len(piece) > most:
                raise _Refused(too_long)
            budget.take(len(piece))
            data += piece
        return bytes(data)

    def _checked(self, text: str) -> tuple[URL, ImageHost]:
        """The URL and the entry that allows it.

        Raises:
            _Refused: Nothing allows it.
        """
        if not self._hosts:
            raise _Refused("a data URL: pictures are fetched where the server was started with --allow-image-urls")
        if len(text) > MAX_URL:
            raise _Refused(f"a URL of at most {MAX_URL} characters")
        if not text.isascii() or not text.isprintable() or set(text) & set(' \\"<>^`{|}'):
            raise _Refused("a URL of ASCII characters, others percent-encoded")
        if not _FORM.match(text):
            raise _Refused("a URL as https://HOST/PATH, without a user or a password")
        try:
            url = URL(text)
            name, port = (url.raw_host or "").lower().removesuffix("."), url.port or 0
        except ValueError as error:
            raise _Refused("a URL as https://HOST/PATH") from error
        address = parse_address(name)
        host = host_of(self._hosts, url.scheme, name if address is None else str(address), port)
        if host is None:
            raise _Refused("a host that --allow-image-urls names, on its port")
        return url.with_fragment(None), host


class _Budget:
    """Bytes that one request's pictures take of those that may wait."""

    def __init__(self, fetcher: PictureFetcher) -> None:
        self._fetcher = fetcher
        self._taken = 0

    def take(self, num_bytes: int) -> None:
        most = self._fetcher._limits.max_waiting_bytes
        if self._taken + num_bytes > most:
            raise _Refused(f"pictures of at most {most} bytes together in one request")
        if self._fetcher.num_bytes + num_bytes > most:
            message = f"files of pictures that are fetched: {self._fetcher.num_bytes} bytes, limit {most}"
            raise CapacityError(message, RETRY_AFTER_S)
        self._taken += num_bytes
        self._fetcher.num_bytes += num_bytes

    def give_back(self) -> None:
        self._fetcher.num_bytes -= self._taken
        self._taken = 0


class _CheckedResolver(AbstractResolver):
    """The addresses of a name, looked up once and checked; the connection goes to what it returns.

    Args:
        host: The entry that allows the name.
    """

    def __init__(self, host: ImageHost, lookup: Lookup) -> None:
        self._host = host
        self._lookup = lookup

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        texts = await self._lookup(host, port)
        found = []
        for text in texts:
            address = parse_address(text)
            if address is None or not (is_public(address) or (self._host.may_be_private and is_private_host(address))):
                raise _Refused("a host all of whose addresses are public")
            kind = socket.AF_INET if address.version == 4 else socket.AF_INET6
            result = ResolveResult(
                hostname=host, host=str(address), port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
            )
            found.append(result)
        if not found:
            raise _Refused("a host that has an address")
        return found

    async def close(self) -> None:
        """It holds nothing."""


async def look_up(name: str, port: int) -> list[str]:
    """The system's answer, each address once."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _target(url: URL, location: str) -> URL:
    if not location:
        raise _Refused("redirects that say where to")
    if len(location) > MAX_URL or "\\" in location:
        raise _Refused(f"redirects to a URL of at most {MAX_URL} characters")
    try:
        return url.join(URL(location))
    except ValueError as error:
        raise _Refused("redirects to a URL as https://HOST/PATH") from error


def _shown(url: str) -> str:
    """Without a password, or a query, which may hold a signature."""
    text = re.sub("//[^/]*@", "//...@", url[:MAX_URL].split("?")[0])
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
