"""Describes each scheduling decision in a plain sentence, for users who ask why their request waited."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farsight.core.decisions import Decision, Facts
from farsight.services.words import counted


def sentence(decision: Decision) -> str:
    """One or two sentences that describe a decision; for an unknown kind, its name and its facts."""
    known = _SENTENCES.get(decision.kind)
    if known is None:
        name = decision.kind.replace("_", " ").capitalize()
        facts = ", ".join(f"{name} {_number(value)}" for name, value in decision.facts.items())
        return f"{name}: {facts}." if facts else f"{name}."
    return _FILLED.vformat(known, (), decision.facts) if isinstance(known, str) else known(decision.facts)


class _Filled(string.Formatter):
    """Fills a sentence: ``{name}`` is a fact or one of ``_CLAUSES``, ``{name:n}`` its number, ``{name:s}`` its seconds.

    ``{name:mean}`` is a mean of tokens; any other word behind the colon is the noun that the fact counts.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return (field_name, kwargs), field_name

    def format_field(self, value: tuple[str, Facts], format_spec: str) -> str:
        name, facts = value
        match format_spec:
            case "":
                return _CLAUSES[name](facts) if name in _CLAUSES else str(facts.get(name, "?"))
            case "n":
                return _count(facts, name)
            case "s":
                return _seconds(facts, name)
            case "mean":
                return _mean(facts, name)
        return _plural(facts, name, format_spec)


_FILLED = _Filled()


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:z,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _count(facts: Facts, name: str) -> str:
    value = facts.get(name, 0)
    return value if isinstance(value, str) else f"{value:z,.0f}"  # z: no -0


def _plural(facts: Facts, name: str, noun: str) -> str:
    value = facts.get(name, 0)
    return f"{value} {noun}s" if isinstance(value, str) else counted(value, noun)


def _tokens(facts: Facts, name: str) -> str:
    return _plural(facts, name, "token")


def _mean(facts: Facts, name: str) -> str:
    """A number of tokens that may be a fraction."""
    text = _number(facts.get(name, 0))
    return f"{text} token{'' if text == '1' else 's'}"


def _seconds(facts: Facts, name: str) -> str:
    value = facts.get(name, 0.0)
    if isinstance(value, str):
        return value
    if value == float("inf"):
        return "unbounded"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


_MOVES = {"drain": "which drains", "starved head": "where it could not run yet"}
"""Why requests move, by ``Moved.reason``."""


def _placed(facts: Facts) -> str:
    said = _where(facts)
    if "session" not in facts:
        return said
    new = f"{_tokens(facts, 'new_tokens')} of the prompt {'is' if facts.get('new_tokens') == 1 else 'are'} new to it"
    return f"{said} It is turn {_number(facts.get('turn', 1))} of session {facts['session']}; {new}."


def _where(facts: Facts) -> str:
    waited = f" after {_seconds(facts, 'waited_s')} with no replica available" if "waited_s" in facts else ""
    if "moved_from" in facts:
        there = f"{_seconds(facts, 'waited_there_s')} in the queue of replica {facts['moved_from']}"
        waited = f" after {there} ({_MOVES.get(str(facts.get('because')), 'room elsewhere')})"
    where = f"The router placed it on replica {facts.get('replica', '?')}{waited}"
    reason = str(facts.get("reason", ""))
    if "batch_size" in facts:
        return f"{where}. {_batch(facts)}"
    if reason in _E2_REASONS:
        cost_s = sum(float(facts.get(name, 0.0)) for name in ("load_s", "evict_s", "prefill_s"))
        parts = (
            f"{_seconds(facts, 'load_s')} of load on the replica, {_seconds(facts, 'evict_s')} for evictions, "
            f"{_seconds(facts, 'prefill_s')} to prefill the rest of the prompt"
        )
        cached = f"{_tokens(facts, 'hit_len')} of the prompt {'is' if facts.get('hit_len') == 1 else 'are'}"
        total = _seconds({"cost_s": cost_s}, "cost_s")
        why = f"{reason}: {_E2_REASONS[reason]}"
        return f"{where} ({why}). {cached} believed cached there; predicted cost {total}: {parts}."
    if "memory_s" in facts:
        return f"{where} ({reason}). {_forecast_price(facts)}"
    if "work_tokens" in facts:
        least, most = _tokens(facts, "work_tokens"), _count(facts, "most_work_tokens")
        beside = "the only one" if facts.get("num_replicas") == 1 else f"the busiest of {_count(facts, 'num_replicas')}"
        busiest = "" if beside == "the only one" else f"; {beside} had {most}"
        return f"{where}, {'the one with the least work' if busiest else beside}: {least} of work in flight{busiest}."
    return f"{where} ({reason})."


def _batch(facts: Facts) -> str:
    """The batch of a request in batch mode: what it holds, why no more, and why it ran before the others."""
    prompt, output = _tokens(facts, "batch_len"), _tokens(facts, "generation_len")
    shape = (
        f"An idle worker pulled a batch of {_count(facts, 'batch_size')}: longest prompt {prompt}, "
        f"longest predicted output {output}."
    )
    parts = [shape, _counted(facts), _waste(facts), _bin(facts), _ratio(facts)]
    return " ".join(part for part in parts if part)


def _counted(facts: Facts) -> str:
    """Returns the output length that this request counted with when its batch was formed, and where that is from."""
    if "counted_tokens" not in facts:
        return ""
    by = str(facts.get("counted_by"))
    whence = {"history": "the mean of earlier outputs", "max_tokens": "its limit; no length was predicted"}
    return f"This request counted with {_tokens(facts, 'counted_tokens')} of output ({whence.get(by, by)})."


def _waste(facts: Facts) -> str:
    if "waste_tokens" not in facts:
        return ""
    limit = _count(facts, "waste_limit_tokens")
    wasted = f"Wasted memory accesses: {_tokens(facts, 'waste_tokens')}, below the limit of {limit}"
    if "next_waste_tokens" not in facts:
        return f"{wasted}."
    room = f" of {_count(facts, 'memory_limit_tokens')}" if "memory_limit_tokens" in facts else ""
    memory = f"{_tokens(facts, 'next_memory_tokens')} of KV{room}"
    return f"{wasted}; with the nearest request that still waits, {_count(facts, 'next_waste_tokens')} and {memory}."


def _bin(facts: Facts) -> str:
    if "bin" not in facts:
        return ""
    last = f"to {_count(facts, 'bin_to_tokens')}" if "bin_to_tokens" in facts else "or more"
    which = f"bin {_count(facts, 'bin')} of {_count(facts, 'num_bins')}"
    full = f"{_count(facts, 'full_size')} {'fills' if facts.get('full_size') == 1 else 'fill'} a batch"
    return f"It is of {which}, {_count(facts, 'bin_from_tokens')} {last} predicted tokens; {full}."


def _ratio(facts: Facts) -> str:
    if "response_ratio" not in facts:
        return ""
    queued, service = _seconds(facts, "queued_s"), _seconds(facts, "service_s")
    ratio = f"{float(facts['response_ratio']):.2f}"
    number = facts.get("num_rivals", 0)
    others = "of the other batch" if number == 1 else f"of the longest in the queue of {_count(facts, 'num_rivals')}"
    rivals = f"; {others}: {facts.get('rival_ratios')}" if number else ""
    return f"Response ratio ({queued} queued + {service} predicted) / {service} = {ratio}{rivals}."


def _forecast_price(facts: Facts) -> str:
    """The terms of the price that E2 with forecasts computed, as a sentence."""
    names = ("queue_s", "prefill_s", "decode_s", "evict_s", "memory_s")
    total = _seconds({"cost_s": sum(float(facts.get(name, 0.0)) for name in names)}, "cost_s")
    queue, prefill, decode, evict, memory = (_seconds(facts, name) for name in names)
    cached = f"{_tokens(facts, 'hit_len')} of the prompt {'is' if facts.get('hit_len') == 1 else 'are'}"
    return (
        f"{cached} believed cached there, {_tokens(facts, 'predicted_len')} of output predicted; predicted cost to it "
        f"and the requests there {total}: {queue} for prompts queued before it, {prefill} for its own prompt, "
        f"{decode} for shared decoding steps, {evict} for evictions, {memory} until its KV fits."
    )


_E2_REASONS = {
    "exploit": "most of the prompt is cached there",
    "explore": "the lowest predicted cost of all replicas",
    "balance": "it mostly decodes and has compute to spare",
    "rebalance": "the replica that caches the prompt is too busy",
}


def _standing(facts: Facts) -> str:
    """The rank that the order gives the request, as a clause after a semicolon; empty if the order records none."""
    if "level" in facts:
        used = f", {_seconds(facts, 'attained_s')} of it used" if facts.get("attained_s") else ""
        return f"; level {_count(facts, 'level')}, quantum {_seconds(facts, 'quantum_s')}{used}"
    if "response_ratio" in facts:
        ratio, service = _number(facts["response_ratio"]), _seconds(facts, "service_s")
        return f"; response ratio {ratio}, predicted service time {service}"
    if "rank_s" in facts:
        aged = f", {_seconds(facts, 'aged_rank_s')} after ageing" if "aged_rank_s" in facts else ""
        rank = f"rank {_seconds(facts, 'rank_s')}{aged} (lower goes first)"
        return f"; {rank}, predicted remaining time {_seconds(facts, 'expected_s')}"
    if "hit_group" in facts:
        group, slots = _count(facts, "hit_group"), _plural(facts, "group_slots", "slot")
        return f"; hit group {group} with {slots} ({_tokens(facts, 'cached_tokens')} cached)"
    return ""


def _room(facts: Facts) -> str:
    """The KV memory that admission counted, without a full stop; empty if it recorded none."""
    limit = f"at most {_count(facts, 'limit_tokens')}"
    if "longest_tokens" in facts:
        return f"KV memory lasts for all requests at their longest, {_tokens(facts, 'longest_tokens')}, {limit}"
    if "predicted_peak_tokens" in facts:
        capacity = f" of {_count(facts, 'capacity_tokens')}" if "capacity_tokens" in facts else ""
        return f"KV memory is predicted to peak at {_tokens(facts, 'predicted_peak_tokens')}, {limit}{capacity}"
    if "held_tokens" in facts:
        used = "is" if facts.get("held_tokens") == 1 else "are"
        return f"{_tokens(facts, 'held_tokens')} of KV {used} in use, {limit} of {_count(facts, 'capacity_tokens')}"
    return ""


def _queue(facts: Facts) -> str:
    places = facts.get("num_admitted")
    have = "1 request is admitted" if places == 1 else f"{_count(facts, 'num_admitted')} requests are admitted"
    return f"{have}, {_count(facts, 'num_waiting')} wait{'s' if facts.get('num_waiting') == 1 else ''}"


def _place(facts: Facts) -> str:
    return _queue(facts) + _standing(facts)


def _arrived(facts: Facts) -> str:
    resumed = f" with {_tokens(facts, 'resumed_tokens')} of earlier output" if "resumed_tokens" in facts else ""
    return f"Reached the scheduler of its replica{resumed}: {_place(facts)}."


def _waits(facts: Facts) -> str:
    tail = f" ({_place(facts)})." if "num_admitted" in facts else "."
    match facts.get("reason"):
        case "memory":
            room = _room(facts)
            needs = f"Waits for KV memory: it needs {_tokens(facts, 'needed_tokens')}"
            return f"{needs}{'; ' + room if room else ''}{tail}"
        case "places":
            slots = "the only one is" if facts.get("max_num_seqs") == 1 else f"all {_count(facts, 'max_num_seqs')} are"
            return f"Waits for a batch slot: {slots} taken{tail}"
        case "worker":
            return f"Waits for the worker, which is not running{tail}"
        case "replica":
            return "Waits for a replica: none accepts requests now."
    return f"Waits behind other requests{tail}"


def _admitted(facts: Facts) -> str:
    waited = float(facts.get("waited_s", 0.0))
    when = "Admitted at once" if waited < 1e-3 else f"Admitted after a wait of {_seconds(facts, 'waited_s')}"
    room = _room(facts)
    return f"{when} ({_place(facts)}){'; ' + room if room else ''}."


def _short(facts: Facts) -> str:
    return f"KV memory is short by {_plural(facts, 'short_blocks', 'block')}" if facts.get("short_blocks") else ""


def _preempted(facts: Facts) -> str:
    why = _short(facts) or "another request gets its slot"
    dropped = "is" if facts.get("computed_tokens") == 1 else "are"
    again = f"its {_tokens(facts, 'computed_tokens')} of KV {dropped} dropped and will be computed again"
    return f"Preempted: {why}; {again} ({_place(facts)})."


def _next_turn(facts: Facts) -> str:
    """The next turn that ENST predicts, as a clause after a semicolon."""
    if "enst_s" not in facts:
        return ""
    return (
        f"; its next turn is predicted in {_seconds(facts, 'enst_s')}" if facts["enst_s"] else "; its next turn is due"
    )


def _offloaded(facts: Facts) -> str:
    why = _short(facts) or "other requests get its slot"
    move = "moves" if facts.get("computed_tokens") == 1 else "move"
    moved = f"its {_tokens(facts, 'computed_tokens')} of KV {move} to host memory"
    return f"Offloaded: {why}; {moved}{_next_turn(facts)} ({_place(facts)})."


def _finished(facts: Facts) -> str:
    predicted = f" ({_number(facts['predicted_tokens'])} predicted)" if "predicted_tokens" in facts else ""
    cached = f"{_tokens(facts, 'cached_tokens')} of the prompt came from the cache"
    times = f"{_plural(facts, 'num_drops', 'drop')} and {_plural(facts, 'num_offloads', 'offload')} of its KV"
    took = f"the steps it took part in lasted {_seconds(facts, 'ran_s')}"
    return (
        f"Ended ({facts.get('reason')}) after {_tokens(facts, 'output_tokens')}{predicted}; {took}, {times}; "
        f"{cached}{_brought(facts)}."
    )


def _brought(facts: Facts) -> str:
    if "brought_tokens" not in facts:
        return ""
    computed = f" instead of {_seconds(facts, 'compute_s')}" if facts.get("compute_s") else ""
    come = "token" if facts.get("prompt_tokens") == 1 else "tokens"
    where = f"{_count(facts, 'brought_tokens')} of {_count(facts, 'prompt_tokens')} {come} came back"
    return f"; {where} from {facts.get('brought_from')} in {_seconds(facts, 'brought_s')}{computed}"


def _answered(facts: Facts) -> str:
    attempts = facts.get("attempts", 1)
    times = "" if attempts == 1 else f", in {_count(facts, 'attempts')} attempts"
    first = f", the first after {_seconds(facts, 'ttft_s')}" if "ttft_s" in facts else ""
    ends = {"abort": "The client disconnected", "error": "Failed"}.get(str(facts.get("reason")), "Answered")
    return f"{ends}: {_tokens(facts, 'output_tokens')} in {_seconds(facts, 'jct_s')}{first}{times}."


def _sent(facts: Facts) -> str:
    waited = float(facts.get("waited_s", 0.0))
    when = "at once" if waited < 1e-3 else f"after a wait of {_seconds(facts, 'waited_s')}"
    there = f"{_count(facts, 'num_admitted')} in flight there, {_count(facts, 'num_waiting')} waiting"
    return f"Sent to the external server {when} ({there})."


def _outlook(facts: Facts) -> str:
    ends = f"; predicted to end in {_ends(facts)}" if "p50_s" in facts else ""
    return f"Now {facts.get('state', 'in flight')}, {_tokens(facts, 'output_tokens')} so far{ends}."


def _ends(facts: Facts) -> str:
    coarse = "; coarse, since the queue is long" if facts.get("coarse") else ""
    return f"{_seconds(facts, 'p50_s')} (median), {_seconds(facts, 'p90_s')} (90 %){coarse}"


def _placement(facts: Facts) -> str:
    cached = f", {_count(facts, 'hit_tokens')} of them believed cached there" if facts.get("hit_tokens") else ""
    known = _tokens(facts, "known_tokens")
    return f"Placed a request of {known}{cached} on replica {facts.get('replica', '?')} ({facts.get('reason', '?')})."


def _breaker(facts: Facts) -> str:
    why = f" ({facts['reason']})" if facts.get("reason") else ""
    return f"The circuit breaker of the other server is now {facts.get('state', '?')}{why}."


_CLAUSES: dict[str, Callable[[Facts], str]] = {"place": _place, "next_turn": _next_turn, "ends": _ends}
"""Parts of sentences that depend on several facts."""

_SENTENCES: dict[str, str | Callable[[Facts], str]] = {
    "received": "Request received: prompt of {prompt_tokens:token}, output limit {max_new_tokens:n}.",
    "promised": "Predicted to end in {ends}.",
    "outlook": _outlook,
    "placed": _placed,
    "arrived": _arrived,
    "forecast": "Predicted output: {mean_tokens:mean} (median {q50_tokens:n}, 90th percentile {q90_tokens:n}; "
    "{source}, version {version:n}).",
    "waits": _waits,
    "admitted": _admitted,
    "started": "The worker started it in the slot of a request that had ended, after a wait of {waited_s:s} ({place}).",
    "preempted": _preempted,
    "offloaded": _offloaded,
    "uploaded": "Uploaded from host memory after {waited_s:s}{next_turn} ({place}).",
    "host_full": "Host memory had no room for its KV, so the KV is dropped and will be computed again.",
    "paused": "Paused: other requests go first ({place}). It keeps its KV memory.",
    "continues": "Continues after a pause of {waited_s:s} ({place}).",
    "demoted": "Demoted to level {level:n}: it used up its quantum. The new quantum is {quantum_s:s}.",
    "promoted": "Promoted to level {level:n}: it had waited too long. The new quantum is {quantum_s:s}.",
    "refused": lambda facts: f"Refused: {facts.get('reason', 'it will never fit')}.",
    "adopted": "Taken over by a new scheduler with {output_tokens:token} of output; the decisions of the scheduler "
    "before it are lost.",
    "superseded": "Dropped here: a later attempt of the request has replaced this one.",
    "recalled": "Given back to the router before it had run.",
    "batch_broken": "Its batch ran out of KV memory and is split: the request starts again in a smaller batch after "
    "{output_tokens:token} of output.",
    "aborted": "Aborted after {output_tokens:token} of output: its client left, or it continues elsewhere.",
    "worker_lost": "Lost with its worker after {output_tokens:token} of output.",
    "resumed": "Resumed as attempt {attempt:n}: the attempt before it was lost; the client keeps the "
    "{output_tokens:token} that it has.",
    "first_token": "First token {ttft_s:s} after the request arrived.",
    "client_slow": "Paused: its client has not read {unread_deltas:delta}.",
    "client_reads": "Continues: its client reads again.",
    "sent": _sent,
    "returned": lambda facts: (
        f"Returned to the router for another replica: {facts.get('reason', 'the external server is not available')}."
    ),
    "server_ended": "The external server ended it ({reason}) after {output_tokens:token}.",
    "server_failed": "The external server failed after {output_tokens:token}: {reason}.",
    "finished": _finished,
    "answered": _answered,
    # What components decide that is about no single request.
    "placement": _placement,
    "batch_ended": "A batch of {num_requests:request} ended on replica {replica} after {took_s:s} ({estimated_s:s} "
    "estimated); longest output {generation_len:token}, {predicted_len:n} predicted.",
    "kv_ordered": "Ordered KV of {num_out:request} to the host, of {num_back:n} back, and of {num_dropped:n} dropped.",
    "forecasts_made": "Forecast the outputs of {num_requests:request}; mean of the last: {last_mean_tokens:mean}.",
    "steps_fitted": "Steps of replica {replica} fitted to {num_samples:sample}: {step_s:s} each, {decode_seq_s:s} for "
    "each sequence in it.",
    "committed": "Committed {num_records:record} in {took_s:s}.",
    "breaker": _breaker,
    "process_started": "Started the process {host}, start {start:n}; the one before: {last_end}.",
    "scaled": "Scaled {what} to {count:n}.",
}
