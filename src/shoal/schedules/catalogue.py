"""Every family by name, and the schedule of one for given numbers."""

from collections.abc import Sequence

from shoal.core.errors import RequestError, nearest
from shoal.core.pipelines import replica_problems, write_replicas
from shoal.schedules.families.asynchronous import PIPEDREAM, PIPEDREAM_2BW, PIPEDREAM_FLUSH, PIPEDREAM_VSYNC
from shoal.schedules.families.chimera import CHIMERA
from shoal.schedules.families.dual import DUALPIPE, DUALPIPEV
from shoal.schedules.families.line import GPIPE, ONE_F_ONE_B
from shoal.schedules.families.loop import INTERLEAVED, LOOPED_BFS
from shoal.schedules.families.vee import V_HALF, V_MIN, ZBV
from shoal.schedules.families.zerobubble import ZB_H1, ZB_H2
from shoal.schedules.family import Family, Size
from shoal.schedules.rules import check
from shoal.schedules.schedule import Schedule

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        GPIPE,
        ONE_F_ONE_B,
        INTERLEAVED,
        LOOPED_BFS,
        ZB_H1,
        ZB_H2,
        ZBV,
        V_HALF,
        V_MIN,
        CHIMERA,
        DUALPIPE,
        DUALPIPEV,
        PIPEDREAM,
        PIPEDREAM_VSYNC,
        PIPEDREAM_2BW,
        PIPEDREAM_FLUSH,
    )
}


def find_family(name: str) -> Family:
    """The family of this name.

    Raises:
        RequestError: there is none; offers the nearest name.
    """
    if name not in FAMILIES:
        close = nearest(name.lower(), FAMILIES)
        advice = f"did you mean {close!r}?" if close else f"there are {', '.join(FAMILIES)}"
        raise RequestError(f"there is no schedule {name!r}; {advice}")
    return FAMILIES[name]


_MOST_RANKS, _MOST_CELLS = 1024, 2**22
"""Every cell is generated and checked before anything starts: a number that was mistyped must be an answer, not a long wait."""


def make_schedule(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    replicas: Sequence[int] | None = None,
    steps: int = 1,
) -> Schedule:
    """A legal schedule of a family.

    Args:
        name: of the family.
        ranks: ranks of the pipeline.
        microbatches: of one step.
        chunks: stages per rank; the family's own number when left out.
        replicas: ranks of every stage, which take turns at the microbatches; every rank has stages of its own when left out.
        steps: steps that follow one another without a flush; only for families that do not flush.

    Raises:
        RequestError: there is no such family, or it cannot be had in this size; says why.
    """
    family = find_family(name)
    if chunks is None:
        chunks = family.default_chunks if family.chunks is None else family.chunks
    turns = tuple(replicas or ())
    size = Size(ranks, microbatches, chunks, turns)
    for problem in _problems(family, size):
        rest = f"replicas={write_replicas(turns)}" if turns else f"chunks={chunks}"
        raise RequestError(f"{name} with pp={ranks}, microbatches={microbatches}, {rest}: {problem}")
    if steps > 1 and not family.updates.flows:
        raise RequestError(f"{name} ends every step with a flush; ask for one step, not for {steps}")
    stream = Size(ranks, microbatches * steps, chunks, turns)
    schedule = Schedule(
        name=name,
        grid=stream.grid(family.fold),
        rows=family.rows(stream),
        updates=family.updates,
        accumulate=microbatches if family.accumulates else 1,
        activation_bound=tuple(family.activations(stream, rank) for rank in range(ranks)),
        version_bound=tuple(family.versions(stream, rank) for rank in range(ranks)),
    )
    # A generator is trusted no more than a user's file.
    check(schedule)
    return schedule


def _problems(family: Family, size: Size) -> list[str]:
    found = [
        f"{word} is {value}, and must be at least 1"
        for word, value in (("pp", size.ranks), ("microbatches", size.microbatches), ("chunks", size.chunks))
        if value < 1
    ]
    cells = size.ranks * size.chunks * size.microbatches
    if size.ranks > _MOST_RANKS or cells > _MOST_CELLS:
        found.append(
            f"{size.ranks} ranks and {cells} stages x microbatches would take minutes to lay out and check; the limits are "
            f"{_MOST_RANKS} and {_MOST_CELLS}"
        )
    if family.chunks is not None and size.chunks != family.chunks:
        found.append(f"it has {family.chunks} stage(s) per rank, and {size.chunks} are asked for; leave chunks out")
    if size.replicas and not family.takes_replicas:
        takers = ", ".join(other.name for other in FAMILIES.values() if other.takes_replicas)
        found.append(f"it has no stages of several ranks; leave replicas out, or use one of {takers}")
    elif size.replicas:
        found += replica_problems(size.replicas, size.ranks)
    return found or list(family.problems(size))
