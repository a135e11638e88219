"""Every family of schedules by name, and the schedule that a plan names: one of a family, or the one in a CSV file."""

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.core.errors import RequestError, nearest
from shoal.core.pipelines import DEFAULT_SCHEDULE, is_file, replica_problems, write_replicas
from shoal.core.plan import Plan
from shoal.schedules.csv_file import MOST_BYTES, read_csv
from shoal.schedules.families.bidirectional import CHIMERA, DUALPIPE, DUALPIPEV
from shoal.schedules.families.family import Family, Size
from shoal.schedules.families.one_f_one_b import (
    GPIPE,
    INTERLEAVED,
    LOOPED_BFS,
    ONE_F_ONE_B,
    PIPEDREAM,
    PIPEDREAM_2BW,
    PIPEDREAM_FLUSH,
    PIPEDREAM_VSYNC,
)
from shoal.schedules.families.zero_bubble import V_HALF, V_MIN, ZB_H1, ZB_H2, ZBV
from shoal.schedules.rules import check
from shoal.schedules.schedule import Grid, Schedule

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
    if steps > 1 and not family.updates.are_asynchronous:
        raise RequestError(f"{name} ends every step with a flush; ask for one step, not for {steps}")
    whole = Size(ranks, microbatches * steps, chunks, turns)
    schedule = Schedule(
        name=name,
        grid=whole.grid(family.fold),
        rows=family.rows(whole),
        updates=family.updates,
        accumulate=microbatches if family.accumulates else 1,
        activation_bound=tuple(family.activations(whole, rank) for rank in range(ranks)),
        version_bound=tuple(family.versions(whole, rank) for rank in range(ranks)),
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


def find_schedule(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    replicas: Sequence[int] | None = None,
    steps: int = 1,
) -> Schedule:
    """A legal schedule for these numbers.

    Args:
        name: of a family, or a path that ends in ``.csv``.
        ranks: of the pipeline.
        microbatches: of one step.
        chunks: stages per rank; the family's or the file's own number when left out.
        replicas: ranks of every stage, which take turns; one each, or as the file has it, when left out.
        steps: that follow one another without a flush, where the family is asynchronous.

    Raises:
        RequestError: there is no such schedule, it cannot be had in this size, or the file is for another size.
    """
    if not is_file(name):
        return make_schedule(
            name, ranks=ranks, microbatches=microbatches, chunks=chunks, replicas=replicas, steps=steps
        )
    schedule = read_schedule(name)
    own = numbers_of(schedule.grid)
    wished = {"chunks": chunks, "replicas": None if replicas is None else write_replicas(replicas)}
    asked = {"pp": ranks, "microbatches": microbatches, **{key: value or own[key] for key, value in wished.items()}}
    for key, value in own.items():
        if value != asked[key]:
            # That every stage has one rank goes without saying, and a plan does not say it.
            fix = (
                f"set {key}={value} in the plan" if key != "replicas" or schedule.grid.replicas else f"leave {key} out"
            )
            raise RequestError(
                f"schedule={name} is for {key}={value}, and {key}={asked[key]} is asked for; {fix}, or write a file for "
                f"{key}={asked[key]}"
            )
    return schedule


def schedule_of_plan(plan: Plan, *, microbatches: int, steps: int = 1) -> Schedule:
    """The schedule that a plan with a pipeline names, for so many microbatches and steps without a flush.

    Raises:
        RequestError: there is no such schedule, or it cannot be had in this size.
    """
    return find_schedule(
        plan.schedule or DEFAULT_SCHEDULE,
        ranks=plan.pp,
        microbatches=microbatches,
        chunks=plan.chunks,
        replicas=plan.stage_replicas,
        steps=steps,
    )


def numbers_of(grid: Grid) -> dict[str, int | str]:
    """The keys of a plan that a schedule fills, with its values."""
    ones = (1,) * grid.num_stages
    return {
        "pp": grid.num_ranks,
        "microbatches": grid.num_microbatches,
        "chunks": grid.chunks,
        "replicas": write_replicas(grid.replicas or ones),
    }


def read_schedule(path: Path | str) -> Schedule:
    """The schedule in a CSV file.

    Raises:
        RequestError: there is no such file, it is too large, or it holds no legal schedule.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            # One more than may be there: a pipe does not say how much will come.
            content = file.read(MOST_BYTES + 1)
            size = max(len(content), os.fstat(file.fileno()).st_size)
        if len(content) > MOST_BYTES:
            raise RequestError(
                f"{path} has {size} bytes or more, and at most {MOST_BYTES} are read; write fewer microbatches, or no idle slots"
            )
        text = content.decode("utf-8")
    except OSError as error:
        raise RequestError(
            f"cannot read {path}: {error.strerror}; give a family or a CSV file that is there"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not text in UTF-8: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from error
    return read_csv(text, name=path.stem, origin=str(path))


def fitting_microbatches(
    name: str, *, ranks: int, samples: int | None, chunks: int | None = None, replicas: Sequence[int] | None = None
) -> int:
    """How many microbatches to cut a step's samples into when nobody says: the fewest that fill the pipeline well.

    At twice as many as there are ranks 1F1B has a third of its bubble at one microbatch per rank; the next number that divides
    the samples and that the schedule takes is chosen, and the largest there is where none is as high. Where the samples are yet
    to be chosen (None) any number divides them.
    """
    if is_file(name):
        return read_schedule(name).grid.num_microbatches
    numbers = [number for number in range(1, (samples or 4 * ranks) + 1) if samples is None or samples % number == 0]
    ordered = [number for number in numbers if number >= 2 * ranks] + [n for n in reversed(numbers) if n < 2 * ranks]
    find_family(name)
    for number in ordered:
        try:
            make_schedule(name, ranks=ranks, microbatches=number, chunks=chunks, replicas=replicas)
        except RequestError:
            continue
        return number
    return ordered[0]
