"""Takes up newer versions of data that grows, where an epoch begins: the first rank looks, and all ranks do as it says."""

from collections.abc import Callable
from dataclasses import replace

import torch

from shoal.comm.world import World
from shoal.core.errors import RunError
from shoal.core.events import DataGrew, Event
from shoal.data.growing import growing
from shoal.data.order import Position
from shoal.data.source import Source
from shoal.engine.batches.receipt import ReceiptCounter


class DataVersions:
    """Follows the versions of a run's training data; of data that does not grow it does nothing.

    Args:
        source: of the training samples.
        world: the ranks.
        receipt: that counts the samples of epochs.
        report: told of what was taken up.
    """

    def __init__(self, source: Source, world: World, receipt: ReceiptCounter, report: Callable[[Event], None]) -> None:
        self._source, self._world, self._receipt, self._report = growing(source), world, receipt, report

    def look(self, position: Position) -> Position | None:
        """The position with the newest version, where an epoch begins and there is a newer one than it has; else None.

        All ranks call it together, before a step.
        """
        if self._source is None or position.offset:
            return None
        newest = self._source.newest_version() if self._world.is_first else 0
        told = torch.tensor([newest], dtype=torch.int64, device=self._world.device)
        newest = int(self._world.all_reduce_(told).item())
        if newest <= self._source.version and position.version == self._source.version:
            return None
        before = len(self._source)
        if newest > self._source.version:
            self._source.grow(newest)
            if self._world.is_first:
                added = len(self._source) - before
                self._report(DataGrew(epoch=position.epoch, version=newest, samples=len(self._source), added=added))
        found = replace(position, version=self._source.version)
        self._receipt.take_up(self._receipt.state, found)
        return found

    def go_on(self, position: Position) -> None:
        """Read the version that a checkpoint, or the state of another rank, was made with.

        Raises:
            RunError: the recipe does not follow the data, and the run that saved the checkpoint did.
        """
        version = position.version
        if self._source is not None and version not in (0, self._source.version):
            self._source.grow(version)
        if version and self._source is None:
            raise RunError(
                f"the epoch was begun with version {version} of data that grows, and this run does not follow it; set "
                "data.follow = true, as the run did that saved this"
            )
