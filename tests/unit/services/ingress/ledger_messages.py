"""What the ledger of an ingress replica is told in tests."""

from __future__ import annotations

from core.messages.requests import AnnounceReply, Key, Placed, Refusal, SubmitReply
from core.messages.tokens import TokenDelta
from core.request import Request, SamplingParams
from services.ingress.ledger import OpenStream, RequestLedger


def request(name: str = "r", prompt: int = 4, out: int = 6) -> Request:
    return Request(name, 0, "i", (1,) * prompt, SamplingParams(out))


def stream(name: str = "r", prompt: int = 4, out: int = 6) -> OpenStream:
    return OpenStream(request(name, prompt, out))


def delta(name: str, start: int, *tokens: int, attempt: int = 0, finish: str | None = None) -> TokenDelta:
    return TokenDelta(name, attempt, start, tokens, "x" * len(tokens), finish, "broken" if finish == "error" else None)


def placed(name: str, attempt: int = 0, replica: str = "a", incarnation: str = "w1") -> SubmitReply:
    return SubmitReply((Placed(name, attempt, replica, incarnation),), ())


def refusal(name: str, attempt: int = 0) -> Refusal:
    return Refusal(name, attempt, "max_tokens", "too long")


def lost(*keys: Key) -> AnnounceReply:
    return AnnounceReply(lost=keys, refusals=(), replicas=())


def running(*names: str, replica: str = "a") -> RequestLedger:
    """A ledger whose requests have been sent and placed."""
    ledger = RequestLedger("i")
    for name in names:
        ledger.open(stream(name))
    ledger.take_outgoing()
    for name in names:
        ledger.submitted(placed(name, replica=replica))
    return ledger


def receive(ledger: RequestLedger, *deltas: TokenDelta, now: float = 0.0) -> list[TokenDelta]:
    return ledger.receive("a", "w1", deltas, now)


def taken(ledger: RequestLedger) -> list[tuple[str, int, tuple[int, ...]]]:
    """(id, attempt, known output) of what goes out; aborts are not expected."""
    requests, aborts = ledger.take_outgoing()
    assert aborts == ()
    return [(each.request_id, each.attempt, each.output_ids) for each in requests]
