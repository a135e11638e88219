"""``shoal data bench``: how fast a store is read here, beside a bare memory map of the same rows."""

from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, print_table, write_result

_Store = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder or address.")]
_Version = Annotated[
    int | None, typer.Option("--version", metavar="N", min=1, help="Which version; the newest when left out.")
]
_Batch = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Rows of one read.")]
_Rows = Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Rows read in each turn at most.")]
_Rounds = Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Turns, of which the medians are printed.")]


def bench(
    store: _Store,
    version: _Version = None,
    batch: _Batch = 32,
    rows: _Rows = 100_000,
    rounds: _Rounds = 3,
    json_file: JsonFile = None,
) -> None:
    """Read STORE in order and at random, in processor time per row, and as much out of a bare memory map."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.data.store.checks.measure import measure_reading
    from shoal.data.store.reader import open_store

    found = measure_reading(open_store(store, version=version), batch=batch, most_rows=rows, rounds=rounds)
    print_table(
        ("order", "store, us a row", "memory map, us a row", "ratio"),
        [
            (one.order, f"{one.store_us:.2f}", f"{one.memmap_us:.2f}", f"{one.store_us / one.memmap_us:.2f}")
            for one in found
        ],
    )
    write_result(json_file, {"store": store, "batch": batch, "orders": found})
