"""The receipt of an epoch: that the run trained on every sample once, proved while it runs and in constant memory.

Every rank adds up a 128-bit hash of the number of each sample that it trained on. At the end of an epoch the sums of all replicas
are added, modulo 2^128, and must be the sum over the whole dataset: a lost sample, a repeated one or one that was swapped for
another changes it, whatever the order, the plan, and the number of processes between which the epoch was resumed. The sum so far
is part of a checkpoint.

What has no "once each" has no receipt, and says why: streams, draws with weights, a sampler of the user's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RunError

_MASK = (1 << 32) - 1
_MODULUS = 1 << 128
_AT_ONCE = 1 << 16


def hash_rows(ids: NDArray[np.int64]) -> int:
    """The sum of 128-bit hashes of these ids, modulo 2^128."""
    total = 0
    for half, key in enumerate((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)):
        values = ids.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
        values = values ^ (values >> np.uint64(31))
        low = int((values & np.uint64(_MASK)).sum(dtype=np.uint64))
        high = int((values >> np.uint64(32)).sum(dtype=np.uint64))
        total += (low + (high << 32)) << (64 * half)
    return total % _MODULUS


def hash_range(rows: range) -> int:
    """The sum over samples that lie next to one another; some thousand at a time, so the memory that it takes is constant."""
    total = 0
    for start in range(rows.start, rows.stop, _AT_ONCE):
        total += hash_rows(np.arange(start, min(start + _AT_ONCE, rows.stop), dtype=np.int64))
    return total % _MODULUS


def share_of_range(num_samples: int, rank: int, size: int) -> range:
    """The samples that one of ``size`` ranks hashes, where all together find the sum over the dataset."""
    return range(num_samples * rank // size, num_samples * (rank + 1) // size)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Samples as a sum: how many, and of which."""

    rows: int = 0
    total: int = 0
    """Of their hashes, modulo 2^128."""

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(rows=self.rows + other.rows, total=(self.total + other.total) % _MODULUS)

    def __sub__(self, other: "Counted") -> "Counted":
        return Counted(rows=self.rows - other.rows, total=(self.total - other.total) % _MODULUS)

    @classmethod
    def of(cls, ids: NDArray[np.int64]) -> "Counted":
        """These samples."""
        return cls(rows=len(ids), total=hash_rows(ids))


@dataclass(frozen=True, kw_only=True)
class ReceiptState:
    """What all ranks together know of the epoch's receipt; it goes into every checkpoint."""

    epoch: int = 0
    rows: int = 0
    """Samples of this epoch that were trained on."""
    total: int = 0
    """Of their hashes, modulo 2^128."""
    order: str = ""
    """The data and its order, in a line: another one in the middle of an epoch has no once each."""
    reason: str = ""
    """Why this epoch cannot be proved; empty where it can."""
    proved: int = 0
    """Epochs of the run that were proved."""

    @property
    def counted(self) -> Counted:
        """The samples of this epoch."""
        return Counted(rows=self.rows, total=self.total)

    def plus(self, more: Counted) -> "ReceiptState":
        """With more samples of this epoch."""
        found = self.counted + more
        return replace(self, rows=found.rows, total=found.total)

    def next_epoch(self, *, is_proved: bool) -> "ReceiptState":
        """At the beginning of the epoch after this one."""
        return replace(self, epoch=self.epoch + 1, rows=0, total=0, reason="", proved=self.proved + is_proved)

    def as_values(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "total": f"{self.total:032x}"}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "ReceiptState":
        """Back from JSON.

        Raises:
            ValueError: it is something else.
        """
        total = values["total"]
        if type(total) is not str or len(total) != 32:
            raise ValueError(f"the sum of a receipt is {str(total)[:40]!r}")
        found = cls(**{**values, "total": int(total, 16)})
        for name in ("epoch", "rows", "proved"):
            value = getattr(found, name)
            if type(value) is not int or not 0 <= value < 1 << 62:
                raise ValueError(f"{name} of a receipt is {str(value)[:40]!r}")
        if type(found.order) is not str or type(found.reason) is not str:
            raise ValueError("a receipt's order or reason is no text")
        return found


def taken_up(state: ReceiptState | None, *, epoch: int, offset: int, order: str) -> ReceiptState:
    """The receipt with which a run goes on at a position.

    Args:
        state: of the checkpoint; None where it has none.
        epoch: of the position.
        offset: samples of that epoch that were handed out before it.
        order: the data and its order now.
    """
    before = state or ReceiptState()
    fresh = ReceiptState(epoch=epoch, order=order, proved=before.proved)
    if offset == 0:
        return fresh
    if state is None:
        return replace(fresh, reason="the run went on in the middle of an epoch from a checkpoint without a receipt")
    if state.epoch != epoch:
        return replace(
            fresh, reason=f"the checkpoint's receipt is of epoch {state.epoch}, its position of epoch {epoch}"
        )
    if state.order != order:
        return replace(fresh, reason=f"the epoch began with {state.order or 'no order'}, and goes on with {order}")
    return state


@dataclass(frozen=True, kw_only=True)
class RankCount:
    """What one rank trained on since all ranks counted together last."""

    rank: int
    replica: int
    counted: Counted


def add_replicas(parts: Sequence[RankCount]) -> Counted:
    """The samples of all replicas: each once, however many ranks compute it.

    Raises:
        RunError: ranks of one replica trained on different samples; names both. All ranks find the same.
    """
    first: dict[int, RankCount] = {}
    for part in parts:
        other = first.setdefault(part.replica, part)
        if other.counted != part.counted:
            raise RunError(
                f"ranks {other.rank} and {part.rank} compute replica {part.replica} together and trained on different samples: "
                f"{other.counted.rows} with the sum {other.counted.total:032x}, and {part.counted.rows} with "
                f"{part.counted.total:032x}; their loaders do not read the same, and the weights since are not to be used"
            )
    return sum((part.counted for part in first.values()), Counted())


def refuse_difference(epoch: int, counted: Counted, expected: Counted) -> None:
    """Refuse an epoch that was not every sample once.

    Raises:
        RunError: says how many samples were counted and how many there are.
    """
    if counted == expected:
        return
    missing = expected.rows - counted.rows
    what = (
        f"{missing} are missing"
        if missing > 0
        else f"{-missing} are too many"
        if missing
        else "some are not the right ones"
    )
    raise RunError(
        f"epoch {epoch} trained on {counted.rows} samples and the data has {expected.rows}: {what} (sum of hashes "
        f"{counted.total:032x}, expected {expected.total:032x}). Samples were lost or repeated, so this is not the run that was "
        "asked for; go on from a checkpoint of before this epoch, and report it if your data did not change"
    )
