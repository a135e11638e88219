"""``shoal data bench``: how fast a store is read here, how well its orders mix, and what policies of caches would do."""

from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, print_table, write_result

_Store = Annotated[
    str | None, typer.Argument(metavar="[STORE]", help="The store's folder or address; not needed with --caches.")
]
_Version = Annotated[
    int | None, typer.Option("--version", metavar="N", min=1, help="Which version; the newest when left out.")
]
_Batch = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Rows of one read, or of a global batch.")]
_Rows = Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Rows read in each turn at most.")]
_Rounds = Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Turns, of which the medians are printed.")]
_Caches = Annotated[
    bool, typer.Option("--caches", help="Replay every eviction policy on the traces of training instead.")
]
_Policy = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="NAME", help="With --caches: this policy and the optimum; repeatable."),
]
_Share = Annotated[
    float, typer.Option("--share", metavar="S", help="With --caches: the share of the keys that the cache holds.")
]
_Keys = Annotated[int, typer.Option("--keys", metavar="N", min=10, help="With --caches: keys of a trace.")]
_Order = Annotated[
    bool, typer.Option("--order", help="Measure how well the orders of an epoch mix, and what they fetch, instead.")
]
_Window = Annotated[
    int | None,
    typer.Option("--window", metavar="N", min=1, help="With --order: blocks of a window; 5 times --batch if left out."),
]


def bench(
    store: _Store = None,
    version: _Version = None,
    batch: _Batch = 32,
    rows: _Rows = 100_000,
    rounds: _Rounds = 3,
    caches: _Caches = False,
    policy: _Policy = None,
    share: _Share = 0.25,
    keys: _Keys = 1000,
    order: _Order = False,
    window: _Window = None,
    json_file: JsonFile = None,
) -> None:
    """Read STORE in order and at random, in processor time per row, and as much out of a bare memory map.

    With --order: how well the batches of each order of an epoch mix, and how often a block is fetched. With --caches: hit
    rates of every eviction policy beside the optimum.
    """
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.core.errors import RequestError

    if window is not None and not order:
        raise RequestError("--window is of --order; give both, or leave it out")
    if policy and not caches:
        raise RequestError("--policy is of --caches; give both, or leave it out")
    if caches:
        from shoal.cli.data.caches import bench_caches

        if store is not None or order:
            raise RequestError("--caches replays traces of its own; leave out STORE and --order, or leave out --caches")
        write_result(json_file, bench_caches(share=share, policies=policy or (), num_keys=keys))
        return
    if store is None:
        raise RequestError("name a store to measure, such as shoal data bench people; only --caches needs none")
    from shoal.data.store.reader import open_store

    reader = open_store(store, version=version)
    if order:
        from shoal.cli.data.orders import bench_orders

        write_result(json_file, {"store": store, **bench_orders(reader, batch=batch, window=window, rows=rows)})
        return
    from shoal.data.store.checks.measure import measure_reading

    found = measure_reading(reader, batch=batch, most_rows=rows, rounds=rounds)
    print_table(
        ("order", "store, us a row", "memory map, us a row", "ratio"),
        [
            (one.order, f"{one.store_us:.2f}", f"{one.memmap_us:.2f}", f"{one.store_us / one.memmap_us:.2f}")
            for one in found
        ],
    )
    write_result(json_file, {"store": store, "batch": batch, "orders": found})
