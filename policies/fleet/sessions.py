"""Sessions: which requests are turns of one conversation, and what each conversation has cost so far.

A session is found, not demanded. A request that names its session, or the answer that it goes on from, belongs to it.
One that names neither belongs to the session whose latest prompt it continues: the last full block of that prompt is
one of its own blocks, and a block's hash covers all tokens before it. Tenants are apart: names and hashes of one are
never looked up for another.

Memory is bounded. Beyond ``MAX_SESSIONS`` the session that has been idle the longest is forgotten; the sums of its
application keep what it had. Beyond ``MAX_APPLICATIONS`` applications count together.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError
from farsight.core.messages.live import ApplicationRow, SessionCounts, SessionRow, SessionsQuery, SessionsView
from farsight.core.messages.plans import FinishedSequence
from farsight.core.request import Request, SequenceStatus

MAX_SESSIONS = 4096
"""Most sessions that are kept; each takes about 1 KB."""

MAX_APPLICATIONS = 256
"""Most applications that are counted apart; an application is what a client's requests say that it is."""

OTHERS = "(others)"
"""The name under which further applications are counted together."""

KEPT_ENDS = 4
"""Latest prompts of a session that a turn may continue: clients retry, and go back a turn."""

LATE_S = 10.0
"""Seconds after which a turn that is not in flight has ended: its next attempt would have come by then."""

SHOWN_CHARS = 128
"""Most characters of a name that are kept to be shown; the whole name still tells sessions apart."""


@dataclass(slots=True)
class _Session:
    """One conversation.

    Attributes:
        ends: Hashes of the last full blocks of its latest prompts, and the tokens up to there.
        answers: Ids of its latest answers.
        num_open: Its requests that have not ended.
        busy_since: Instant since which at least one of them has been open.
    """

    row: SessionRow
    ends: OrderedDict[int, int] = field(default_factory=OrderedDict)
    answers: OrderedDict[str, None] = field(default_factory=OrderedDict)
    num_open: int = 0
    busy_since: float = 0.0


@dataclass(slots=True)
class _Open:
    """A request that has not ended.

    Attributes:
        seen_at: Latest instant when it was known to be in flight.
        is_turn: False for further choices of an answer, whose prompt counts once.
    """

    key: tuple[str, str]
    ingress_id: str
    seen_at: float
    prompt_len: int
    new_len: int
    is_turn: bool


class SessionTable:
    """The sessions of a service; O(blocks of the prompt) for each request, at worst.

    Args:
        block_size: Tokens of a block of ``Request.prefix_hashes``.
        max_sessions: As ``MAX_SESSIONS``.
    """

    def __init__(self, block_size: int, max_sessions: int = MAX_SESSIONS) -> None:
        self._block_size = block_size
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()  # longest without an event first
        self._idle: OrderedDict[tuple[str, str], None] = OrderedDict()  # without an open request, the longest so first
        self._by_end: dict[str, dict[int, tuple[str, str]]] = {}  # by tenant, then by hash
        self._by_answer: dict[tuple[str, str], tuple[str, str]] = {}  # by tenant and id of the answer
        self._open: dict[str, _Open] = {}
        self._applications: dict[str, SessionCounts] = {}
        self._num_found = 0
        self.num_forgotten = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def began(self, request: Request, now: float) -> None:
        """Books the beginning of a turn; a further attempt of a request that is open changes nothing."""
        if request.request_id in self._open:
            return
        hashes = request.prefix_hashes
        key, known_len = self._find(request)
        session = self._sessions.get(key)
        if session is None:
            session = self._new(key, request, now)
        origin = request.origin
        is_turn = origin is None or origin.response_id not in session.answers
        is_back = not session.num_open and session.row.counts.turns > 0
        for counts in self._counted(session):
            counts.turns += is_turn
            counts.away_s += max(0.0, now - session.row.last_at) if is_back else 0.0
        if not session.num_open:
            session.busy_since = now
        self._touch(key, session, 1, now)
        if hashes:
            self._end_at(key, session, hashes)
        if origin is not None:
            self._answer_of(key, session, origin.response_id)
        new_len = max(1, request.prompt_len - known_len)
        self._open[request.request_id] = _Open(key, request.ingress_id, now, request.prompt_len, new_len, is_turn)
        self._shrink()

    def ended(self, finished: FinishedSequence, now: float) -> None:
        """Books the end of a turn; a request that is not open changes nothing."""
        if finished.status >= SequenceStatus.FINISHED_ABORTED:
            self.left([finished.request_id], now)
            return
        turn = self._open.pop(finished.request_id, None)
        if turn is None:
            return
        session = self._sessions[turn.key]
        for counts in self._counted(session):
            if turn.is_turn:
                counts.answers += 1
                counts.prompt_tokens += turn.prompt_len
                counts.new_tokens += turn.new_len
                counts.computed_tokens += turn.prompt_len - finished.cached_len
                counts.restored_tokens += 0 if finished.brought is None else finished.brought.num_tokens
            counts.output_tokens += finished.output_len
            counts.gpu_s += finished.gpu_s
        self._touch(turn.key, session, -1, now)

    def left(self, request_ids: Iterable[str], now: float) -> None:
        """Books that clients have left before their answers ended."""
        for request_id in request_ids:
            turn = self._open.pop(request_id, None)
            if turn is not None:
                self._touch(turn.key, self._sessions[turn.key], -1, now)

    def look(self, in_flight: Callable[[str], bool], now: float) -> None:
        """Books that requests which have not been in flight for ``LATE_S`` have ended, whatever ended them. O(open).

        Between two attempts a request is not in flight.
        """
        for request_id, turn in self._open.items():
            if in_flight(request_id):
                turn.seen_at = now
        self.left([each for each, turn in self._open.items() if turn.seen_at < now - LATE_S], now)

    def lose(self, ingress_id: str, now: float) -> None:
        """Books that an ingress replica has died, and its clients with it."""
        self.left([each for each, turn in self._open.items() if turn.ingress_id == ingress_id], now)

    def told(self, request_id: str) -> Facts:
        """Returns an open request's session, its turn, and the tokens that it adds; nothing of another request."""
        turn = self._open.get(request_id)
        if turn is None:
            return {}
        row = self._sessions[turn.key].row
        return {"session": row.name, "turn": row.counts.turns, "new_tokens": turn.new_len}

    def view(self, query: SessionsQuery, now: float) -> SessionsView:
        """Returns the sessions with the latest events first, and the sums of each application."""
        found = (each.row for each in reversed(self._sessions.values()))
        chosen = (row for row in found if query.tenant is None or row.tenant == query.tenant)
        rows = tuple(itertools.islice(chosen, query.max_rows))
        shown = () if query.tenant is not None else tuple(self.applications())
        return SessionsView(rows, shown, now, len(self._sessions), self.num_forgotten)

    def rows(self) -> Iterator[SessionRow]:
        """Yields every session that is kept, the one without an event for the longest first."""
        return (each.row for each in self._sessions.values())

    def totals(self) -> SessionCounts:
        """Returns the sums over all sessions, forgotten ones included."""
        total = SessionCounts()
        for each in self._applications.values():
            total.add(each)
        return total

    def applications(self) -> Iterator[ApplicationRow]:
        """Yields each application with the sums over its sessions, forgotten ones included."""
        return itertools.starmap(ApplicationRow, self._applications.items())

    def _counted(self, session: _Session) -> tuple[SessionCounts, SessionCounts]:
        """Returns the sums that an event of the session belongs to."""
        return session.row.counts, self._applications[session.row.application]

    def _touch(self, key: tuple[str, str], session: _Session, num_more: int, now: float) -> None:
        session.num_open += num_more
        if session.num_open:
            self._idle.pop(key, None)
        else:
            self._idle[key] = None
            for counts in self._counted(session):
                counts.in_model_s += now - session.busy_since
        session.row.num_open, session.row.last_at = session.num_open, now
        self._sessions.move_to_end(key)

    def _find(self, request: Request) -> tuple[tuple[str, str], int]:
        """Returns the key of the request's session, new or not, and the tokens that it continues."""
        hashes, tenant = request.prefix_hashes, request.tenant
        earlier = self._by_answer.get((tenant, request.continues)) if request.continues else None
        if earlier is not None or request.session:
            key = earlier or (tenant, f"={request.session}")
            session = self._sessions.get(key)
            ends = {} if session is None else session.ends
            return key, next((ends[each] for each in reversed(hashes) if each in ends), 0)
        ends_of = self._by_end.get(tenant, {})
        if not ends_of.keys().isdisjoint(hashes):
            end = next(each for each in reversed(hashes) if each in ends_of)
            return ends_of[end], self._sessions[ends_of[end]].ends[end]
        self._num_found += 1
        return (tenant, f"#{self._num_found}"), 0

    def _new(self, key: tuple[str, str], request: Request, now: float) -> _Session:
        application = request.application[:SHOWN_CHARS]
        if application not in self._applications and len(self._applications) >= MAX_APPLICATIONS:
            application = OTHERS
        self._applications.setdefault(application, SessionCounts()).sessions += 1
        name = request.session[:SHOWN_CHARS] or key[1]
        row = SessionRow(name, key[0], application, bool(request.session), first_at=now, last_at=now)
        session = self._sessions[key] = _Session(row)
        return session

    def _end_at(self, key: tuple[str, str], session: _Session, hashes: Sequence[int]) -> None:
        """Notes where the prompt ends, so that the next turn is found by it."""
        end, tenant = hashes[-1], key[0]
        session.ends[end] = len(hashes) * self._block_size
        session.ends.move_to_end(end)
        if not session.row.is_named:
            self._by_end.setdefault(tenant, {})[end] = key
        if len(session.ends) > KEPT_ENDS:
            old, _ = session.ends.popitem(last=False)
            self._forget_end(key, old)

    def _forget_end(self, key: tuple[str, str], end: int) -> None:
        """Finds the session by this end no more, unless another one has the same end since."""
        ends_of = self._by_end.get(key[0], {})
        if ends_of.get(end) == key:
            del ends_of[end]
            if not ends_of:
                del self._by_end[key[0]]

    def _answer_of(self, key: tuple[str, str], session: _Session, response_id: str) -> None:
        """Notes the id of an answer, by which a later request may say that it goes on."""
        self._by_answer[key[0], response_id] = key
        session.answers[response_id] = None
        if len(session.answers) > KEPT_ENDS:
            old, _ = session.answers.popitem(last=False)
            self._by_answer.pop((key[0], old), None)

    def _shrink(self) -> None:
        """Forgets sessions beyond the bound that have no open request; what is open is bounded where it is let in."""
        while self._idle and len(self._sessions) > self._max_sessions:
            key, _ = self._idle.popitem(last=False)
            session = self._sessions.pop(key)
            for response_id in session.answers:
                self._by_answer.pop((key[0], response_id), None)
            for end in session.ends:
                self._forget_end(key, end)
            self.num_forgotten += 1

    def check_integrity(self) -> None:
        """Raises IntegrityError unless open requests, ends and bounds agree."""
        counted: dict[tuple[str, str], int] = {}
        for turn in self._open.values():
            counted[turn.key] = counted.get(turn.key, 0) + 1
        is_open = {key: each.num_open for key, each in self._sessions.items() if each.num_open}
        if counted != is_open or self._idle.keys() != self._sessions.keys() - is_open:
            raise IntegrityError("sessions and their open requests disagree")
        found = ((tenant, *each) for tenant, ends_of in self._by_end.items() for each in ends_of.items())
        for tenant, end, key in found:
            if key[0] != tenant or end not in self._sessions[key].ends:
                raise IntegrityError(f"session {key} is found by an end that it does not have")
        if any(len(each.ends) > KEPT_ENDS for each in self._sessions.values()):
            raise IntegrityError("a session keeps too many ends")
