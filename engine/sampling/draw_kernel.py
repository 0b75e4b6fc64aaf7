"""Draws the token of each row of logits on a GPU: one Triton program a row, the law and the weights of ADR 94.

A program reads its row a few times and sorts nothing. It finds the largest logit, and of each lane the largest one.
What top-k, top-p and min-p may leave is listed by id, as the compiled sampler does it: the k-th largest of the lanes'
maxima is at most the k-th largest logit, and tokens of less than a certain weight stay outside of the nucleus where the
others have its mass already. The border among the listed is found by bisection of the logits' bits.

A weight has the bits that the compiled sampler gives it, where the device has a fused multiply-add. Sums of weights are
float64 as there, in another order: in tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(3.4028234663852886e38)
_LOWEST_KEY = tl.constexpr(-2139095040)  # of the least finite float32
_SLACK = tl.constexpr(1e-3)  # of a weight's logarithm in base 2: far beyond what rounds in a weight
_FALL = tl.constexpr(1 / 16)  # of the weight at the list's border


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """Returns an int32 that is ordered as float32 ``x`` is; both zeros have the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):  # type: ignore[no-untyped-def]
    """Returns the mean, rounded down, of two int32 whose sum may be too large for one."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _weigh(x, top, scale):  # type: ignore[no-untyped-def]
    """Computes 2^((x - top) * scale) by the polynomial of ``sampler.cpp``; 0 below 2^-126."""
    exponents = (x - top) * scale
    bounded = tl.maximum(exponents, -126.0)
    whole = bounded + 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which the low bits hold
    rest = bounded - (whole - 12582912.0)
    power = tl.fma(rest, 1.535336188319500e-4, 1.339887440266574e-3)
    power = tl.fma(power, rest, 9.618437357674640e-3)
    power = tl.fma(power, rest, 5.550332471162809e-2)
    power = tl.fma(power, rest, 2.402264791363012e-1)
    power = tl.fma(power, rest, 6.931472028550421e-1)
    power = tl.fma(power, rest, 1.0)
    bits = power.to(tl.int32, bitcast=True) + (whole.to(tl.int32, bitcast=True) << 23)
    return tl.where(exponents < -126.0, 0.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _border_key(weight, top, scale):  # type: ignore[no-untyped-def]
    """Returns a key somewhat below those of all tokens of at least this weight."""
    relative = (tl.log2(weight) - _SLACK) / scale
    least = tl.maximum(top.to(tl.float64) + relative.to(tl.float64), -_LARGEST)
    return tl.maximum(_key(least.to(tl.float32)) - 1, _LOWEST_KEY)


@triton.jit  # type: ignore[untyped-decorator]
def _read(x, ids, listed, start, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads a tile of the row's tokens, or of those listed: ids, logits, and which of them are there."""
    places = start + tl.arange(0, TILE)
    there = places < count
    tokens = tl.where(listed, tl.load(ids + places, mask=there & listed, other=0), places)
    return tokens, tl.load(x + tokens, mask=there, other=float("-inf")), there


@triton.jit  # type: ignore[untyped-decorator]
def _kept_weights(x, ids, listed, start, count, top, scale, least, least_id, least_weight, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a tile's ids and weights; 0 for tokens that are not kept."""
    tokens, logits, there = _read(x, ids, listed, start, count, TILE)
    keys = _key(logits)
    kept = there & ((keys > least) | ((keys == least) & (tokens >= least_id)))
    weights = _weigh(logits, top, scale)
    return tokens, tl.where(kept & (weights >= least_weight), weights, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _mass(x, ids, listed, count, top, scale, least, least_id, least_weight, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up the weights of the kept tokens, in float64."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, count, TILE):
        _, weights = _kept_weights(x, ids, listed, start, count, top, scale, least, least_id, least_weight, TILE)
        total += tl.sum(weights.to(tl.float64), 0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _list_tokens(x, ids, vocab, least, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lists the tokens whose keys are at least ``least``, in order of their ids; returns how many."""
    count = 0
    for start in range(0, vocab, TILE):
        places = start + tl.arange(0, TILE)
        inside = places < vocab
        found = inside & (_key(tl.load(x + places, mask=inside, other=float("-inf"))) >= least)
        ranks = tl.cumsum(found.to(tl.int32), 0)
        tl.store(ids + count + ranks - 1, places, mask=found)
        count += tl.sum(found.to(tl.int32), 0)
    tl.debug_barrier()  # other threads read what these have written
    return count


@triton.jit
def _kth_of_lanes(keys, k, high):  # type: ignore[no-untyped-def]
    """Returns the k-th largest of the lanes' keys, or the least finite one."""
    low = tl.full([], _LOWEST_KEY, tl.int32)
    while low < high:
        middle = _middle(low, high) + ((low ^ high) & 1)  # rounded up
        enough = tl.sum((keys >= middle).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _kth_of_listed(x, ids, count, k, low, high, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the k-th largest key of the listed tokens, or ``low`` where they are fewer."""
    while low < high:
        middle = _middle(low, high) + ((low ^ high) & 1)
        reached = 0
        for start in range(0, count, TILE):
            _, logits, there = _read(x, ids, True, start, count, TILE)
            reached += tl.sum((there & (_key(logits) >= middle)).to(tl.int32), 0)
        enough = reached >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _nucleus(x, ids, count, top, scale, total, tail, low, high, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finds the border among the listed tokens, behind which at most ``tail`` of the total is left.

    Among tokens with the border's logit those with the lowest ids go.

    Returns:
        The border's key, and the lowest id that stays of those that have it.
    """
    rest = tail * total
    while low < high:
        middle = _middle(low, high)
        ahead = _mass(x, ids, True, count, top, scale, middle + 1, 0, 0.0, TILE)
        stays = total - ahead > rest
        high = tl.where(stays, middle, high)
        low = tl.where(stays, low, middle + 1)
    ahead = _mass(x, ids, True, count, top, scale, low + 1, 0, 0.0, TILE)
    at_border = low ^ ((low >> 31) & 0x7FFFFFFF)
    weight = _weigh(at_border.to(tl.float32, bitcast=True), top, scale).to(tl.float64)
    ties = 0
    for start in range(0, count, TILE):
        _, logits, there = _read(x, ids, True, start, count, TILE)
        ties += tl.sum((there & (_key(logits) == low)).to(tl.int32), 0)
    seen = 0
    least_id = 0x7FFFFFFF
    for start in range(0, count, TILE):
        tokens, logits, there = _read(x, ids, True, start, count, TILE)
        tied = (there & (_key(logits) == low)).to(tl.int32)
        behind = ties - seen - tl.cumsum(tied, 0)  # ties of higher ids: they stay first
        stays = (behind == 0) | (behind.to(tl.float64) * weight < total - rest - ahead)
        least_id = tl.minimum(least_id, tl.min(tl.where((tied > 0) & stays, tokens, 0x7FFFFFFF), 0))
        seen += tl.sum(tied, 0)
    return low, least_id


@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """Computes ``counter_uniform``: SplitMix64."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    bits = seed.to(tl.uint64, bitcast=True) + golden
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = (bits ^ (bits >> 31)) + (position + 1).to(tl.uint64, bitcast=True) * golden
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit  # type: ignore[untyped-decorator]
def _invert(  # type: ignore[no-untyped-def]
    x, ids, listed, count, top, scale, least, least_id, least_weight, uniform, TILE: tl.constexpr
):
    """Inverts the cumulative distribution of the kept tokens, in order of their ids; returns a token."""
    target = uniform * _mass(x, ids, listed, count, top, scale, least, least_id, least_weight, TILE)
    before = target * 0.0
    chosen = 0
    behind = before
    for start in range(0, count, TILE):
        _, weights = _kept_weights(x, ids, listed, start, count, top, scale, least, least_id, least_weight, TILE)
        sum_of_tile = tl.sum(weights.to(tl.float64), 0)
        taken = (before <= target) & (sum_of_tile > 0)  # rounding may leave nothing beyond the target
        chosen = tl.where(taken, start, chosen)
        behind = tl.where(taken, before, behind)
        before += sum_of_tile
    tokens, weights = _kept_weights(x, ids, listed, chosen, count, top, scale, least, least_id, least_weight, TILE)
    sums = behind + tl.cumsum(weights.to(tl.float64), 0)
    lanes = tl.arange(0, TILE)
    first = tl.min(tl.where((sums > target) & (weights > 0), lanes, TILE), 0)
    last = tl.max(tl.where(weights > 0, lanes, 0), 0)
    place = tl.where(first < TILE, first, last)
    return tl.sum(tl.where(lanes == place, tokens, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def draw_rows(  # type: ignore[no-untyped-def]
    logits,
    ids,
    longs,
    doubles,
    floats,
    ints,
    out,
    vocab,
    stride,
    TILE: tl.constexpr,
):
    """Draws the token of one row; -1 if it has none: a logit is NaN or +inf, or all are -inf.

    ``longs``, ``doubles``, ``floats`` and ``ints`` are one memory of 40 bytes a row: seed, position, mass of the tail,
    scale, least weight, k, and whether the likeliest token is wanted.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    ids = ids + row * vocab
    most = tl.full([TILE], float("-inf"), tl.float32)
    place = tl.zeros([TILE], tl.int32)
    odd = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        places = start + tl.arange(0, TILE)
        found = tl.load(x + places, mask=places < vocab, other=float("-inf"))
        odd |= (found != found).to(tl.int32)
        place = tl.where(found > most, places, place)
        most = tl.where(found > most, found, most)
    top = tl.max(most, 0)
    token = tl.full([], -1, tl.int32)
    if (tl.max(odd, 0) == 0) & (tl.abs(top) <= _LARGEST):
        if tl.load(ints + row * 10 + 9) != 0:
            token = tl.min(tl.where(most == top, place, vocab), 0)
        else:
            tail = tl.load(doubles + row * 5 + 2)
            scale = tl.load(floats + row * 10 + 6)
            least_weight = tl.load(floats + row * 10 + 7)
            k = tl.load(ints + row * 10 + 8)
            highest = _key(top)
            least = tl.full([], _LOWEST_KEY, tl.int32)
            least_id = 0
            count = vocab
            listed = (k > 0) | (tail > 0) | (least_weight > 0)
            if k > 0:
                if k <= TILE:
                    least = _kth_of_lanes(_key(most), k, highest)
                count = _list_tokens(x, ids, vocab, least, TILE)
                least = _kth_of_listed(x, ids, count, k, least, highest, TILE)
            if tail > 0:
                total = _mass(x, ids, k > 0, count, top, scale, least, 0, 0.0, TILE)
                if k == 0:
                    weight = total.to(tl.float32) / vocab
                    lowest = tail.to(tl.float32) * weight
                    least = _border_key(weight, top, scale)
                    ahead = _mass(x, ids, False, vocab, top, scale, least, 0, 0.0, TILE)
                    while (weight > lowest) & (total - ahead > tail * total):
                        weight = tl.maximum(weight * _FALL, lowest)
                        least = _border_key(weight, top, scale)
                        ahead = _mass(x, ids, False, vocab, top, scale, least, 0, 0.0, TILE)
                    count = _list_tokens(x, ids, vocab, least, TILE)
                least, least_id = _nucleus(x, ids, count, top, scale, total, tail, least, highest, TILE)
            if (k == 0) & (tail <= 0) & (least_weight > 0):
                least = _border_key(least_weight, top, scale)
                count = _list_tokens(x, ids, vocab, least, TILE)
            uniform = _uniform(tl.load(longs + row * 5), tl.load(longs + row * 5 + 1))
            token = _invert(x, ids, listed, count, top, scale, least, least_id, least_weight, uniform, TILE)
    tl.store(out + row, token.to(tl.int64))
