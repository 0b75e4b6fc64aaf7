"""Runs the batches that clients have left, beside their other requests.

Every ingress replica looks for batches that are to be run, and takes one by writing its name and a time into the log
store: the next revision of a record is written once. If it dies, that time passes and another replica goes on. The
result of a line is written once too, whichever replica has computed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp

from farsight.core.errors import FarsightError, InvalidValueError
from farsight.core.kept import (
    AddParts,
    DropExpired,
    KeptObject,
    ObjectName,
    ObjectPart,
    ObjectQuery,
    PartsQuery,
    PutObject,
)
from farsight.services.api.access.keys import CURRENT, Caller
from farsight.services.api.batches.files import LINES, PART_BYTES, RUN, FileRecord
from farsight.services.api.batches.lines import BatchLine, LineChecker, LineResult, raw_lines, unsent
from farsight.services.api.batches.records import BATCH_TIER, WINDOW_S, BatchError, Batches, BatchRecord, StoredBatch
from farsight.services.api.batches.responses import RESPONSE_RUN
from farsight.services.api.batches.sender import ForecastLines, RetryPolicy, run_lines
from farsight.services.api.errors import ApiError

LEASE_S = 10.0
"""So long a batch stays with an ingress replica that says nothing more."""

LOOK_S = 1.0
"""How often a replica looks for batches, renews what it has, and sees whether one has been cancelled."""

ROOM_S, BURST = 0.02, 4
"""So often it is looked how many lines may begin, and so many do at most: those are counted before the next look, and
reading them delays no stream."""

SWEEP_S = 60.0
MAX_AT_ONCE = 4
"""Batches that a replica runs at once; they share its places."""

MAX_RESPONSES = 16
"""Responses of the background that a replica computes at once."""

MAX_ERRORS = 20
"""Wrong lines that are told of an input."""

_TURN_BYTES = 32 * 1024
"""Bytes of an input that are checked before others on the event loop have a turn."""

_THREAD_BYTES = 64 * 1024
_OUTPUT, _ERROR = b"o", b"e"
"""First byte of a kept result: which file it belongs to."""

logger = logging.getLogger(__name__)


class _Stopped(FarsightError):
    """The batch is no longer to be run here."""


@dataclass(frozen=True, slots=True)
class RunningPlace:
    """Where lines run.

    Attributes:
        app: Answers them, without asking for a key.
        caller_of: Who a tenant's lines run for; None for a tenant that is not known.
        free_places: How many more may begin now.
        max_body_bytes: As of the application.
        forecast_lines: Forecasts lines; None where outputs are not forecast.
    """

    app: ASGIApp
    caller_of: Callable[[str], Caller | None]
    free_places: Callable[[], int]
    max_body_bytes: int
    forecast_lines: ForecastLines | None = None


class BatchRunner:
    """
    Args:
        name: That of this ingress replica.
        uses_keys: Whether a batch needs a tenant.
    """

    def __init__(
        self,
        batches: Batches,
        place: RunningPlace,
        name: str,
        *,
        uses_keys: bool = False,
        retry: RetryPolicy | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        self._batches = batches
        self._store = batches.store
        self._place = place
        self._name = name
        self._uses_keys = uses_keys
        self._retry = retry or RetryPolicy()
        self._look_s = look_s
        self._room = asyncio.Semaphore(batches.files.settings.batch_in_flight)
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._swept_at = -SWEEP_S

    @property
    def _now(self) -> float:
        return self._batches.files.now()

    async def run(self) -> None:
        """Runs batches until it is cancelled; then its leases run out.

        Raises:
            FarsightError: The log store cannot be had now.
        """
        try:
            while True:
                await self._look()
                await asyncio.sleep(self._look_s)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _look(self) -> None:
        if time.monotonic() - self._swept_at >= SWEEP_S:
            self._swept_at = time.monotonic()
            await self._store.drop_expired(DropExpired(self._now))
        self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
        for kind, most, run in ((RUN, MAX_AT_ONCE, self._run_batch), (RESPONSE_RUN, MAX_RESPONSES, self._run_response)):
            await self._take(kind, most, run)

    async def _take(self, kind: str, most: int, run: Callable[[_Lease], Coroutine[Any, Any, None]]) -> None:
        """Takes what is to be run of one kind, as far as there are places."""
        num_free = most - sum(name[0] == kind for name in self._tasks)
        if num_free <= 0:
            return
        for found in (await self._store.list_objects(ObjectQuery(kind, "", 1000))).objects:
            if num_free <= 0 or (kind, found.object_id) in self._tasks:
                continue
            held = _Lease(self._batches, found, self._name)
            if await held.take():
                num_free -= 1
                self._tasks[kind, found.object_id] = asyncio.create_task(self._run_held(held, run(held)))

    async def _run_held(self, held: _Lease, run: Coroutine[Any, Any, None]) -> None:
        """Runs a batch, or a response, as long as this replica has it."""
        work = asyncio.create_task(run)
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=self._look_s)
                if not work.done() and not await held.renew():
                    work.cancel()
                    return
            work.result()
        except FarsightError as error:
            logger.warning("%s waits for another try: %s", held.batch_id, error)
        except Exception:
            logger.exception("%s waits for another try", held.batch_id)
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _run_batch(self, held: _Lease) -> None:
        batch = await self._batches.look(held.batch_id)
        if batch is None:
            if held.age_s > SWEEP_S:  # else it is being written
                await held.drop()
            return
        if not batch.record.ended:
            job = _Job(self._batches, self._place, self._room, batch)
            await job.run(self._retry, uses_keys=self._uses_keys)
        await self._store.drop_object(ObjectName(LINES, held.batch_id))
        await held.drop()

    async def _run_response(self, held: _Lease) -> None:
        found = await self._batches.responses.look(held.batch_id)
        if found is None:
            if held.age_s > SWEEP_S:  # else it is being written
                await held.drop()
            return
        caller = self._place.caller_of(found[0]) if self._uses_keys else None
        if self._uses_keys and caller is None:
            error = {"code": "server_error", "message": f"no API key belongs to the tenant {found[0]!r}"}
            await self._batches.responses.change(held.batch_id, lambda stored: stored.cut("failed", error))
        else:
            CURRENT.set(caller)
            await self._batches.responses.compute(held.batch_id, self._place.app, self._retry, self._look_s)
        await held.drop()


class _Lease:
    """That a batch, or a response of the background, is run by one ingress replica, for a while."""

    def __init__(self, batches: Batches, run: KeptObject, name: str) -> None:
        self.batch_id = run.object_id
        self._batches = batches
        self._run = run
        self._name = name
        self._until = 0.0

    @property
    def age_s(self) -> float:
        return self._batches.files.now() - self._run.created_at

    async def take(self) -> bool:
        told = json.loads(self._run.record)
        if told.get("until", 0.0) > self._batches.files.now() and told.get("holder") != self._name:
            return False
        return await self._write()

    async def renew(self) -> bool:
        """Whether the batch is still ours; writes only when a part of the time is over."""
        now = self._batches.files.now()
        if now < self._until - LEASE_S / 2:
            return True
        try:
            return await self._write()
        except FarsightError:
            return now < self._until

    async def _write(self) -> bool:
        until = self._batches.files.now() + LEASE_S
        record = json.dumps({**json.loads(self._run.record), "holder": self._name, "until": until}).encode()
        changed = replace(self._run, revision=self._run.revision + 1, record=record)
        if not (await self._batches.store.put_object(PutObject(changed))).stored:
            return False
        self._run, self._until = changed, until
        return True

    async def drop(self) -> None:
        await self._batches.store.drop_object(ObjectName(self._run.kind, self.batch_id))


class _FreePlaces:
    """Places of one batch among those that all batches of a replica share; lines begin only where others leave room.

    Args:
        room: Shared by the batches.
    """

    def __init__(self, place: RunningPlace, room: asyncio.Semaphore) -> None:
        self._place = place
        self._room = room
        self._num_free = 0
        self.release = room.release

    async def acquire(self) -> None:
        while not self._num_free:
            await asyncio.sleep(ROOM_S)
            self._num_free = min(BURST, self._place.free_places())
        self._num_free -= 1
        await self._room.acquire()


class _Job:
    """One batch, from its input to its files; everything that it has done is in the log store."""

    def __init__(self, batches: Batches, place: RunningPlace, room: asyncio.Semaphore, batch: StoredBatch) -> None:
        self._batches = batches
        self._files = batches.files
        self._place = place
        self._room = room
        self._batch_id = batch.kept.object_id
        self._owner = batch.kept.owner
        self._record = batch.record
        self._deadline = batch.kept.created_at + WINDOW_S

    async def run(self, retry: RetryPolicy, *, uses_keys: bool) -> None:
        caller = self._place.caller_of(self._owner) if uses_keys else None
        if uses_keys and caller is None:
            await self._fail([BatchError("tenant_unknown", f"no API key belongs to the tenant {self._owner!r}")])
            return
        CURRENT.set(caller)
        lines, errors = await self._read()
        if errors:
            await self._fail(errors)
            return
        await self._change(
            lambda record: (
                replace(record, total=len(lines)).at("in_progress", self._files.now())
                if record.status == "validating"
                else None
            )
        )
        expires_at = self._deadline + self._files.settings.max_age_s
        kept = KeptObject(LINES, self._batch_id, self._owner, self._files.now(), expires_at, 1, 0, b"{}")
        await self._batches.store.put_object(PutObject(kept))
        await self._run_lines(lines, retry)
        await self._finish(lines)

    async def _read(self) -> tuple[list[BatchLine], list[BatchError]]:
        try:
            data = await self._files.read(self._owner, self._record.input_file_id)
        except ApiError as error:
            return [], [BatchError("file_not_found", error.message, "input_file_id")]
        settings = self._files.settings
        return await read_lines(data, self._record.endpoint, settings.max_batch_lines, self._place.max_body_bytes)

    async def _done(self) -> set[int]:
        query = PartsQuery(LINES, self._batch_id, 0, 0, only_indices=True)
        return {part.index for part in (await self._batches.store.read_parts(query)).parts}

    async def _run_lines(self, lines: list[BatchLine], retry: RetryPolicy) -> None:
        """Runs the lines without a result; returns when they have one, or when the batch is to end."""
        done = await self._done()
        numbers = {line.custom_id: index for index, line in enumerate(lines)}
        num_done, num_failed = len(done), self._record.failed

        async def keep(results: Sequence[LineResult]) -> None:
            nonlocal num_done, num_failed
            await self._add((numbers[result.custom_id], result) for result in results)
            num_done += len(results)
            num_failed += sum(result.failed for result in results)
            completed = max(0, num_done - num_failed)
            await self._change(lambda record: replace(record, completed=completed, failed=num_failed))

        left = [line for index, line in enumerate(lines) if index not in done]
        places, forecast_lines = _FreePlaces(self._place, self._room), self._place.forecast_lines
        work = run_lines(self._place.app, left, keep, places, retry=retry, forecast_lines=forecast_lines)
        tasks = [asyncio.create_task(each) for each in (work, self._watch())]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Returns when the batch is to end before its lines have."""
        while self._files.now() < self._deadline:
            found = await self._batches.look(self._batch_id)
            if found is None:
                raise _Stopped("it has been deleted")
            if found.record.status == "cancelling":
                return
            await asyncio.sleep(LOOK_S)

    async def _add(self, results: Iterable[tuple[int, LineResult]]) -> None:
        """Keeps results by the places of their lines, with the file that each belongs to."""
        parts = (ObjectPart(index, (_ERROR if each.failed else _OUTPUT) + each.data) for index, each in results)
        await self._batches.store.add_parts(AddParts(LINES, self._batch_id, tuple(parts)))

    async def _finish(self, lines: list[BatchLine]) -> None:
        """Makes the files of what is there, and ends the batch."""
        done = await self._done()
        missing = [index for index in range(len(lines)) if index not in done]
        last = "completed"
        if missing and self._files.now() >= self._deadline:
            last = "expired"
            await self._keep_expired(lines, missing)
        elif missing:
            last = "cancelled"
        else:
            await self._change(lambda record: _unless_ended(record.at("finalizing", self._files.now()), record))
        counts = dict.fromkeys((_OUTPUT, _ERROR), 0)
        for mark, file_id, name in (
            (_OUTPUT, self._record.output_id, "output"),
            (_ERROR, self._record.error_id, "error"),
        ):
            content = self._content(mark, counts)
            first = await anext(content, None)
            if first is not None:
                filename = f"{self._batch_id}_{name}.jsonl"
                record = FileRecord(filename, "batch_output", 0)
                expires_at = self._files.now() + self._record.output_age_s
                chunks = _behind(first, content)
                await self._files.write(file_id, self._owner, record, chunks, expires_at, bounded=False)
        ended = {"completed": counts[_OUTPUT], "failed": counts[_ERROR]}
        ended |= {"has_output": counts[_OUTPUT] > 0, "has_errors": counts[_ERROR] > 0}
        await self._change(lambda record: replace(record, **ended).at(last, self._files.now()))  # type: ignore[arg-type]

    async def _keep_expired(self, lines: list[BatchLine], missing: list[int]) -> None:
        for first in range(0, len(missing), 1000):
            await self._add(
                (index, unsent(lines[index].custom_id, "batch_expired", "The batch's time was over."))
                for index in missing[first : first + 1000]
            )

    async def _content(self, mark: bytes, counts: dict[bytes, int]) -> AsyncGenerator[bytes, None]:
        """The results that belong to one file, in the order of the lines; counts them."""
        index = 0
        while parts := (
            await self._batches.store.read_parts(PartsQuery(LINES, self._batch_id, index, PART_BYTES))
        ).parts:
            index = parts[-1].index + 1
            for part in parts:
                if part.data[:1] == mark:
                    counts[mark] += 1
                    yield part.data[1:]

    async def _fail(self, errors: list[BatchError]) -> None:
        await self._change(lambda record: replace(record, errors=tuple(errors)).at("failed", self._files.now()))

    async def _change(self, how: Callable[[BatchRecord], BatchRecord | None]) -> None:
        """Changes what is kept of the batch; raises _Stopped if it has been deleted."""
        changed = await self._batches.change(self._batch_id, how)
        if changed is None:
            raise _Stopped("it has been deleted")
        self._record = changed.record


async def read_lines(
    data: bytes, endpoint: str, max_lines: int, max_line_bytes: int
) -> tuple[list[BatchLine], list[BatchError]]:
    """Reads the requests of an input, or what is wrong with it; others on the event loop have their turns."""
    lines: list[BatchLine] = []
    errors: list[BatchError] = []
    checker = LineChecker(tier=BATCH_TIER)
    num_bytes = 0
    for number, raw in raw_lines(data):
        if len(errors) >= MAX_ERRORS:
            break
        num_bytes += len(raw)
        if num_bytes > _TURN_BYTES:
            num_bytes = 0
            await asyncio.sleep(0)
        try:
            line = await _checked(checker, number, raw, max_line_bytes)
        except InvalidValueError as error:
            errors.append(BatchError("invalid_line", str(error), line=number))
            continue
        if line.url != endpoint:
            message = f"line {number}, url: got {line.url!r}, expected {endpoint!r}, the endpoint of the batch"
            errors.append(BatchError("mismatched_url", message, "url", number))
        if len(lines) >= max_lines:
            return [], [BatchError("too_many_lines", f"the input has more than {max_lines} requests", line=number)]
        lines.append(line)
    if not lines and not errors:
        errors.append(BatchError("empty_file", "the input has no request", "input_file_id"))
    return lines, errors


async def _checked(checker: LineChecker, number: int, raw: bytes, max_bytes: int) -> BatchLine:
    if len(raw) > max_bytes:
        raise InvalidValueError(f"line {number}", f"{len(raw)} bytes", f"at most {max_bytes} bytes")
    if len(raw) < _THREAD_BYTES:
        return checker.line(number, raw)
    return await asyncio.to_thread(checker.line, number, raw)


def _unless_ended(changed: BatchRecord, record: BatchRecord) -> BatchRecord | None:
    return None if record.ended or record.status == "finalizing" else changed


async def _behind(first: bytes, others: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    yield first
    async for each in others:
        yield each
