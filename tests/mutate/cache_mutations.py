"""Mutations of caches of remote data: rows of *Failure*."""

from promises import Mutation

CACHE = "what a data cache serves has the bytes of the storage"

CACHES = [
    Mutation(
        promise=CACHE,
        what="a block on the disk is not held to its digest",
        file="src/shoal/data/tiers/disk.py",
        old="        if len(data) < _HEADER.size or _HEADER.unpack_from(data) != (_MAGIC, len(content), _digest(key, content)):",
        new="        if len(data) < _HEADER.size:",
        test="tests/unit/data/tiers/test_cache.py::test_a_block_that_was_altered_on_the_disk_is_refused_and_fetched_again[flip]",
        seconds=3,
    ),
    Mutation(
        promise=CACHE,
        what="what comes from the storage is not held to its digest",
        file="src/shoal/data/tiers/cache.py",
        old="            if found == key.digest:",
        new="            if True:",
        test="tests/unit/data/tiers/test_cache.py::test_wrong_bytes_on_their_way_are_fetched_again_and_never_handed_on",
        seconds=3,
    ),
    Mutation(
        promise=CACHE,
        what="nobody waits for another rank's fetch",
        file="src/shoal/data/tiers/disk.py",
        old="                is_held = stack.enter_context(lock)",
        new="                is_held = lock is not None",
        test="tests/chaos/test_cache_kills.py::test_a_block_is_fetched_once_however_many_ranks_ask",
        seconds=8,
    ),
]
