"""GPipe, 1F1B and their kin: one stage per rank, stages of several ranks, without a flush, and several stages per rank.

Ranks of one stage take turns at the microbatches. The turns are PipeDream's (Narayanan et al., SOSP 2019, section 3.2,
"1F1B-RR"): of the R ranks of a stage, number m mod R does the forward and the backward of microbatch m, and each by itself
alternates between the two.

PipeDream's own schedules are 1F1B without a flush. What sets them apart is when weights change and which version is used.

With several stages per rank, stage s is on rank s mod P: interleaved 1F1B and the breadth-first loop. A microbatch goes round
the ranks once per chunk. The last rank waits at the start for P-1 stages that are V times smaller, so the bubble is a V-th of
1F1B's. Interleaved 1F1B goes round with a group of about P microbatches at a time and starts backwards early. Breadth-first
goes round with all of them: it holds all activations, and needs a chunk's weights only twice.

With F=1, B=2, P ranks, V chunks and M microbatches both take 3 max(VM + P-1, VP + M-1), the least that any order takes: the
last rank works for 3VM with P-1 forwards before and P-1 backwards after; the last stage for 3M, with VP-1 of each.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from shoal.schedules.families.family import Family, Size
from shoal.schedules.schedule import Action, Cell, Fold, Kind, Row, Updates


def one_by_one(forwards: list[Action], backwards: list[Action], warm_up: int) -> Row:
    """``warm_up`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    cells: list[Cell] = [(action,) for action in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        cells += [(forward,), (backward,)]
    return (*cells, *((action,) for action in backwards[max(0, len(forwards) - warm_up) :]))


def line_row(size: Size, rank: int, warm_up: int) -> Row:
    """A rank's row: the microbatches of its only stage that are its turn, of which ``warm_up`` go ahead at most."""
    (stage,) = size.grid(Fold.LINE).stages_of(rank)
    own = own_microbatches(size, rank)
    forwards, backwards = (
        [Action(stage, kind, microbatch) for microbatch in own] for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    return one_by_one(forwards, backwards, min(len(own), warm_up))


def own_microbatches(size: Size, rank: int) -> range:
    """The microbatches that are a rank's turn: all where its stage has no other rank."""
    if not size.replicas:
        return range(size.microbatches)
    grid = size.grid(Fold.LINE)
    (stage,) = grid.stages_of(rank)
    return range(rank - grid.ranks_of(stage)[0], size.microbatches, size.replicas[stage])


def one_f_one_b_rows(size: Size) -> tuple[Row, ...]:
    """As few forwards ahead as keep the last rank busy: rank i of a line holds P-i microbatches."""
    return tuple(line_row(size, rank, one_f_one_b_ahead(size, rank)) for rank in range(size.ranks))


def one_f_one_b_ahead(size: Size, rank: int) -> int:
    """Forwards before the first backward: as many as the next stage has microbatches under way, shared by this stage's ranks.

    With w ahead on each of R ranks a stage has (w+1) R under way, so w_s = ceil((w_(s+1) + 1) R_(s+1) / R_s), P-1-i in a line. It
    is PipeDream's number, ceil(ranks of later stages / R_s), or more where that was rounded up on the way: without that 1-2-1
    waits for a third of its time. No rank waits for ever: a backward of stage s+1 comes after a forward that is w_(s+1) R_(s+1)
    microbatches later, and stage s, w_s R_s ahead, has done that forward before it waits for that backward.
    """
    if not size.replicas:
        return size.ranks - 1 - rank
    (stage,) = size.grid(Fold.LINE).stages_of(rank)
    ahead = 0
    for own, after in reversed(list(pairwise(size.replicas[stage:]))):
        ahead = -(-(ahead + 1) * after // own)
    return ahead


def one_f_one_b_activations(size: Size, rank: int) -> int:
    """Microbatches between rank i and the end of the pipeline."""
    return min(len(own_microbatches(size, rank)), one_f_one_b_ahead(size, rank) + 1)


def idle_turns(size: Size) -> Iterator[str]:
    """Ranks of a stage that would never have a turn."""
    most = max(size.replicas, default=1)
    if size.microbatches < most:
        yield (
            f"stage {size.replicas.index(most)} has {most} ranks that take turns, and {size.microbatches} microbatches are too "
            f"few for all of them; set microbatches to {most} or more"
        )


GPIPE = Family(
    name="gpipe",
    summary="all forwards, then all backwards",
    source="Huang et al., 2019, arXiv 1811.06965",
    fold=Fold.LINE,
    rows=lambda size: tuple(line_row(size, rank, size.microbatches) for rank in range(size.ranks)),
    activations=lambda size, rank: len(own_microbatches(size, rank)),
    problems=idle_turns,
    takes_replicas=True,
)

ONE_F_ONE_B = Family(
    name="1f1b",
    summary="a backward as soon as it can be, so that few activations are held",
    source="Narayanan et al., 2021, arXiv 2104.04473, figure 3",
    fold=Fold.LINE,
    rows=one_f_one_b_rows,
    activations=one_f_one_b_activations,
    problems=idle_turns,
    takes_replicas=True,
)


_PIPEDREAM = "Narayanan et al., 2019, doi 10.1145/3341301.3359646"
_2BW = "Narayanan et al., 2021, arXiv 2006.09503"


def _few_microbatches(size: Size) -> Iterator[str]:
    if size.microbatches < size.ranks:
        yield (
            f"two versions are enough only when a step has as many microbatches as there are ranks, and {size.microbatches} are "
            f"fewer than {size.ranks}; set microbatches to {size.ranks} or more"
        )


PIPEDREAM = replace(
    ONE_F_ONE_B,
    name="pipedream",
    summary="an update per microbatch; its backward uses the weights of its forward (weight stashing)",
    source=_PIPEDREAM,
    # As many as there are microbatches between a rank and the end: each came in under another version.
    versions=lambda size, rank: min(size.microbatches, size.ranks - rank),
    takes_replicas=False,
    updates=Updates.STASHED,
)

PIPEDREAM_VSYNC = replace(
    ONE_F_ONE_B,
    name="pipedream-vsync",
    summary="an update per microbatch; a microbatch uses one version on all stages (vertical sync)",
    source=_PIPEDREAM,
    # Later stages are ahead in updates and keep what they have overtaken, until its microbatch has passed.
    versions=lambda size, rank: min(size.microbatches + 1, size.ranks),
    takes_replicas=False,
    updates=Updates.VERTICAL,
)

PIPEDREAM_2BW = replace(
    ONE_F_ONE_B,
    name="pipedream-2bw",
    summary="an update per step without a flush; double-buffered weights, gradients one version late",
    source=_2BW,
    versions=lambda size, rank: 2,
    problems=_few_microbatches,
    takes_replicas=False,
    updates=Updates.BUFFERED,
    accumulates=True,
)

PIPEDREAM_FLUSH = replace(
    ONE_F_ONE_B,
    name="pipedream-flush",
    summary="1f1b with a flush per step: one version, what one process computes",
    source=_2BW,
)


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
