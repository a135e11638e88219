"""The table of ``shoal data bench --caches``: every eviction policy on the traces of training, beside the optimum."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.cache.replay import Replayed


def bench_caches(
    *, seed: int = 1, share: float = 0.25, policies: Sequence[str] = (), num_keys: int = 1000
) -> dict[str, Any]:
    """Replay policies, all of them where none is named, print the table, and return what ``--json`` writes.

    Raises:
        RequestError: ``share`` is no share, or there is no such policy.
    """
    from shoal.cli.console import print_table
    from shoal.core.errors import RequestError
    from shoal.data.cache.replay import replay_all

    if not 0 < share < 1:
        raise RequestError(f"a cache of {share:g} of the keys; give a share between 0 and 1, such as 0.25")
    rows = replay_all(seed=seed, share=share, policies=policies, num_keys=num_keys)
    header, lines = cache_table(rows)
    print(
        f"hit rates of a cache that holds {share:.0%} of the keys; for shuffles of blocks, fetches per block and epoch.\n"
        "belady is the optimum: it knows the whole trace. planned knows what the loader knows.\n"
    )
    print_table(header, lines)
    return {
        "seed": seed,
        "share": share,
        "keys": num_keys,
        "policies": {
            row[0].policy: {each.trace: {"accesses": each.accesses, "hits": each.hits} for each in row} for row in rows
        },
    }


def cache_table(rows: Sequence[Sequence["Replayed"]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines, a line for each policy."""
    from shoal.data.cache.replay import fetches_per_block

    header = ["policy", *(each.trace for each in rows[0])]
    lines = []
    for row in rows:
        cells = [
            f"{fetches_per_block(each):.2f}" if each.trace.endswith(" shuffle") else f"{each.hit_ratio:.3f}"
            for each in row
        ]
        lines.append([row[0].policy, *cells])
    return header, lines
