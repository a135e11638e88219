"""Newer versions of a run's data: the server that leads the log looks for them, and the log says which epoch reads which."""

import asyncio
import contextlib
from collections.abc import Callable

from shoal.core.events import DataGrew, Event
from shoal.paramserver.epochs import EpochTable
from shoal.paramserver.server.server import Server
from shoal.paramserver.waiting import NotPrimary
from shoal.serverrun.server.source import ShardSource, ends_the_run

_LOOK_SECONDS = 0.5


async def follow_versions(server: Server, source: ShardSource, report: Callable[[Event], None]) -> None:
    """Tell the log of newer versions, and the events which epoch has taken one up, until it is cancelled.

    Raises:
        RequestError: a version has other columns, or samples that the model has no place for.
    """
    told = source.begun_version
    while True:
        log_leader = server.log_leader
        table = None if log_leader is None else log_leader.command_log.update_log.receipts.epochs
        if log_leader is not None and table is not None:
            with ends_the_run():
                version, samples = await asyncio.to_thread(source.newest)
            if version > table.newest_version:
                # Where another leads the log meanwhile, it looks itself.
                with contextlib.suppress(NotPrimary):
                    await log_leader.grow(version, samples)
            told = _report(table, told, report)
        await asyncio.sleep(_LOOK_SECONDS)


def _report(table: EpochTable, told: int, report: Callable[[Event], None]) -> int:
    """Say which versions were taken up after this one; the newest of them."""
    for before, span in zip(table.spans, table.spans[1:], strict=False):
        if span.version > told:
            added = span.samples - before.samples
            report(DataGrew(epoch=span.epoch, version=span.version, samples=span.samples, added=added))
    return max(told, table.spans[-1].version)
