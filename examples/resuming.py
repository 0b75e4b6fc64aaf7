"""A stream that goes on although its connection breaks: a transport for httpx, and so for every client built on it.

    python examples/resuming.py http://127.0.0.1:8000/v1/completions '{"model": "farsight-embedded", "prompt": "hello"}'

prints the text as it comes. Whatever part of the server dies meanwhile, nothing is missing and nothing comes twice.
The key, if the server asks for one, is read from FARSIGHT_API_KEY.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator

import httpx

RESUME_S = 60.0
"""The server keeps a stream for so long without a client."""

STREAM_HEADER = "X-Farsight-Stream"
RETRY_S = 0.1
AGAIN = (429, 502, 503, 504)
"""Statuses after which the same request may be sent again."""

_ID = re.compile(rb"^id: (\S+)", re.MULTILINE)


class ResumingTransport(httpx.BaseTransport):
    """Asks for resumable streams and goes on with them; other requests pass unchanged.

    Args:
        inner: Carries the requests.
        patience_s: How long a server that cannot be reached is tried again.
    """

    def __init__(self, inner: httpx.BaseTransport | None = None, patience_s: float = RESUME_S) -> None:
        self._inner = inner or httpx.HTTPTransport()
        self._patience_s = patience_s

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "POST" or not _asks_for_stream(request):
            return self._inner.handle_request(request)
        request.headers["X-Farsight-Resumable"] = "true"
        # Until the answer begins nothing of it is known here, so the request is simply sent again.
        response = self.send(request)
        if STREAM_HEADER not in response.headers:
            return response  # an error, or a server without resumable streams
        resumed = _ResumedStream(self, request, response)
        return httpx.Response(response.status_code, headers=response.headers, stream=resumed)

    def send(self, request: httpx.Request) -> httpx.Response:
        """The answer to the request, sent again while the server cannot be reached."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                response = self._inner.handle_request(request)
                if response.status_code not in AGAIN or time.monotonic() > deadline:
                    return response
                wait_s = float(response.headers.get("Retry-After", RETRY_S))
                response.close()
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
                wait_s = RETRY_S
            time.sleep(min(wait_s, 1.0))

    def close(self) -> None:
        self._inner.close()


class _ResumedStream(httpx.SyncByteStream):
    """The bytes of all connections as of one, event by event."""

    def __init__(self, transport: ResumingTransport, request: httpx.Request, response: httpx.Response) -> None:
        self._transport = transport
        self._request = request
        self._response = response
        self._stream_id = response.headers[STREAM_HEADER]
        names = ("host", "authorization", "x-api-key", "user-agent")
        self._headers = {name: request.headers[name] for name in names if name in request.headers}
        self._last_id = ""

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                for event in _events(self._response):
                    found = _ID.search(event)
                    if found:
                        self._last_id = found[1].decode()
                    yield event
                    if found is None or b"\ndata: [DONE]" in event:
                        return  # the end, or an error that is not part of the stream
            except httpx.TransportError:
                pass
            self._response.close()
            if not self._go_on():
                return

    def _go_on(self) -> bool:
        """Connects again behind the last event; returns False if it was the last one of the stream."""
        headers = {**self._headers, **({"Last-Event-ID": self._last_id} if self._last_id else {})}
        url = self._request.url.copy_with(path=f"/v1/streams/{self._stream_id}", query=None)
        request = httpx.Request("GET", url, headers=headers, extensions=self._request.extensions)
        self._response = self._transport.send(request)
        if self._response.status_code == 404 and not self._last_id:
            # The server has lost the stream, but nothing of it was read: the request may be sent again.
            self._response.close()
            self._response = self._transport.send(self._request)
            self._stream_id = self._response.headers.get(STREAM_HEADER, "")
        if self._response.status_code not in (200, 204):
            self._response.read()
            raise httpx.ReadError(f"the stream cannot be resumed: {self._response.text}", request=request)
        return self._response.status_code == 200

    def close(self) -> None:
        self._response.close()


def _events(response: httpx.Response) -> Iterator[bytes]:
    """Complete events; what a broken connection left of one is dropped."""
    rest = b""
    stream = response.stream
    assert isinstance(stream, httpx.SyncByteStream)
    for data in stream:
        *complete, rest = (rest + data).split(b"\n\n")
        for event in complete:
            yield event + b"\n\n"


def _asks_for_stream(request: httpx.Request) -> bool:
    try:
        body = json.loads(request.read())
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("stream") is True


def texts(url: str, body: dict[str, object], key: str = "") -> Iterator[str]:
    """The text of a completion, or of a chat, as it comes.

    Raises:
        httpx.HTTPStatusError: The server refused the request.
        RuntimeError: The stream ended with an error.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(30.0, read=RESUME_S)
    with (
        httpx.Client(transport=ResumingTransport(), timeout=timeout) as client,
        client.stream("POST", url, json={**body, "stream": True}, headers=headers) as response,
    ):
        if response.is_error:
            response.read()
            response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                yield choice.get("text") or choice.get("delta", {}).get("content") or ""


def main() -> None:
    url, body = sys.argv[1:]
    for text in texts(url, json.loads(body), os.environ.get("FARSIGHT_API_KEY", "")):
        sys.stdout.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
