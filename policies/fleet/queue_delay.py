"""How long a new request would wait: the work that has to go first over what the replicas serve.

Requests are taken as all alike, with the mean lengths of those in flight, and as spread evenly: that is the part of a
delay that more replicas change. Progress is not looked at; by Little's law it is a matter of shares: of a number of
requests in flight, as many are in their prefill as the prefill takes of the time that they spend in all.
"""

from __future__ import annotations

from core.costs import StepCost
from core.load_snapshot import Demand, LoadSnapshot


def queue_delay_s(outlook: LoadSnapshot, num_replicas: int) -> float | None:
    """Seconds until a request that came now would begin, if so many replicas like those of ``outlook`` served.

    With continuous batching a request waits until one of those that run has ended, if as many run as can, and until the
    prompts before its own are computed. With whole batches it waits for the first of those that run to end, and for the
    full ones that are in the queue; it joins the last one there.

    Args:
        num_replicas: None of them foretells nothing.

    Returns:
        None where that cannot be said: nobody serves, or there are requests, but steps have not been measured.
    """
    demand, cost = outlook.demand, outlook.cost
    if not num_replicas:
        return None
    if not demand.num_requests:
        return 0.0
    if cost is None or not outlook.kv_tokens:
        return None
    each = _MeanRequest(demand, cost)
    places = min(outlook.max_num_seqs, max(1, int(outlook.kv_tokens / each.context_len)))
    if not outlook.joins:
        return _batches_s(demand, each, places, num_replicas)
    running = min(places, -(-demand.num_requests // num_replicas))
    ahead = max(0, demand.num_requests + 1 - places * num_replicas)
    prefill_s, decode_s = each.prefill_s, each.decode_s(running)
    prompts_s = running * prefill_s * prefill_s / (prefill_s + decode_s) if decode_s else running * prefill_s
    return ahead * each.batch_s(running) / running / num_replicas + prompts_s


def ended_after_s(outlook: LoadSnapshot, num_requests: int) -> float | None:
    """Seconds until so many of the requests in flight have ended, if no others come.

    Returns:
        None where no replica serves, there are no requests, or steps have not been measured.
    """
    demand, cost = outlook.demand, outlook.cost
    if not outlook.num_replicas or not demand.num_requests or cost is None or not outlook.kv_tokens:
        return None
    each = _MeanRequest(demand, cost)
    places = min(outlook.max_num_seqs, max(1, int(outlook.kv_tokens / each.context_len)))
    running = min(places, -(-demand.num_requests // outlook.num_replicas))
    return num_requests * each.batch_s(running) / running / outlook.num_replicas


def _batches_s(demand: Demand, each: _MeanRequest, places: int, num_replicas: int) -> float:
    """Of n rests of batches, each anything up to the whole, the shortest is 1 / (n + 1) of one in the mean."""
    if not demand.num_waiting and demand.num_busy < num_replicas:
        return 0.0
    running = min(places, -(-(demand.num_requests - demand.num_waiting) // max(1, demand.num_busy)))
    rest_s = each.batch_s(running) / (num_replicas + 1) if running else 0.0
    return rest_s + demand.num_waiting // places * each.batch_s(places) / num_replicas


class _MeanRequest:
    """The mean of those in flight, at least one.

    Attributes:
        context_len: Tokens that it holds, in the mean over its life.
        prefill_s: Until its prompt is computed, without the base of the steps, which decode others as well.
    """

    def __init__(self, demand: Demand, cost: StepCost) -> None:
        num = demand.num_requests
        known_len, cached_len = demand.known_tokens / num, demand.cached_tokens / num
        self._output_len = demand.output_tokens / num
        self._cost = cost
        self.context_len = max(1.0, known_len + self._output_len / 2)
        self.prefill_s = cost.prefill_s(round(known_len - cached_len), round(cached_len)) - cost.base_s

    def decode_s(self, num_seqs: int) -> float:
        """From its first token to its last, beside so many less one."""
        return self._output_len * self._cost.step_s(0, num_seqs, round(num_seqs * self.context_len))

    def batch_s(self, num_seqs: int) -> float:
        """Of so many that begin together, with a replica to themselves."""
        return num_seqs * self.prefill_s + self.decode_s(num_seqs)
