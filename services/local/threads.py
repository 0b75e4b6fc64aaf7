"""A service in this process for callers that do not await: its event loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from farsight.core.config.load import FarsightConfig
from farsight.core.errors import FarsightError
from farsight.services.launch.launch import LocatedModel
from farsight.services.local.service import LocalService, local_service

T = TypeVar("T")
_END: Any = object()


class ServiceThread:
    """A ``LocalService`` that any thread may call; the constructor returns when it is up.

    Args:
        model: As for ``local_service``.

    Attributes:
        service: Its coroutines run through ``call`` alone, and its generators through ``iterate``.

    Raises:
        FarsightError: As ``local_service``.
    """

    def __init__(self, config: FarsightConfig, model: LocatedModel | None = None) -> None:
        self._config, self._model = config, model
        self._calls: set[asyncio.Task[Any]] = set()
        self._up: concurrent.futures.Future[LocalService] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="farsight", daemon=True)
        self._thread.start()
        self.service = self._up.result()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with local_service(self._config, self._model) as service:
                self._up.set_result(service)
                await self._over.wait()
                for call in self._calls:
                    call.cancel()
                await asyncio.gather(*self._calls, return_exceptions=True)
        except Exception as error:
            if self._up.done():
                raise
            self._up.set_exception(error)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what the coroutine returns; an interrupt of this thread cancels it.

        Raises:
            FarsightError: The service has been closed.
        """
        if not self._thread.is_alive():
            work.close()
            raise FarsightError("this model has been closed")
        future = asyncio.run_coroutine_threadsafe(self._noted(work), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise FarsightError("this model has been closed") from error
        except BaseException:
            future.cancel()
            raise

    async def _noted(self, work: Coroutine[Any, Any, T]) -> T:
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        try:
            return await work
        finally:
            self._calls.discard(call)

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yields what the generator yields, and closes it at the end or when the reader leaves."""
        try:
            while (item := self.call(_next(items))) is not _END:
                yield item
        finally:
            if self._thread.is_alive():
                self.call(items.aclose())

    def close(self) -> None:
        """Ends what runs and frees the model; further calls are refused. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items, _END)
