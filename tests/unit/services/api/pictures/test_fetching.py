"""Pictures are fetched from named hosts alone, at addresses that were checked, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from farsight.core.config.images import parse_image_hosts
from farsight.core.errors import CapacityError, InvalidValueError
from farsight.core.images import ImageFile
from farsight.services.api.pictures.fetching import MAX_FETCHES, MAX_REDIRECTS, FetchLimits, Lookup, PictureFetcher
from tests.unit.services.api.api_support import LONG_S, until
from tests.unit.services.api.pictures.picture_host import (
    Answer,
    PictureHost,
    dripping,
    endless,
    endless_chunks,
    endless_head,
    http,
    moved,
    silent,
)
from tests.unit.services.certificates import make_certificate

SHORT = FetchLimits(max_bytes=100_000, max_waiting_bytes=250_000, timeout_s=0.5)
PATIENT = FetchLimits(max_bytes=100_000, max_waiting_bytes=250_000, timeout_s=LONG_S)


@pytest.fixture
async def host() -> AsyncIterator[PictureHost]:
    async with PictureHost().serving() as host:
        yield host


def at(host: PictureHost, limits: FetchLimits = PATIENT) -> tuple[PictureFetcher, str]:
    """A fetcher that the host is named to, and the address of its picture."""
    return fetcher_of(f"127.0.0.1:{host.port}", limits), f"http://127.0.0.1:{host.port}/a"


class Names:
    """A name server of a table; it counts questions and may change its mind."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses
        self.asked: list[str] = []

    async def __call__(self, name: str, port: int) -> list[str]:
        self.asked.append(name)
        if name not in self.addresses:
            raise OSError(f"no such name: {name}")
        found = self.addresses[name]
        return [found.pop(0)] if len(found) > 1 and name.startswith("rebinding") else found


def fetcher_of(hosts: str, limits: FetchLimits = PATIENT, lookup: Lookup | None = None) -> PictureFetcher:
    return PictureFetcher(parse_image_hosts(hosts), limits, lookup=lookup)


async def fetch(fetcher: PictureFetcher, *urls: str) -> list[bytes]:
    wanted = [ImageFile(f"messages[{index}].url", b"", b"", url) for index, url in enumerate(urls)]
    async with asyncio.timeout(LONG_S), fetcher.fetched(wanted) as files:
        return files


async def refused(fetcher: PictureFetcher, url: str, reason: str) -> str:
    with pytest.raises(InvalidValueError, match=reason) as caught:
        await fetch(fetcher, url)
    assert caught.value.field == "messages[0].url"
    assert fetcher.num_bytes == 0
    return str(caught.value)


async def test_files_come_in_their_order(host: PictureHost) -> None:
    host.answers = {"/a": http(b"first"), "/b?size=2": http(b"second")}
    fetcher = fetcher_of(f"127.0.0.1:{host.port}")
    base = f"http://127.0.0.1:{host.port}"
    assert await fetch(fetcher, f"{base}/a", f"{base}/b?size=2#part") == [b"first", b"second"]
    assert fetcher.num_bytes == 0
    for head in host.heads:
        assert "user-agent: farsight\r\n" in head.lower()
        assert not {"authorization", "cookie", "referer"} & {line.split(":")[0].lower() for line in head.splitlines()}


async def test_nothing_is_fetched_unless_hosts_are_named(host: PictureHost) -> None:
    await refused(fetcher_of(""), f"http://127.0.0.1:{host.port}/a", "--allow-image-urls")
    assert host.heads == []


NAMED = "http://pictures.example"
URLS = [
    *("http://elsewhere.example/a", "http://below.pictures.example/a", "http://pictures.example.evil.example/a"),
    *(f"{NAMED}:8080/a", "https://pictures.example:80/a", f"{NAMED}:0/a", f"{NAMED}:99999/a", f"{NAMED}:http/a"),
    *("http://127.0.0.1/a", "http://2130706433/a", "http://0x7f000001/a", "http://127.1/a", "http://0177.0.0.1/a"),
    *("http://[::1]/a", "http://[::ffff:127.0.0.1]/a", "http://[fe80::1%25eth0]/a", "http://[::1/a"),
    "http://169.254.169.254/latest/meta-data/",
    *("http://user@pictures.example/a", "http://user:secret@pictures.example/a", "http://@pictures.example/a"),
    *(
        f"{NAMED}@127.0.0.1/a",
        f"{NAMED}\\@127.0.0.1/a",
        f"{NAMED}%40127.0.0.1/a",
        "http://127.0.0.1%2fpictures.example/a",
    ),
    *(f"{NAMED}/a\r\nX-Evil: 1", "http://pictures.exa\tmple/a", f"{NAMED}/a b", f"{NAMED}/\0"),
    *("http://p\u0456ctures.example/a", "http://pictures\uff0eexample/a"),  # letters and dots that look alike
    *("file:///etc/passwd", "ftp://pictures.example/a", "gopher://pictures.example/a", "javascript:alert(1)"),
    *("//pictures.example/a", "/etc/passwd", "http:///a", "http:/pictures.example/a", ""),
    *(f"{NAMED}/{'a' * 5000}", f"http://{'a' * 300}.pictures.example/a"),
]


@pytest.mark.parametrize("url", URLS, ids=lambda url: ascii(url)[:60])
async def test_hostile_urls_are_refused_before_anything_is_looked_up(url: str) -> None:
    lookup = Names(**{"pictures.example": ["93.184.215.14"]})
    said = await refused(fetcher_of("pictures.example", lookup=lookup), url, "expected")
    assert lookup.asked == []
    assert "secret" not in said


SPECIAL = [
    *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "0.1.2.3", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%2", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2002:a00:1::", "no address", ""),
]


@pytest.mark.parametrize("address", SPECIAL)
async def test_a_name_must_have_public_addresses(address: str) -> None:
    """Also where only one of several is private."""
    for addresses in ([address], ["93.184.215.14", address]):
        lookup = Names(**{"pictures.example": addresses})
        said = await refused(fetcher_of("pictures.example", lookup=lookup), "http://pictures.example/", "public")
        assert not address or address not in said.replace("http://pictures.example/", "")


@pytest.mark.parametrize("address", ["169.254.169.254", "0.0.0.0", "224.0.0.1", "::ffff:169.254.169.254", "fe80::1"])
async def test_a_private_entry_allows_no_special_address(address: str) -> None:
    lookup = Names(**{"store.internal": [address]})
    await refused(fetcher_of("private:store.internal", lookup=lookup), "http://store.internal/", "public")


async def test_a_name_without_an_address_is_refused() -> None:
    unknown: list[dict[str, list[str]]] = [{}, {"pictures.example": []}]
    for addresses in unknown:
        lookup = Names(**addresses)
        await refused(fetcher_of("pictures.example", lookup=lookup), "http://pictures.example/", "host that")


async def test_a_private_name_is_looked_up_once_and_named_to_its_host(host: PictureHost) -> None:
    """The second answer would lead elsewhere: a connection goes to the address that was checked."""
    lookup = Names(**{"rebinding.example": ["127.0.0.1", "169.254.169.254", "169.254.169.254"]})
    host.answers = {"/a": http(b"file")}
    fetcher = fetcher_of(f"private:rebinding.example:{host.port}", lookup=lookup)
    assert await fetch(fetcher, f"http://Rebinding.Example:{host.port}/a") == [b"file"]
    assert lookup.asked == ["rebinding.example"]
    assert f"host: rebinding.example:{host.port}\r\n" in host.heads[0].lower()
    await refused(fetcher, f"http://rebinding.example:{host.port}/a", "public")
    assert len(host.heads) == 1


async def test_redirects_within_named_hosts_are_followed(host: PictureHost) -> None:
    host.answers = {
        "/a": moved("/b", 301),
        "/b": moved(f"http://127.0.0.1:{host.port}/c", 307),
        "/c": moved("d?x=1#y", 308),
        "/d?x=1": http(b"file"),
    }
    assert await fetch(*at(host)) == [b"file"]


@pytest.mark.parametrize(
    "to",
    [
        *("http://169.254.169.254/latest/meta-data/", "http://127.0.0.1:1/", "http://[::1]/", "http://[", ""),
        *(
            "http://elsewhere.example/",
            "//elsewhere.example/",
            "http://\\elsewhere.example/",
            "http://private.example/",
        ),
        *("file:///etc/passwd", "ftp://127.0.0.1/", "http://user:secret@127.0.0.1/", "http://" + "a" * 5000),
    ],
)
async def test_redirects_are_checked_like_the_first_url(host: PictureHost, to: str) -> None:
    host.answers = {"/a": moved(to)}
    lookup = Names(**{"private.example": ["10.0.0.1"]})
    fetcher = fetcher_of(f"127.0.0.1:{host.port},private.example", lookup=lookup)
    said = await refused(fetcher, f"http://127.0.0.1:{host.port}/a", "expected")
    assert len(host.heads) == 1
    assert "secret" not in said


async def test_endless_redirects_end(host: PictureHost) -> None:
    host.answers = {"/a": moved("/a")}
    await refused(*at(host), "at most 3 redirects")
    assert len(host.heads) == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (http(status=404), "not 404"),
        (http(status=500), "not 500"),
        (http(b"a", status=206), "not 206"),
        (http(status=304), "not 304"),
        (moved("", 300), "not 300"),
        (http(gzip.compress(bytes(1 << 24)), "Content-Encoding: gzip"), "without a Content-Encoding"),
        (http(b"a", "Content-Encoding: br"), "without a Content-Encoding"),
        (http(length=1 << 40), "at most 100000 bytes"),
        (http(b"short", length=500), "whole answer"),
        (http(bytes(100_001)), "at most 100000 bytes"),
        (http(b"a", "Content-Length: 5"), "whole answer"),
        (http(b"zz\r\n", "Transfer-Encoding: chunked", length=-1), "whole answer"),
        (b"", "whole answer"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "whole answer"),
        (b"HTTP/1.1 200 X\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", "whole answer"),
        (endless, "at most 100000 bytes"),
        (endless_chunks, "at most 100000 bytes"),
        (endless_head, "whole answer"),
    ],
)
async def test_hostile_answers_are_refused(host: PictureHost, answer: bytes | Answer, reason: str) -> None:
    host.answers = {"/a": answer}
    await refused(*at(host), reason)
    await until(lambda: host.num_open == 0)


@pytest.mark.parametrize("answer", [dripping, silent])
async def test_slow_hosts_are_left_in_time(host: PictureHost, answer: Answer) -> None:
    host.answers = {"/a": answer}
    await refused(*at(host, SHORT), r"within 0\.5 s")
    if answer is dripping:
        await until(lambda: host.num_open == 0)


async def test_a_slow_name_server_is_left_in_time() -> None:
    async def never(name: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    await refused(fetcher_of("pictures.example", SHORT, never), "http://pictures.example/", r"within 0\.5 s")


async def test_a_closed_port_is_an_error_without_its_address(host: PictureHost) -> None:
    lookup = Names(**{"store.internal": ["127.0.0.1"]})
    said = await refused(
        fetcher_of("private:store.internal:1", lookup=lookup), "http://store.internal:1/", "can be reached"
    )
    assert "127.0.0.1" not in said


async def test_pictures_of_one_request_have_a_bound_together(host: PictureHost) -> None:
    host.answers = {"/a": http(bytes(90_000))}
    fetcher, url = at(host)
    assert len(await fetch(fetcher, url, url)) == 2
    with pytest.raises(InvalidValueError, match="at most 250000 bytes together"):
        await fetch(fetcher, url, url, url)
    assert fetcher.num_bytes == 0


async def test_files_that_wait_have_a_bound_over_all_requests(host: PictureHost) -> None:
    host.answers = {"/a": http(bytes(90_000))}
    fetcher, url = at(host)
    async with fetcher.fetched([ImageFile("a", b"", b"", url), ImageFile("b", b"", b"", url)]) as files:
        assert fetcher.num_bytes == sum(map(len, files)) == 180_000
        with pytest.raises(CapacityError, match="limit 250000"):
            await fetch(fetcher, url)
        assert fetcher.num_bytes == 180_000
    assert fetcher.num_bytes == 0
    assert len(await fetch(fetcher, url)) == 1


async def test_one_request_does_not_take_all_turns_for_ever(host: PictureHost) -> None:
    """More fetches than there are turns, the first of which never answer: all end in their time, the next is well."""
    host.answers = {"/silent": silent, "/a": http(b"file")}
    fetcher, base = fetcher_of(f"127.0.0.1:{host.port}", SHORT), f"http://127.0.0.1:{host.port}"
    results = await asyncio.gather(
        *(fetch(fetcher, f"{base}/silent") for _ in range(2 * MAX_FETCHES)), return_exceptions=True
    )
    assert all(isinstance(each, InvalidValueError) for each in results)
    assert await fetch(fetcher_of(f"127.0.0.1:{host.port}"), f"{base}/a") == [b"file"]


async def test_a_client_that_leaves_ends_its_fetches(host: PictureHost) -> None:
    host.answers = {"/a": endless_chunks}
    fetcher, url = at(host, FetchLimits(1 << 40, 1 << 40, LONG_S))
    task = asyncio.create_task(fetch(fetcher, url))
    await until(lambda: fetcher.num_bytes > 1 << 20)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert fetcher.num_bytes == 0
    await until(lambda: host.num_open == 0)


async def test_tls_names_the_host_and_checks_its_certificate(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, "pictures.example")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, tmp_path / "key.pem")
    trusting = ssl.create_default_context(cafile=str(certificate))
    lookup = Names(**{"pictures.example": ["127.0.0.1"], "other.example": ["127.0.0.1"]})
    async with PictureHost().serving(server) as host:
        host.answers = {"/a": http(b"file"), "/plain": moved(f"http://pictures.example:{host.port}/a")}
        hosts = parse_image_hosts(f"private:pictures.example:{host.port},private:other.example:{host.port}")
        fetcher = PictureFetcher(hosts, PATIENT, lookup=lookup, tls=trusting)
        assert await fetch(fetcher, f"https://pictures.example:{host.port}/a") == [b"file"]
        assert host.names == ["pictures.example"]
        assert f"host: pictures.example:{host.port}\r\n" in host.heads[0].lower()
        await refused(fetcher, f"https://other.example:{host.port}/a", "certificate")
        await refused(fetcher, f"https://pictures.example:{host.port}/plain", "do not leave https")
        stranger = PictureFetcher(hosts, PATIENT, lookup=lookup)
        await refused(stranger, f"https://pictures.example:{host.port}/a", "certificate")
