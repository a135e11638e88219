"""The receipt of an epoch where updates are made of pushes: sums of the samples of every work unit that is in an update.

There is no step that all workers take together, and under asynchronous rules work units of two epochs are under way at once. So
the update log, which decides which push counts, adds up the rows of each epoch apart: how many samples and the sum of their
hashes, as the worker that computed them says. What is dropped, refused or done by two adds nothing. It is a part of the log, so
every follower and every checkpoint has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.data.receipt import Counted
from shoal.paramserver.epochs import EpochSpan, EpochTable

RowsOfUnit = tuple[int, str]
"""Samples of a work unit, and the sum of their hashes in hexadecimal digits."""


class EpochCount(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an epoch."""

    units: int = 0
    """Work units of it that are in an update."""
    rows: int = 0
    total: str = f"{0:032x}"
    """Of the hashes of its rows, modulo 2^128."""


class EpochClosed(msgspec.Struct, frozen=True, kw_only=True):
    """All work units of an epoch are in updates."""

    epoch: int
    rows: int
    total: str
    """Of the hashes of its rows, modulo 2^128."""
    reason: str = ""
    """Why it cannot be proved; empty where it can."""
    samples: int | None = None
    """That the epoch has, of data that grows; None: those of the data."""

    @property
    def counted(self) -> Counted:
        """The samples that were trained on."""
        return Counted(rows=self.rows, total=int(self.total, 16))


class UnitReceipts:
    """The receipts of a run.

    Args:
        units_per_epoch: work units; 0: nothing is counted.
        first: the first work unit that is counted: a run that went on without the log of the one before knows nothing of
            those before it.
        epochs: of data that grows, whose epochs differ; None for all other data.
    """

    def __init__(self, *, units_per_epoch: int = 0, first: int = 0, epochs: EpochTable | None = None) -> None:
        self.units_per_epoch, self.first, self.epochs = units_per_epoch, first, epochs
        self._open: dict[int, EpochCount] = {}

    def add(self, units: Sequence[int], rows: Sequence[RowsOfUnit]) -> list[EpochClosed]:
        """A push is in an update; the epochs that are complete with it."""
        closed: list[EpochClosed] = []
        if not self.units_per_epoch:
            return closed
        for unit, (count, digest) in zip(units, rows, strict=True):
            epoch, start, length, samples = self._epoch_of(unit)
            if start + length <= self.first:
                continue
            before = self._open.get(epoch, EpochCount())
            both = Counted(rows=before.rows, total=int(before.total, 16)) + Counted(rows=count, total=int(digest, 16))
            now = EpochCount(units=before.units + 1, rows=both.rows, total=f"{both.total:032x}")
            self._open[epoch] = now
            skipped = max(0, self.first - start)
            if now.units + skipped < length:
                continue
            del self._open[epoch]
            why = f"the run went on in the middle of epoch {epoch} without the update log of the one before"
            reason = why if skipped else ""
            closed.append(EpochClosed(epoch=epoch, rows=now.rows, total=now.total, reason=reason, samples=samples))
        return closed

    def read_at(self, step: int) -> EpochSpan | None:
        """What a work unit of this step reads that is handed out now; None where data does not grow."""
        return None if self.epochs is None else self.epochs.open(step)

    def _epoch_of(self, unit: int) -> tuple[int, int, int, int | None]:
        """The epoch of a work unit: its number, its first work unit, how many it has, and its samples where they differ."""
        if self.epochs is None:
            epoch = unit // self.units_per_epoch
            return epoch, epoch * self.units_per_epoch, self.units_per_epoch, None
        shares, span = self.epochs.shares, self.epochs.at(unit // self.epochs.shares)
        return span.epoch, span.first_step * shares, span.steps(self.epochs.batch) * shares, span.samples

    def export(self) -> dict[str, Any]:
        """For ``json``."""
        return {
            "units_per_epoch": self.units_per_epoch,
            "first": self.first,
            "open": {str(epoch): msgspec.to_builtins(count) for epoch, count in sorted(self._open.items())},
            **({} if self.epochs is None else {"epochs": self.epochs.export()}),
        }

    @classmethod
    def restore(cls, data: Mapping[str, Any]) -> "UnitReceipts":
        """The inverse of ``export``."""
        epochs = EpochTable.restore(data["epochs"]) if "epochs" in data else None
        receipts = cls(units_per_epoch=data["units_per_epoch"], first=data["first"], epochs=epochs)
        receipts._open = {int(epoch): msgspec.convert(count, EpochCount) for epoch, count in data["open"].items()}
        return receipts

    def going_on(self, units_per_epoch: int, settled: int) -> "UnitReceipts":
        """These where a run goes on with them, and epochs are as long. Others, where the log of the run before has none: nobody
        knows which work units of the epochs under way they have not seen, so those have no receipt.

        Args:
            units_per_epoch: of the run that goes on.
            settled: work units that are in an update.
        """
        if units_per_epoch == self.units_per_epoch:
            return self
        # Under an asynchronous rule units behind this one may be settled as well: their epoch is left out whole.
        epoch = settled // units_per_epoch if units_per_epoch else 0
        return UnitReceipts(units_per_epoch=units_per_epoch, first=(epoch + 2) * units_per_epoch, epochs=self.epochs)
