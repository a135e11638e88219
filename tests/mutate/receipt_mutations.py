"""Mutations of orders, receipts and data that grows: rows of *Numerics*."""

from promises import Mutation

PROVED = "every epoch is proved to be every sample once"
GROWS = "a run that follows a store takes up a version"
WINDOWS = "an order in windows of blocks has every sample once"

_UNIT = "tests/unit/engine/batches/test_receipt.py::"

RECEIPTS = [
    Mutation(
        promise=PROVED,
        what="the sum of an epoch is not compared",
        file="src/shoal/data/receipt.py",
        old="    if counted == expected:",
        new="    if counted.rows == expected.rows:",
        test=_UNIT + "test_a_lost_or_repeated_sample_ends_the_run",
        seconds=5,
    ),
    Mutation(
        promise=PROVED,
        what="a run that goes on forgets the sum of its epoch",
        file="src/shoal/data/receipt.py",
        old="    return state\n\n\n@dataclass(frozen=True, kw_only=True)\nclass RankCount:",
        new="    return fresh\n\n\n@dataclass(frozen=True, kw_only=True)\nclass RankCount:",
        test=_UNIT + "test_a_run_that_goes_on_proves_its_epoch_and_one_that_forgets_does_not",
        seconds=5,
    ),
    Mutation(
        promise=PROVED,
        what="ranks that compute a replica together count each for itself",
        file="src/shoal/data/receipt.py",
        old="    return sum((part.counted for part in first.values()), Counted())",
        new="    return sum((part.counted for part in parts), Counted())",
        test="tests/unit/data/test_receipt.py::test_a_replica_counts_once_however_many_ranks_compute_it",
        seconds=5,
    ),
    Mutation(
        promise=PROVED,
        what="a step that failed after it was announced counts twice",
        file="src/shoal/engine/batches/receipt.py",
        old="        mine = self._own + more",
        new="        mine = self._own = self._own + more",
        test=_UNIT + "test_a_step_that_was_announced_and_never_taken_does_not_count",
        seconds=5,
    ),
    Mutation(
        promise=GROWS,
        what="a run that goes on in the middle of an epoch has another version",
        file="src/shoal/engine/batches/growing.py",
        old="            self._source.grow(version)",
        new="            self._source.grow(self._source.newest_version())",
        test="tests/multiproc/test_growing_data.py::test_a_version_is_taken_up_by_all_ranks_and_a_resume_keeps_that_of_its_epoch",
        seconds=20,
    ),
    Mutation(
        promise=WINDOWS,
        what="a block is looked for at the place that it has in the data and not in the window",
        file="src/shoal/data/sampling/window.py",
        old="self._starts[self._blocks[first + which]]",
        new="self._starts[first + which]",
        test="tests/unit/data/sampling/test_window.py::test_every_sample_comes_once_and_a_window_is_read_before_the_next",
        seconds=5,
    ),
]
