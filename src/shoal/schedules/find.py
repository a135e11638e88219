"""The schedule that a plan names: one of the catalogue, or the one in a CSV file."""

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.core.errors import RequestError
from shoal.core.pipelines import DEFAULT_SCHEDULE, is_file, write_replicas
from shoal.core.plan import Plan
from shoal.schedules.catalogue import find_family, make_schedule
from shoal.schedules.csvform import MOST_BYTES, read_csv
from shoal.schedules.grid import Grid
from shoal.schedules.schedule import Schedule


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
        steps: that follow one another without a flush, where the family flows.

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
