"""Compiled ways, one pass over a row after another: the k largest, the sum of exponentials, and a draw.

Only what does not repeat inside a row is written down: the largest value and the sum of each block of 256. Weights
are made again where they are needed, which costs less than to store and read them. All is in one file, since numba
keeps what it compiled for as long as the file of the called function is the same, and looks at no other.

Values are float32. Their order is that of a whole number, their key, which no NaN can break. NaN is found by its bits
without the sign, which are above those of infinity. Shapes: n rows, V classes, G blocks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_WIDTH, _PIECE = 256, 1024  # values of a block, and of what is summed at once
_AHEAD = 1024  # how far ahead of the first pass memory is asked for, as it takes twice as long else
_HASH = tuple(np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_F, _I, _U = np.float32, np.int32, np.uint64
_LEAST, _LOW = _I(-(2**31)), 0xFFFFFFFF
_TINY = float(np.finfo(np.float32).tiny)
_SMALL = _F(4e-38)  # weights below count as 0
_NO_NUMBER = _I(0x7F800001)  # bits of magnitudes from here on are those of NaN


_built: Any = intrinsic  # for a type checker, what it makes takes one argument less


def _compiled(function: Any) -> Any:
    """Without the lock of Python, sums in any order."""
    return _made(function, "contract", "reassoc")


def _strict(function: Any) -> Any:
    """The same, with sums in the order that is written."""
    return _made(function, "contract")


def _made(function: Any, *liberties: str) -> Any:
    """Kept on disk where there is a place for it."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(liberties)}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder that it may write to
        return njit(**options)(function)


@_built
def _bits(_typing: Any, _x: Any) -> Any:
    """A float32 as the whole number of its bits."""

    def lower(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), lower


@_built
def _float(_typing: Any, _x: Any) -> Any:
    """The float32 that has these bits."""

    def lower(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), lower


@_built
def _prefetch(_typing: Any, row: Any, _index: Any) -> Any:
    """Ask for the line of memory of an element, which may lie behind the end."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(call, [place, number(0), number(3), number(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(row, types.int64), lower


@_built
def _widest(_typing: Any) -> Any:
    """Let the loops of the function it is called in use the widest registers there are: LLVM takes half of 512 bits.

    The builder of LLVM's language knows no such attribute, and would refuse the name.
    """

    def lower(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), lower


@_compiled
def _key(x):
    """A whole number in the order of float32; its own inverse on bits. -0 becomes 0, as they are equal."""
    bits = _bits(x + _F(0.0))
    return _I(bits ^ _I(_I(bits >> _I(31)) & _I(0x7FFFFFFF)))


@_compiled
def _value(key):
    """The float32 of a key."""
    return _float(_I(key ^ _I(_I(key >> _I(31)) & _I(0x7FFFFFFF))))


@_strict
def _exp(x):
    """e^x for x from -87 to 0, within 2 roundings; 1.6e-38 below.

    A float near 1.5 2^23 has a whole number in its last bits, from where it goes to the exponent of the result. The
    polynomial is the best of its degree for the relative error on half of log 2 on either side of 0.
    """
    y = max(x, _F(-87.0))
    shifted = y * _F(1.4426950408889634) + _F(12582912.0)
    n = shifted - _F(12582912.0)
    r = (y - n * _F(0.693359375)) - n * _F(-2.12194440e-4)  # log 2 in two parts, the first of few digits
    p = _F(0.001381408073939383)
    p = p * r + _F(0.0083687799051404)
    p = p * r + _F(0.04166841134428978)
    p = p * r + _F(0.1666651964187622)
    p = p * r + _F(0.4999999403953552)
    p = (p * r + _F(1.0)) * r + _F(1.0)
    return _float(_I(_bits(p) + _I(_bits(shifted) << _I(23))))


@_compiled
def _scan(row, maxima):
    """Keys of the largest value of each block, the largest of them, and the largest bits without sign."""
    most, magnitude, full = _LEAST, _I(0), len(row) // _WIDTH
    for g in range(full):
        for line in range(0, _WIDTH, 16):
            _prefetch(row, g * _WIDTH + line + _AHEAD)
        best = _LEAST
        for j in range(_WIDTH):
            bits = _bits(row[g * _WIDTH + j] + _F(0.0))
            best = max(best, _I(bits ^ _I(_I(bits >> _I(31)) & _I(0x7FFFFFFF))))
            magnitude = max(magnitude, _I(bits & _I(0x7FFFFFFF)))
        maxima[g] = best
        most = max(most, best)
    if full < len(maxima):
        best = _LEAST
        for j in range(full * _WIDTH, len(row)):
            best = max(best, _key(row[j]))
            magnitude = max(magnitude, _I(_bits(row[j]) & _I(0x7FFFFFFF)))
        maxima[full] = best
        most = max(most, best)
    return most, magnitude


@_compiled
def _weight(x, peak, rate, low):
    """`exp((x - peak) rate)` where that is at least `low`, which is above all that `_exp` does not make; 0 else."""
    weight = _exp((x - peak) * rate)
    return weight if weight >= low else _F(0.0)


@_compiled
def _sum(row, start, count, peak, rate, low):
    """Of weights, in float32: for a block of them."""
    _widest()
    total, block = _F(0.0), row[start : start + count]  # an index that could be negative would not be vectorised
    for j in range(count):
        total += _weight(block[j], peak, rate, low)
    return total


@_compiled
def _sum_above(row, start, count, peak, rate, low, own, equal):
    """The same of values above one, or equal to it; a float just below would be lost where denormals are 0."""
    _widest()
    total, block = _F(0.0), row[start : start + count]
    if equal:
        for j in range(count):
            total += _weight(block[j], peak, rate, low) if block[j] >= own else _F(0.0)
    else:
        for j in range(count):
            total += _weight(block[j], peak, rate, low) if block[j] > own else _F(0.0)
    return total


@_compiled
def _exponentials(row, start, count, peak):
    """The sum of `exp(x - peak)` of a piece, in float32."""
    _widest()
    total, piece = _F(0.0), row[start : start + count]
    for j in range(count):
        total += _exp(piece[j] - peak)
    return total


@_compiled
def _log_sum(row, peak):
    """The logarithm of the sum of `exp(x - peak)`; what weighs less than 1.6e-38 counts as that, and is lost in 1."""
    total, full = 0.0, len(row) // _PIECE
    for piece in range(full):
        total += _exponentials(row, piece * _PIECE, _PIECE, peak)
    total += _exponentials(row, full * _PIECE, len(row) - full * _PIECE, peak)
    return math.log(max(total, 1.0))


@_compiled
def _least(peak, rate, low):
    """The key of a value that surely weighs less than `low`."""
    return _key(_F(np.float64(peak) + (math.log(low) - 0.01) / np.float64(rate)))


@_compiled
def _sums(row, maxima, sums, peak, rate, low):
    """Sums of blocks, and of all."""
    total, least, full = 0.0, _least(peak, rate, low), len(row) // _WIDTH
    for g in range(full):
        sums[g] = _sum(row, g * _WIDTH, _WIDTH, peak, rate, low) if maxima[g] >= least else 0.0
        total += sums[g]
    if full < len(sums):
        sums[full] = _sum(row, full * _WIDTH, len(row) - full * _WIDTH, peak, rate, low)
        total += sums[full]
    return total


@_compiled
def _sums_in_front(row, maxima, sums, peak, rate, low, own, bound):
    """The same of what is in front of a class: larger values, and equal ones of a lower index."""
    total, least = 0.0, max(_least(peak, rate, low), _key(own))
    for g in range(len(sums)):
        start = g * _WIDTH
        before, count = bound - start, len(row) - start
        if maxima[g] < least:
            sums[g] = 0.0
        elif count >= _WIDTH and (before <= 0 or before >= _WIDTH):
            sums[g] = _sum_above(row, start, _WIDTH, peak, rate, low, own, before > 0)
        else:
            count = min(count, _WIDTH)
            before = min(max(before, 0), count)
            first = _sum_above(row, start, before, peak, rate, low, own, True)
            sums[g] = first + _sum_above(row, start + before, count - before, peak, rate, low, own, False)
        total += sums[g]
    return total


@_compiled
def _inside(uniform, total):
    """A part of a total that is less than all of it."""
    return min(uniform * total, np.nextafter(total, 0.0))


@_compiled
def _place(row, sums, total, uniform, peak, rate, low, own, bound):
    """The class at which the running sum passes a part of the whole: first its block, then itself.

    Sums in another order can be larger by rounding: where nothing passes, it is the last one that weighs anything.
    """
    goal, running, block = _inside(uniform, total), 0.0, -1
    for g in range(len(sums)):
        if sums[g] > 0:
            block, running = g, running + sums[g]
            if running > goal:
                break
    start = block * _WIDTH
    stop = min(start + _WIDTH, len(row))
    weights, whole = np.empty(_WIDTH), 0.0
    for j in range(start, stop):
        kept = row[j] > own or (row[j] == own and j < bound)
        weights[j - start] = _weight(row[j], peak, rate, low) if kept else 0.0
        whole += weights[j - start]
    goal = _inside(max((goal - (running - sums[block])) / sums[block], 0.0), whole)
    running, found = 0.0, start
    for j in range(stop - start):
        if weights[j] > 0:
            found, running = start + j, running + weights[j]
            if running > goal:
                break
    return found


@_compiled
def _mixed(state):
    """The finaliser of SplitMix64."""
    state = (state ^ (state >> _U(30))) * _HASH[1]
    state = (state ^ (state >> _U(27))) * _HASH[2]
    return state ^ (state >> _U(31))


@_compiled
def _uniform(seed, place, attempt):
    """`unembed.ops.uniforms` of one row, for tokens."""
    state = _mixed(seed + _HASH[0])
    state = _mixed(state ^ _mixed(place + _HASH[0] + _HASH[0]))
    state = _mixed(state ^ _U(attempt))
    return (state >> _U(11)) * 2.0**-53


@_compiled
def _sink(heap, place, size, packed):
    """Put a number into a heap, whose least is in front, from a free place on downwards."""
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= packed:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = packed


@_compiled
def _packed(key, index):
    """One number in the order of values, and of equal ones with the lower index in front."""
    return (np.int64(key) << 32) | (_LOW - index)


@_compiled
def _largest(row, maxima, k):
    """The k largest as packed numbers, the largest first.

    They are at least as large as the k-th largest maximum of a block, so other blocks are not looked at.
    """
    heap, least = np.full(k, np.int64(-(2**63))), _LEAST
    if k < len(maxima):
        for g in range(len(maxima)):
            if maxima[g] > least:
                _sink(heap, 0, k, _packed(maxima[g], 0))
                least = _I(heap[0] >> 32)
        heap[:] = np.int64(-(2**63))
    for g in range(len(maxima)):
        if maxima[g] < least:
            continue
        block = row[g * _WIDTH : (g + 1) * _WIDTH]
        for j in range(len(block)):
            key = _key(block[j])
            if key >= least:
                packed = _packed(key, g * _WIDTH + j)
                if packed > heap[0]:
                    _sink(heap, 0, k, packed)
    for size in range(k - 1, 0, -1):
        packed = heap[size]
        heap[size] = heap[0]
        _sink(heap, 0, size, packed)
    return heap


@_compiled
def _divisor(temperature):
    """A temperature that float32 can be divided by; 1 for infinity, at which scores are equal already."""
    return 1.0 if temperature == np.inf else max(temperature, _TINY)


@_compiled
def _listed(row, maxima, sums, peak, t, k, part, least, joint, uniform):
    """A draw from the k largest: in their order, what top-k, top-p and min-p keep is a prefix, and so is the sum."""
    found = _largest(row, maxima, k)
    weights, total, last = np.empty(k), 0.0, -1
    for i in range(k):
        weights[i] = math.exp(np.float64(_value(_I(found[i] >> 32)) - peak) / t)
        if weights[i] > 0:
            total, last = total + weights[i], i
    if part < np.inf:
        heavy = _sums(row, maxima, sums, peak, _F(1.0 / t), _SMALL) if joint else total
        running, reached = 0.0, 0
        for i in range(last + 1):
            if running < part * heavy:  # what is in front has not the mass
                reached = i
            running += weights[i]
        last = reached
    while last > 0 and weights[last] < least:
        last -= 1
    whole = 0.0
    for i in range(last + 1):
        whole += weights[i]
    goal, running, place = _inside(uniform, whole), 0.0, 0
    for i in range(last + 1):
        running += weights[i]
        place = i
        if running > goal:
            break
    return _LOW - (found[place] & _LOW)


@_compiled
def _from_all(row, maxima, sums, peak, t, part, least, seed, place):
    """A draw from all, by rejection where top-p is asked (`unembed.decoding._draw_all`)."""
    rate, low, limited = _F(1.0 / t), max(_F(least), _SMALL), part < np.inf
    own, bound, attempt = _F(-np.inf), 0, 0
    total = _sums(row, maxima, sums, peak, rate, _SMALL if limited else low)
    goal = part * total
    if limited and low > _SMALL:
        total = _sums(row, maxima, sums, peak, rate, low)
    while True:
        drawn = _place(row, sums, total, _uniform(seed, place, attempt), peak, rate, low, own, bound)
        if not limited:
            return drawn
        own, bound, attempt = row[drawn], drawn, attempt + 1
        total = _sums_in_front(row, maxima, sums, peak, rate, low, own, bound)
        if total < goal or total <= 0:
            return drawn


@_compiled
def draw(rows, asked, joint, seeds, places, found):
    """A class a row into `found`; how many rows there are none for, as no score is finite, or one is NaN or +inf.

    Args:
        rows: Scores.
        asked: Temperature (0 for the first of the largest), k, the part of the mass to reach (infinite for all) and the
            least part of the largest probability, of all rows or of each.
        joint: Whether that mass is that of the whole distribution.
        seeds: One a row, unsigned.
        places: The same: positions; of all rows or of each.
        found: Written; -1 where there is none.
    """
    blocks, failed = (rows.shape[1] + _WIDTH - 1) // _WIDTH, 0
    maxima, sums = np.empty(blocks, np.int32), np.empty(blocks)
    for i in range(len(rows)):
        row, line = rows[i], i if len(asked) > 1 else 0
        temperature, k, part, least = asked[line, 0], asked[line, 1], asked[line, 2], asked[line, 3]
        most, magnitude = _scan(row, maxima)
        peak, place = _value(most), places[i if len(places) > 1 else 0]
        if magnitude >= _NO_NUMBER or not -np.inf < peak < np.inf:
            found[i] = -1
            failed += 1
        elif temperature == 0:
            found[i] = _LOW - (_largest(row, maxima, 1)[0] & _LOW)
        elif k < len(row):
            uniform, t = _uniform(seeds[i], place, 0), _divisor(temperature)
            found[i] = _listed(row, maxima, sums, peak, t, int(k), part, least, joint, uniform)
        else:
            found[i] = _from_all(row, maxima, sums, peak, _divisor(temperature), part, least, seeds[i], place)
    return failed


@_compiled
def best(rows, ids, values, log_sums):
    """The k largest of each row in order, and `log sum exp(row - largest)` where it has a place.

    Returns:
        0; 1 if a row has no finite score, or one of +inf, and its sum is none; 2 if there is NaN, and nothing is right.
    """
    maxima, found = np.empty((rows.shape[1] + _WIDTH - 1) // _WIDTH, np.int32), 0
    for i in range(len(rows)):
        row = rows[i]
        most, magnitude = _scan(row, maxima)
        if magnitude >= _NO_NUMBER:
            return 2
        listed = _largest(row, maxima, ids.shape[1])
        for j in range(len(listed)):
            ids[i, j] = _LOW - (listed[j] & _LOW)
            values[i, j] = row[ids[i, j]]
        if not -np.inf < _value(most) < np.inf:
            found = 1
        elif len(log_sums):
            log_sums[i] = _log_sum(row, _value(most))
    return found


@_compiled
def log_probs(rows, ids, peaks, log_sums, found):
    """Of some classes of each row into `found`: `row - peak - log_sum`, and never above 0 by rounding."""
    for i in range(len(ids)):
        for j in range(ids.shape[1]):
            found[i, j] = min(np.float64(rows[i, ids[i, j]] - peaks[i, 0]) - log_sums[i, 0], 0.0)


@_compiled
def costs(total, drawn, tokens, ends, found):
    """The sum of log-probabilities with each candidate, negative; infinite for what is an end beyond column `ends`.

    Returns:
        Whether each row has a finite one.
    """
    alive = True
    for i in range(len(drawn)):
        any_finite = False
        for j in range(drawn.shape[1]):
            own = -(total[i] + drawn[i, j])
            for e in range(ends if j >= ends else 0):
                if tokens[i, j] == tokens[i, e]:
                    own = np.inf
            found[i, j] = own
            any_finite |= own < np.inf
        alive &= any_finite
    return alive


@_compiled
def ends_above(cost, ends, factor, worst, owner, rows, columns):
    """Where ends are whose score is above the worst of their owner, the best first; how many there are."""
    count = 0
    for i in range(len(cost)):
        for j in range(ends):
            own = -cost[i, j] * factor
            if own > worst[owner[i]]:
                place, count = count, count + 1
                while place > 0 and -cost[rows[place - 1], columns[place - 1]] * factor < own:
                    rows[place], columns[place] = rows[place - 1], columns[place - 1]
                    place -= 1
                rows[place], columns[place] = i, j
    return count


@_compiled
def ranked(cost, ends, owner, width, rows, columns):
    """Where the `width` least costs of each owner are, in order, equal ones as they come; how many there are.

    Those of a row grow, but for infinite ones, from column `ends` on.
    """
    count, first = 0, 0
    while first < len(owner):
        start, size, after = count, 0, first
        while after < len(owner) and owner[after] == owner[first]:
            for j in range(ends, cost.shape[1]):
                own = cost[after, j]
                if own == np.inf:
                    continue
                if size == width and own >= cost[rows[start + size - 1], columns[start + size - 1]]:
                    break
                place = start + min(size, width - 1)
                size = min(size + 1, width)
                while place > start and cost[rows[place - 1], columns[place - 1]] > own:
                    rows[place], columns[place] = rows[place - 1], columns[place - 1]
                    place -= 1
                rows[place], columns[place] = after, j
            after += 1
        count, first = count + size, after
    return count
