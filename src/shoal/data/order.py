"""Which samples come when, and which split and replica they belong to, as pure functions for any number of replicas.

The order of an epoch is a keyed permutation that is computed, not stored: position i is a function of (seed, epoch, n, i), so a
run resumes anywhere at once, on any number of processes. A step takes the next ``global_batch`` positions; each replica takes its
contiguous share of them. Nothing here knows what a sample is. numpy only.

    epoch 0   positions  0 1 2 3 | 4 5 6 7 | 8 9        global_batch 4, ten samples: the last batch is short
    two replicas         0 1|2 3   4 5|6 7   8|9        every sample exactly once per epoch
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key

Ids = NDArray[np.int64]

_ROUNDS = 6
# Multipliers of a 64-bit finaliser (SplitMix64; Steele, Lea and Flood, OOPSLA 2014, figure 16).
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFT_1, _SHIFT_2 = np.uint64(30), np.uint64(27)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the training data has got to: ``offset`` samples of ``epoch`` have been handed out."""

    epoch: int = 0
    offset: int = 0
    stream: str = ""
    """What an iterable dataset said of itself at this place, as JSON; empty where it says nothing, and for every other."""
    version: int = 0
    """Of data that grows while the run follows it: which version this epoch reads; 0 for all other data."""


def permute(seed: int, epoch: int, num_samples: int, positions: Ids) -> Ids:
    """The sample ids at these positions of an epoch's order; over all positions, each id once.

    A Feistel network on (left, right) in Z_a x Z_b with a x b just above ``num_samples``; what falls outside walks the cycle
    until it is inside (Black and Rogaway, CT-RSA 2002), so it is a permutation of exactly ``num_samples``.
    """
    if num_samples < 2:
        return positions.astype(np.int64, copy=True)
    left_size = math.isqrt(num_samples - 1) + 1
    right_size = -(-num_samples // left_size)
    sizes = (np.uint64(left_size), np.uint64(right_size))
    keys = _round_keys(seed, epoch, num_samples)
    ids = _encrypt(positions.astype(np.uint64), sizes, keys)
    outside = np.flatnonzero(ids >= num_samples)
    while outside.size:
        ids[outside] = _encrypt(ids[outside], sizes, keys)
        outside = outside[ids[outside] >= num_samples]
    return ids.astype(np.int64)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int, num_samples: int) -> tuple[np.uint64, ...]:
    """One key per round; kept because every step of an epoch asks for the same ones."""
    return tuple(np.uint64(derive_key("order", seed, epoch, num_samples, turn)) for turn in range(_ROUNDS))


def _encrypt(
    values: NDArray[np.uint64], sizes: tuple[np.uint64, np.uint64], keys: tuple[np.uint64, ...]
) -> NDArray[np.uint64]:
    halves = list(np.divmod(values, sizes[1]))
    for turn, key in enumerate(keys):
        this, other = turn % 2, 1 - turn % 2
        halves[this] = (halves[this] + _mix(halves[other] + key) % sizes[this]) % sizes[this]
    merged: NDArray[np.uint64] = halves[0] * sizes[1] + halves[1]
    return merged


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> _SHIFT_1)) * _MULTIPLIER_1
    values = (values ^ (values >> _SHIFT_2)) * _MULTIPLIER_2
    return values ^ (values >> _SHIFT_2)


def uniform(positions: Ids, *parts: str | int) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each position, drawn by the key of these parts: the same whoever asks, and in which order."""
    # Steps of the golden ratio, as SplitMix64 takes them, so that neighbours have unrelated bits.
    stepped = positions.astype(np.uint64) * _GOLDEN + np.uint64(derive_key("uniform", *parts))
    numbers: NDArray[np.float64] = (_mix(stepped) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def take(position: Position, num_samples: int, global_batch: int) -> tuple[slice, Position]:
    """The positions of the next global batch within its epoch, and where the data is after it.

    The last batch of an epoch is short rather than mixed with the next epoch, so every sample comes exactly once per epoch.
    """
    start = position.offset
    stop = min(start + global_batch, num_samples)
    if stop == num_samples:
        return slice(start, stop), Position(epoch=position.epoch + 1, version=position.version)
    return slice(start, stop), Position(epoch=position.epoch, offset=stop, version=position.version)


def position_of(step: int, num_samples: int, global_batch: int) -> Position:
    """Where the data is before a step, counted from 0: what ``take`` gives after so many steps, without taking them."""
    epoch, place = divmod(step, math.ceil(num_samples / global_batch))
    return Position(epoch=epoch, offset=place * global_batch)


def replica_share(ids: Ids, replica: int, num_replicas: int) -> Ids:
    """One replica's contiguous part of a global batch; sizes differ by at most one, and a part may be empty."""
    size, longer = divmod(len(ids), num_replicas)
    start = replica * size + min(replica, longer)
    return ids[start : start + size + (replica < longer)]


def own_microbatches(ids: Ids, replica: int, num_replicas: int, num_own: int) -> list[Ids]:
    """One replica's microbatches of a global batch; a batch with fewer samples than microbatches leaves the last replicas none.

    The batch is cut into as many even parts as there are microbatches in all, and each replica takes its ``num_own`` of them. So
    a short batch is cut alike however many replicas share it, and every plan adds up the same parts.
    """
    total = num_replicas * num_own
    parts = (replica_share(ids, part, total) for part in range(replica * num_own, (replica + 1) * num_own))
    return [part for part in parts if len(part)]


def split_positions(
    total: int, validation: float, test: float, *, needed: int = 1, what: str = "samples"
) -> tuple[range, range, range]:
    """The positions of train, validation and test.

    Args:
        total: how many things there are.
        validation: share held out for validation.
        test: share held out for the test.
        needed: the fewest things a split of a share above zero must have; a small share is rounded up to it.
        what: the things, for the message.

    Raises:
        RequestError: there are too few for every split.
    """
    num_validation = max(round(total * validation), needed) if validation > 0 else 0
    num_test = max(round(total * test), needed) if test > 0 else 0
    num_train = total - num_validation - num_test
    if num_train < needed and total * (1 - validation - test) > 0 and num_validation + num_test > 2 * needed:
        # Both shares were rounded up to everything: what training needs comes out of the larger of them.
        missing = needed - num_train
        num_validation, num_test = (
            (num_validation - missing, num_test) if num_validation >= num_test else (num_validation, num_test - missing)
        )
        num_train = needed
    if num_train < needed:
        splits = 1 + (validation > 0) + (test > 0)
        each = f"one sequence of {needed - 1} needs {needed}" if needed > 1 else "each split needs 1"
        raise RequestError(
            f"the data has {total} {what} and {each}: {splits} splits need at least {splits * needed}; give more data, "
            f"{'lower data.sequence, ' if needed > 1 else ''}or set data.validation and data.test to 0"
        )
    held_out = num_train + num_validation
    return range(num_train), range(num_train, held_out), range(held_out, total)
