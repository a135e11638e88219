"""Takes in what arrives, version by version: what was read is committed with how far it goes, so that nothing comes twice.

Killed at any moment and started again it goes on behind the last row of the store. Of two that watch the same source one commits,
and the other looks again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError
from shoal.data.storage.protocol import Missing
from shoal.data.store.folder import open_folder
from shoal.data.store.ingest.arrivals import Arrivals, Arrived
from shoal.data.store.manifest import Manifest
from shoal.data.store.writer import BuildOptions, SourceMoved, append_store, build_store


@dataclass
class TakenIn:
    """What was taken in since the start."""

    versions: int = 0
    rows: int = 0


def take_in(
    arrivals: Arrivals,
    store: str,
    *,
    options: BuildOptions,
    every_s: float,
    idle_s: float | None,
    is_over: Callable[[], bool],
    on_version: Callable[[Manifest, str], None],
) -> TakenIn:
    """Take in what arrives until it is over, or nothing has arrived for so long.

    Args:
        arrivals: the source.
        store: address of the store; made with the first rows where there is none.
        options: of a store that is made, and of blocks.
        every_s: seconds between two looks, at most.
        idle_s: seconds without anything new after which it ends; None: never.
        is_over: asked between two looks.
        on_version: told of each version and of what is new in it.

    Raises:
        RequestError: a row does not fit, or the store has other columns.
        RunError: the source or the store does not answer.
    """
    folder, done = open_folder(store), TakenIn()
    idle = None if idle_s is None else Deadline(seconds=idle_s)
    while not is_over():
        newest = folder.newest_version()
        manifest = None if newest is None else folder.manifest(newest)
        try:
            arrived = arrivals.look(
                {} if manifest is None else manifest.source, None if manifest is None else manifest.schema, every_s
            )
            if arrived is None:
                if idle is not None and idle.is_over:
                    break
                continue
            made = _commit(arrived, manifest, store, options)
        except (SourceMoved, Missing):
            # Somebody else has taken it in meanwhile, or a file was moved away: look again.
            continue
        done.versions += 1
        done.rows += made.num_rows - (0 if manifest is None else manifest.num_rows)
        idle = None if idle_s is None else Deadline(seconds=idle_s)
        on_version(made, arrived.what)
    return done


def _commit(arrived: Arrived, manifest: Manifest | None, store: str, options: BuildOptions) -> Manifest:
    """The version that has these rows."""
    if manifest is not None:
        return append_store(arrived.tables, store, block=options.block, offsets=arrived.offsets, after=arrived.after)
    try:
        return build_store(arrived.tables, store, options=options, schema=arrived.schema, offsets=arrived.offsets)
    except RequestError:
        if open_folder(store).newest_version() is not None:
            raise SourceMoved(f"{store} was made by somebody else meanwhile") from None
        raise
