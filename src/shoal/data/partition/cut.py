"""From a table and ``[data.cut]`` to the rows of training, validation and test, with the proof."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError, did_you_mean
from shoal.core.seeding import derive_key
from shoal.data.partition.certificate import CutCertificate, certify
from shoal.data.partition.config import CutConfig, gap_seconds
from shoal.data.partition.keys import Codes, Groups, group_rows, mix
from shoal.data.partition.rules import cut_groups, cut_hashes, cut_labels, cut_rows, cut_times
from shoal.data.table import Column, Table

NAMES = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The rows of each side, in ascending order, and the proof."""

    rows: dict[str, Codes]
    certificate: CutCertificate


def cut_table(table: Table, config: CutConfig, *, validation: float, test: float, where: str) -> Cut:
    """Divide the rows of a table.

    Args:
        table: the columns that the cut looks at are enough.
        config: the rule.
        validation: share that is held out for validation.
        test: share that is held out for the test.
        where: the data, for messages.

    Raises:
        RequestError: the key is no column, a side that was asked for is empty, or clocks go back; says the row and the fix.
    """
    shares = (1.0 - validation - test, validation, test)
    num_rows = table.num_rows
    groups: Groups | None = None
    times: NDArray[np.generic] | None = None
    gap = 0.0
    by = config.by if config.key is None else f"{config.by} {config.key}"
    key = None if config.key is None else _column(table, config.key, where)
    if config.by == "rows" or (config.by == "hash" and key is None):
        is_hash = config.by == "hash"
        numbers = mix(np.arange(num_rows, dtype=np.uint64), derive_key("rows", config.seed))
        sides = cut_hashes(numbers, shares) if is_hash else cut_rows(num_rows, shares, config.seed)
    elif config.by == "time":
        assert key is not None
        gap = gap_seconds(config.gap) if isinstance(config.gap, str) else float(config.gap)
        times = _times(key, config, where)
        ids = np.arange(num_rows, dtype=np.int64)
        if config.id is not None:
            ids = group_rows(_column(table, config.id, where), where=where).codes
        is_time = times.dtype.kind == "M"
        plain = times.astype("<M8[us]").view(np.int64) if is_time else times
        sides = cut_times(plain, ids, shares, gap * 1e6 if is_time else gap)
    else:
        assert key is not None
        found = group_rows(key, where=where)
        if config.by in ("label", "behaviour"):
            sides = cut_labels(found, shares, config.seed)
        else:
            groups = found
            sides = (
                cut_hashes(found.hashes(config.seed), shares)[found.codes]
                if config.by == "hash"
                else cut_groups(found, shares, seed=config.seed, split_heavy=config.split_heavy)
            )
    rows = {name: np.flatnonzero(sides == number).astype(np.int64) for number, name in enumerate(NAMES)}
    _refuse_empty(rows, shares, by, num_rows, groups, where)
    certificate = certify(
        rows,
        np.flatnonzero(sides < 0).astype(np.int64),
        by=by,
        total=num_rows,
        shares=shares,
        groups=groups,
        allowed_split=config.split_heavy,
        times=times,
        gap=gap,
    )
    return Cut(rows=rows, certificate=certificate)


def columns_of(config: CutConfig) -> tuple[str, ...]:
    """The columns that a cut looks at."""
    return tuple(name for name in (config.key, config.id) if name is not None)


def _column(table: Table, name: str, where: str) -> Column:
    if name not in table.schema.names:
        raise RequestError(
            f"data.cut: {where} has no column {name!r} to cut by; {did_you_mean(name, table.schema.names)}"
        )
    return table[name]


def _times(column: Column, config: CutConfig, where: str) -> NDArray[np.generic]:
    name = column.field.name
    if column.field.is_ragged or column.field.shape or column.field.dtype.kind not in "iufM":
        raise RequestError(
            f'data.cut: column {name!r} of {where} is {column.field.kind}, and by = "time" needs times or numbers; say its type '
            f'with data.types = {{ {name} = "time" }}'
        )
    values = column.values
    if column.valid is not None and not column.valid.all():
        row = int(np.flatnonzero(~column.valid)[0])
        raise RequestError(
            f"data.cut: {where}, row {row + 1} has no {name!r}, the time that rows are cut by; fill or filter such rows"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise RequestError(f"data.cut: {where}, row {row + 1} has the time {values[row]}; filter such rows")
    back = np.flatnonzero(values[1:] < values[:-1])
    if len(back) and config.backwards == "refuse":
        row = int(back[0]) + 1
        raise RequestError(
            f"data.cut: {where}, row {row + 1}: {name} goes back from {values[row - 1]} to {values[row]} ({len(back)} such "
            f"rows); "
            'sort the data, mend the clock, or set data.cut.backwards = "sort"'
        )
    return values


def _refuse_empty(
    rows: dict[str, Codes], shares: tuple[float, ...], by: str, num_rows: int, groups: Groups | None, where: str
) -> None:
    for (name, part), share in zip(rows.items(), shares, strict=True):
        if share > 1e-9 and not len(part):
            keys = f" of {len(groups.names)} keys" if groups is not None else ""
            raise RequestError(
                f"data.cut: the {name} split is empty: {where} has {num_rows} rows{keys}, cut by {by}, and its share is "
                f"{share:g}; give "
                f"more data, another key or gap, or set data.{name if name != 'train' else 'validation'} to 0"
            )
