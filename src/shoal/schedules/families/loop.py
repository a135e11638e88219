"""Several stages per rank, stage s on rank s mod P: interleaved 1F1B and the breadth-first loop.

A microbatch goes round the ranks once per chunk. The last rank waits at the start for P-1 stages that are V times smaller,
so the bubble is a V-th of 1F1B's. Interleaved 1F1B goes round with a group of about P microbatches at a time and starts
backwards early. Breadth-first goes round with all of them: it holds all activations, and needs a chunk's weights only twice.

With F=1, B=2, P ranks, V chunks and M microbatches both take 3 max(VM + P-1, VP + M-1), the least that any order takes: the
last rank works for 3VM with P-1 forwards before and P-1 backwards after; the last stage for 3M, with VP-1 of each.
"""

from itertools import pairwise

from shoal.schedules.families.family import Family, Size
from shoal.schedules.families.line import one_by_one
from shoal.schedules.schedule import Action, Fold, Kind, Row


def _groups(size: Size) -> list[range]:
    """The microbatches that go round together: as many groups as can have P or more, the larger of them first.

    The first rank could take up a smaller group's next chunk only after waiting for the last rank, in every round. When P
    does not divide M, the groups are therefore larger, and not one more; the price is activations.
    """
    number = max(1, size.microbatches // size.ranks)
    least, larger = divmod(size.microbatches, number)
    starts = [index * least + min(index, larger) for index in range(number + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _loop_row(size: Size, rank: int, groups: list[range], warm_up: int) -> Row:
    """Each group through chunk after chunk, and through the backwards of the last chunk first."""
    chunks = range(size.chunks)
    forwards, backwards = (
        [
            Action(chunk * size.ranks + rank, kind, microbatch)
            for group in groups
            for chunk in order
            for microbatch in group
        ]
        for kind, order in ((Kind.FORWARD, chunks), (Kind.BACKWARD, chunks[::-1]))
    )
    return one_by_one(forwards, backwards, warm_up)


def _interleaved_warm_up(size: Size, rank: int) -> int:
    """Forwards ahead of the first pair: all chunks but the last of the first group, and two per rank that comes after.

    Two and not one is the published number: one is as short when transfers are free, two hides part of them. With one chunk
    nothing goes round, and the row is 1F1B's.
    """
    after = size.ranks - 1 - rank
    ahead = after if size.chunks == 1 else (size.chunks - 1) * len(_groups(size)[0]) + 2 * after
    return min(size.chunks * size.microbatches, ahead)


def _interleaved_rows(size: Size) -> tuple[Row, ...]:
    groups = _groups(size)
    return tuple(_loop_row(size, rank, groups, _interleaved_warm_up(size, rank)) for rank in range(size.ranks))


def _breadth_first_rows(size: Size) -> tuple[Row, ...]:
    everything = size.chunks * size.microbatches
    return tuple(_loop_row(size, rank, [range(size.microbatches)], everything) for rank in range(size.ranks))


INTERLEAVED = Family(
    name="interleaved",
    summary="1F1B over several small stages per rank: a shorter bubble for more messages",
    source="Narayanan et al., 2021, arXiv 2104.04473, section 2.2",
    fold=Fold.LOOP,
    rows=_interleaved_rows,
    activations=lambda size, rank: min(size.chunks * size.microbatches, _interleaved_warm_up(size, rank) + 1),
    chunks=None,
)

LOOPED_BFS = Family(
    name="looped-bfs",
    summary="all microbatches through a chunk before the next chunk: weights are needed twice, activations all held",
    source="Lamy-Poirier, 2022, arXiv 2211.05953",
    fold=Fold.LOOP,
    rows=_breadth_first_rows,
    activations=lambda size, rank: size.chunks * size.microbatches,
    chunks=None,
)
