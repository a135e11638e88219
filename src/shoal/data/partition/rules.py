"""The rules by which rows get their side, on arrays: each returns the side of every row, and -1 for a row that is left out.

Sides are counted; shares are what part of the rows each is to have. Where keys are whole the shares cannot be exact: no
side has more than its share and the largest key above it.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.seeding import derive_key
from shoal.data.partition.keys import Codes, Groups, mix

Sides = NDArray[np.int64]
Shares = Sequence[float]


def even_ranges(num_rows: int, parts: int) -> list[range]:
    """N rows in K ranges, the remainder spread by one: part k begins at k*q + min(k, r)."""
    size, longer = divmod(num_rows, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def counts_of(num_rows: int, shares: Shares) -> list[int]:
    """Whole numbers of rows that add up to all of them, none further than one from its share; a share above zero gets a row."""
    exact = [share / sum(shares) * num_rows for share in shares]
    counts = [int(number) for number in exact]
    order = sorted(range(len(shares)), key=lambda side: (counts[side] - exact[side], side))
    for side in order[: num_rows - sum(counts)]:
        counts[side] += 1
    for side, share in enumerate(shares):
        if share > 0 and counts[side] == 0 and max(counts) > 1:
            counts[counts.index(max(counts))] -= 1
            counts[side] = 1
    return counts


def cut_rows(num_rows: int, shares: Shares, seed: int) -> Sides:
    """Every row by itself: those with the smallest hashes are of the last side."""
    order = np.argsort(mix(np.arange(num_rows, dtype=np.uint64), derive_key("rows", seed)), kind="stable")
    sides = np.empty(num_rows, dtype=np.int64)
    sides[order] = np.repeat(np.arange(len(shares)), counts_of(num_rows, shares))
    return sides


def cut_times(times: NDArray[Any], ids: Codes, shares: Shares, gap: float) -> Sides:
    """The latest rows are of the last side; rows of one time are together, and rows closer than ``gap`` to a later side left out.

    Args:
        times: of the rows.
        ids: orders rows of one time.
        shares: of the sides, the earliest first.
        gap: nothing of an earlier side is later than the first of the next minus this.
    """
    order = np.lexsort((ids, times))
    placed = times[order]
    sides = np.full(len(times), -1, dtype=np.int64)
    used = [side for side, share in enumerate(shares) if share > 0]
    counts = counts_of(len(times), shares)
    starts = [0]
    for side in used[:-1]:
        aim = min(len(times), sum(counts[: side + 1]))
        # The whole of a time goes to the later side, so that what is trained on is strictly earlier.
        start = int(np.searchsorted(placed, placed[aim], side="left")) if aim < len(times) else len(times)
        starts.append(max(start, starts[-1]))
    starts.append(len(times))
    for place, side in enumerate(used):
        start, stop = starts[place], starts[place + 1]
        if place + 1 < len(used) and gap > 0 and stop < len(times):
            stop = max(start, min(stop, int(np.searchsorted(placed, placed[stop] - gap, side="left"))))
        sides[order[start:stop]] = side
    return sides


def cut_groups(groups: Groups, shares: Shares, *, seed: int, split_heavy: bool = False) -> Sides:
    """Whole keys, the heaviest first, each to the side that is then the least full for its share.

    For K equal shares this is the rule of the longest processing time: no side has more than the mean and the largest key,
    nor more than 4/3 of the best possible (Graham, SIAM J. Appl. Math. 17, 1969).
    """
    sizes = groups.sizes
    codes = groups.codes
    if split_heavy:
        codes, sizes = _split_heavy(codes, sizes, shares)
    hashes = groups.hashes(seed)
    ties = (
        np.concatenate([hashes, np.zeros(len(sizes) - len(hashes), np.uint64)]) if len(sizes) > len(hashes) else hashes
    )
    order = np.lexsort((np.arange(len(sizes)), ties, -sizes))
    owner = np.empty(len(sizes), dtype=np.int64)
    total = sum(shares)
    speeds = [share / total for share in shares]
    sides = [side for side, speed in enumerate(speeds) if speed > 0]
    if len({speeds[side] for side in sides}) == 1:
        heap = [(0, side) for side in sides]
        for group in order.tolist():
            load, side = heap[0]
            owner[group] = side
            heapq.heapreplace(heap, (load + int(sizes[group]), side))
        return owner[codes]
    loads = [0] * len(shares)
    for group in order.tolist():
        size = int(sizes[group])
        side = min(sides, key=lambda one: ((loads[one] + size) / speeds[one], one))
        owner[group] = side
        loads[side] += size
    _fill_empty(owner, sizes, loads, sides)
    return owner[codes]


def _fill_empty(owner: Codes, sizes: Codes, loads: list[int], sides: list[int]) -> None:
    """A side without a key takes the lightest one of the fullest side."""
    for side in sides:
        if loads[side] == 0:
            fullest = max(sides, key=lambda one: loads[one])
            theirs = np.flatnonzero(owner == fullest)
            if len(theirs) > 1:
                lightest = int(theirs[np.argmin(sizes[theirs])])
                owner[lightest] = side
                loads[side] += int(sizes[lightest])
                loads[fullest] -= int(sizes[lightest])


def _split_heavy(codes: Codes, sizes: Codes, shares: Shares) -> tuple[Codes, Codes]:
    """Keys with more rows than the smallest share become several, of equal size up to one row."""
    least = max(1, int(min(share for share in shares if share > 0) / sum(shares) * len(codes)))
    new_codes, new_sizes = codes.copy(), sizes.tolist()
    for group in np.flatnonzero(sizes > least).tolist():
        rows = np.flatnonzero(codes == group)
        for number, part in enumerate(even_ranges(len(rows), -(-len(rows) // least))):
            if number == 0:
                new_sizes[group] = len(part)
                continue
            new_codes[rows[part.start : part.stop]] = len(new_sizes)
            new_sizes.append(len(part))
    return new_codes, np.array(new_sizes, dtype=np.int64)


def cut_labels(groups: Groups, shares: Shares, seed: int) -> Sides:
    """Every value in the same share on every side, within two rows, and the sides as a whole within one and a half of theirs.

    Rows are put in order of (value, hash), and every side takes its rows of that order at even distances.
    """
    num_rows = len(groups.codes)
    hashes = mix(np.arange(num_rows, dtype=np.uint64), derive_key("labels", seed))
    order = np.lexsort((hashes, groups.codes))
    sides = np.zeros(num_rows, dtype=np.int64)
    left = order
    remaining = float(sum(shares))
    for side in range(len(shares) - 1, 0, -1):
        share = shares[side] / remaining
        steps = np.floor(np.arange(len(left) + 1) * share + 0.5)
        is_taken = np.diff(steps) > 0
        if share > 0 and len(left) > 1 and not is_taken.any():
            is_taken[0] = True
        sides[left[is_taken]] = side
        left = left[~is_taken]
        remaining -= shares[side]
    return sides


def cut_hashes(hashes: NDArray[np.uint64], shares: Shares) -> Sides:
    """By a hash of each row's key alone: what is added later moves nothing that is there."""
    numbers = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    bounds = np.cumsum(np.array(shares[:-1], dtype=np.float64)) / sum(shares)
    return np.searchsorted(bounds, numbers, side="right").astype(np.int64)


def place_keys(hashes: NDArray[np.uint64], parts: int) -> Sides:
    """Rendezvous hashing: of K parts each key takes the one that draws the highest for it, so that one part more moves
    1/(K+1)."""
    best = mix(hashes, derive_key("part", 0))
    sides = np.zeros(len(hashes), dtype=np.int64)
    for part in range(1, parts):
        draw = mix(hashes, derive_key("part", part))
        is_higher = draw > best
        sides[is_higher] = part
        best = np.where(is_higher, draw, best)
    return sides
