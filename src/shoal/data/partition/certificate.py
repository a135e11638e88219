"""The proof that a cut is what it says: every row on one side or left out, no key on both, nothing trained on that is too late.

It is made from the sides that were handed out, not from the rule that made them, and every run makes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RunError
from shoal.data.partition.keys import Codes, Groups, add_digests, digest_rows


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a cut, in numbers."""

    name: str
    rows: int
    digest: str
    """Of the set of its row numbers."""
    keys: int | None = None
    """Different keys, where rows are cut by one."""
    earliest: str | None = None
    latest: str | None = None
    """Of the times of its rows, where rows are cut by time."""


@dataclass(frozen=True, kw_only=True)
class CutCertificate:
    """What was proven of a cut."""

    by: str
    total: int
    digest: str
    """Of all rows; the sides' and that of the rows left out add up to it."""
    sides: tuple[Side, ...]
    left_out: int = 0
    left_out_digest: str = "0" * 32
    balance: float = 1.0
    """Rows of the fullest side for its share, over the share; 1 is exact."""
    largest_key: int | None = None
    """Rows of the key with the most."""
    split_keys: tuple[str, ...] = field(default=())
    """Keys that were too heavy for one side, where the recipe allows it; the first few."""

    def as_values(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        found = [f"cut by {self.by}: {self.total} rows, {self.left_out} left out, balance {self.balance:.4f}"]
        for side in self.sides:
            keys = f", {side.keys} keys" if side.keys is not None else ""
            times = f", {side.earliest} to {side.latest}" if side.earliest is not None else ""
            found.append(f"  {side.name}: {side.rows} rows ({side.rows / max(1, self.total):.2%}){keys}{times}")
        if self.largest_key is not None:
            found.append(f"  the largest key has {self.largest_key} rows")
        if self.split_keys:
            found.append(f"  on several sides, being too heavy for one: {', '.join(self.split_keys)}")
        found.append(
            "  proven: every row once"
            + (", no key twice" if self.largest_key is not None and not self.split_keys else "")
        )
        return found


def certify(
    rows: Mapping[str, Codes],
    left_out: Codes,
    *,
    by: str,
    total: int,
    shares: Sequence[float],
    groups: Groups | None = None,
    allowed_split: bool = False,
    times: NDArray[Any] | None = None,
    gap: float = 0.0,
) -> CutCertificate:
    """Prove a cut.

    Args:
        rows: of every side, by its name, the earliest first.
        left_out: rows of no side.
        by: the rule, for people.
        total: how many rows there are.
        shares: of the sides.
        groups: keys that may be on one side only.
        allowed_split: whether heavy ones may be on several.
        times: that sides stand in the order of.
        gap: between them.

    Raises:
        RunError: a row is on two sides or on none, a key on two, or a time too late: a bug of ours.
    """
    seen = np.zeros(total, dtype=np.int64)
    for part in (*rows.values(), left_out):
        np.add.at(seen, part, 1)
    if (seen != 1).any():
        row = int(np.flatnonzero(seen != 1)[0])
        raise RunError(f"the cut by {by} has row {row} on {int(seen[row])} sides; every row must be on one")
    digests = [digest_rows(part) for part in (*rows.values(), left_out)]
    digest = digest_rows(np.arange(total, dtype=np.int64))
    if add_digests(digests) != digest:
        raise RunError(f"the digests of the sides of the cut by {by} do not add up to that of all rows")
    split = _split_keys(rows, groups) if groups is not None else ()
    if split and not allowed_split:
        raise RunError(f"the cut by {by} has the key {split[0]} on two sides")
    if times is not None:
        _check_times(rows, times, gap)
    numbers = times
    sides = tuple(
        Side(
            name=name,
            rows=len(part),
            digest=made,
            keys=None if groups is None else len(np.unique(groups.codes[part])),
            earliest=None if numbers is None or not len(part) else str(numbers[part].min()),
            latest=None if numbers is None or not len(part) else str(numbers[part].max()),
        )
        for (name, part), made in zip(rows.items(), digests, strict=False)
    )
    kept = sum(side.rows for side in sides)
    fills = [
        side.rows * sum(shares) / (share * kept)
        for side, share in zip(sides, shares, strict=True)
        if share > 0 and kept
    ]
    return CutCertificate(
        by=by,
        total=total,
        digest=digest,
        sides=sides,
        left_out=len(left_out),
        left_out_digest=digests[-1],
        balance=max(fills, default=1.0),
        largest_key=None if groups is None or not len(groups.codes) else int(groups.sizes.max()),
        split_keys=split[:8],
    )


def _split_keys(rows: Mapping[str, Codes], groups: Groups) -> tuple[str, ...]:
    count = np.zeros(len(groups.names), dtype=np.int64)
    for part in rows.values():
        count[np.unique(groups.codes[part])] += 1
    return tuple(repr(groups.names[place]) for place in np.flatnonzero(count > 1).tolist())


def _check_times(rows: Mapping[str, Codes], times: NDArray[Any], gap: float) -> None:
    filled = [(name, times[part]) for name, part in rows.items() if len(part)]
    step = np.timedelta64(round(gap * 1e6), "us") if times.dtype.kind == "M" else gap
    for (earlier, before), (later, after) in pairwise(filled):
        if not before.max() + step < after.min():
            raise RunError(
                f"{earlier} has a row of {before.max()} and {later} one of {after.min()}; with the gap it must be earlier by "
                f"{gap:g}"
            )
