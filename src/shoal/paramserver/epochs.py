"""Epochs of data that grows: which version each epoch of the work queue reads, and how many samples it has.

There is no step that all workers begin together, so the update log decides: where the first work unit of an epoch is handed out,
the epoch reads the newest version that the log has been told of, and every work unit of it says so. The table is a part of the
log: every copy of it and every checkpoint has it, so a work unit has the same samples whoever does it, before a death and after.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.data.order import Position

_KEPT = 256
"""Versions that are remembered: work units of older epochs are long done."""


class EpochSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch."""

    epoch: int
    first_step: int
    version: int
    """Of the data, that it reads."""
    samples: int

    def steps(self, batch: int) -> int:
        """Of the epoch, with so many samples in a step."""
        return -(-self.samples // batch)


class EpochTable:
    """The epochs of a run.

    Args:
        batch: samples of a step.
        shares: work units of a step.
        first: the epoch that the run begins with.
    """

    def __init__(self, *, batch: int, shares: int, first: EpochSpan) -> None:
        self.batch, self.shares = batch, shares
        self.spans = [first]
        """The first epoch of each version that was taken up, in order."""
        self._newest = (first.version, first.samples)
        self._opened = first.first_step - 1

    @property
    def newest_version(self) -> int:
        """That the log was told of."""
        return self._newest[0]

    def at(self, step: int) -> EpochSpan:
        """The epoch of a step; of one that is not open yet, as it would be with no newer version."""
        span = next((one for one in reversed(self.spans) if one.first_step <= step), self.spans[0])
        steps = span.steps(self.batch)
        later = (step - span.first_step) // steps
        return msgspec.structs.replace(span, epoch=span.epoch + later, first_step=span.first_step + later * steps)

    def position(self, step: int) -> Position:
        """Where the data is before a step."""
        span = self.at(step)
        return Position(epoch=span.epoch, offset=(step - span.first_step) * self.batch, version=span.version)

    def tell(self, version: int, samples: int) -> None:
        """There is a version with so many samples."""
        self._newest = max(self._newest, (version, samples))

    def open(self, step: int) -> EpochSpan:
        """The epoch of a step of which a work unit is handed out. With the first one of an epoch it is decided what it reads."""
        found = self.at(step)
        if step > self._opened:
            self._opened = step
            version, samples = self._newest
            if step == found.first_step and version > found.version:
                found = msgspec.structs.replace(found, version=version, samples=samples)
                self.spans = [*self.spans, found][-_KEPT:]
        return found

    def begin_at(self, step: int) -> None:
        """No step from this one on is open: a run goes on without the log of the one before."""
        self.spans = [one for one in self.spans if one.first_step < step] or self.spans[:1]
        self._opened = step - 1

    def export(self) -> dict[str, Any]:
        """For ``json``."""
        spans = [msgspec.to_builtins(one) for one in self.spans]
        return {
            "batch": self.batch,
            "shares": self.shares,
            "spans": spans,
            "newest": list(self._newest),
            "opened": self._opened,
        }

    @classmethod
    def restore(cls, data: Mapping[str, Any]) -> "EpochTable":
        """The inverse of ``export``."""
        spans = msgspec.convert(data["spans"], list[EpochSpan])
        table = cls(batch=data["batch"], shares=data["shares"], first=spans[0])
        table.spans, table._opened = spans, data["opened"]
        version, samples = data["newest"]
        table._newest = (version, samples)
        return table
