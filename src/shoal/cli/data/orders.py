"""The table of ``shoal data bench --order``: how well each order of an epoch of a store mixes, and what it fetches."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.store.reader import StoreReader


def bench_orders(reader: "StoreReader", *, batch: int, window: int | None, rows: int) -> dict[str, Any]:
    """Measure the three orders of ``data.order``, print the table, and return what ``--json`` writes.

    Args:
        reader: of the store; its blocks are used, its rows are not read.
        batch: rows of a global batch.
        window: blocks of a window, and of the cache that counts fetches; None for five times the batch.
        rows: of an epoch that are looked at, at most.

    Raises:
        RequestError: the store has fewer rows than a batch.
    """
    from shoal.cli.console import print_table
    from shoal.core.errors import RequestError
    from shoal.data.sampling.quality import measure_order
    from shoal.data.sampling.samplers import Sampling, Sequential, Shuffled
    from shoal.data.sampling.window import Windowed, describe_window

    if len(reader) < batch:
        raise RequestError(f"the store has {len(reader)} rows, and a batch {batch}; give a smaller --batch")
    starts = reader.block_starts
    size = min(window or 5 * batch, len(starts) - 1)
    orders: dict[str, Sampling] = {
        "full": Shuffled(0, len(reader)),
        "window": Windowed(0, starts, size),
        "time": Sequential(len(reader)),
    }
    most = max(1, rows // batch)
    found = {
        name: measure_order(sampling, starts, batch=batch, cache_blocks=size, most_batches=most)
        for name, sampling in orders.items()
    }
    print(
        f"batches of {batch} of {len(reader)} rows in {len(starts) - 1} blocks; a window and the cache have {size} blocks.\n"
        "chi2 and variance ratio of rows sorted by their label are 1 where the shuffle is perfect.\n"
    )
    print_table(
        ("order", "chi2", "variance ratio", "lag-1 correlation", "blocks a batch", "fetches a block"),
        [
            (
                name,
                f"{one.chi2:.2f}",
                f"{one.variance_ratio:.2f}",
                f"{one.lag1:+.2f}",
                f"{one.blocks_per_batch:.1f}",
                f"{one.fetches_per_block:.2f}",
            )
            for name, one in found.items()
        ],
    )
    hint = describe_window(starts, size, batch)
    if hint is not None:
        print(f"\n{hint}")
    return {"batch": batch, "window": size, "blocks": len(starts) - 1, "orders": found}
