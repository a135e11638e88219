"""Sizes of pipelines: those at which a formula changes in every run of the tests, all of them in `make soak`."""

import pytest

Pairs = list[tuple[int, int]]
EVERY: Pairs = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 33)]


def is_edge(ranks: int, microbatches: int) -> bool:
    """Fewest and most microbatches, and those around one and two for every rank, where schedules fill and begin to repeat."""
    return microbatches in (1, 2, 3, 32) or any(abs(microbatches - times * ranks) <= 1 for times in (1, 2))


EDGES: Pairs = [pair for pair in EVERY if is_edge(*pair)]


def sweep(every: Pairs = EVERY) -> pytest.MarkDecorator:
    """Give a test its ``pairs`` of ranks and microbatches: the edges, and all of them as a soak test."""
    cases = [[pair for pair in every if is_edge(*pair)], pytest.param(every, marks=pytest.mark.soak)]
    return pytest.mark.parametrize("pairs", cases, ids=["edges", "every"])
