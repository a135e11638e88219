"""Illegal schedules of every kind are refused, and the arrow of the message points at the cell that is wrong."""

import pytest

from shoal.core.errors import RequestError
from shoal.schedules.rules import IllegalSchedule, check
from shoal.schedules.schedule import Fold, Grid, Schedule, Updates, parse_cell

GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def write(*rows: str, fold: Fold = Fold.LINE, stages: int = 2, microbatches: int = 2, **more) -> Schedule:
    """A schedule from rows as they are drawn."""
    cells = tuple(tuple(parse_cell(text) for text in row.split()) for row in rows)
    return Schedule(name="mine", grid=Grid(fold, len(rows), stages, microbatches), rows=cells, **more)


def refused(schedule: Schedule) -> tuple[str, int, str]:
    """The first line of the message, and the rank and the cell that its arrow points at."""
    with pytest.raises(IllegalSchedule) as caught:
        check(schedule)
    message, *lines = str(caught.value).splitlines()
    (arrow,) = [place for place, line in enumerate(lines) if line.endswith("^ here")]
    row, column = lines[arrow - 1], lines[arrow].index("^")
    return message, int(row.split()[1]), row[column:].split()[0]


@pytest.mark.parametrize("rows", [GOOD, ("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1W0 1B1")], ids=["whole", "split"])
def test_a_legal_schedule_passes(rows):
    check(write(*rows))


@pytest.mark.parametrize(
    ("rows", "words", "rank", "cell"),
    {
        "a backward is missing": (
            ("0F0 0F1 0B0", GOOD[1]),
            "stage 0 has no B (or I) of microbatch 1; add it to the row of rank 0",
            0,
            ".",
        ),
        "a forward is missing": (("0F0 0B0 0B1", GOOD[1]), "stage 0 has no F of microbatch 1", 0, "."),
        "a weight gradient is missing": (
            ("0F0 0F1 0I0 0B1", GOOD[1]),
            "stage 0 has no W after its I of microbatch 0",
            0,
            ".",
        ),
        "an action is there twice": (
            ("0F0 0F1 0B0 0B1 0F1", GOOD[1]),
            "0F1 does again what was done before; remove one of the two",
            0,
            "0F1",
        ),
        "a backward is there whole and in parts": (
            (GOOD[0], "1F0 1B0 1F1 1I0 1B1"),
            "1I0 does again what was done before",
            1,
            "1I0",
        ),
        "an action is on the wrong rank": (
            ("0F0 0F1 0B0", "1F0 1B0 1F1 1B1 0B1"),
            "0B1 is in the row of rank 1, and in this line its stage lies on rank 0; move it there",
            1,
            "0B1",
        ),
        "a stage that is not there": ((GOOD[0], GOOD[1] + " 2F0"), "the stages are 0 to 1", 1, "2F0"),
        "a microbatch that is not there": ((GOOD[0], GOOD[1] + " 1F2"), "the microbatches are 0 to 1", 1, "1F2"),
        "a backward before its forward": (("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"), "1B0 for 1F0 of rank 1", 1, "1B0"),
        "two ranks wait for each other": (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "rank 0 waits at 0B0 for 1B0 of rank 1, rank 1 waits at 1F1 for 0F1 of rank 0; move one of these cells",
            0,
            "0B0",
        ),
        "an overlap with what it needs": (
            ("0F0 0F1 0B0 0B1", "(1F0;1B0)OVERLAP_F_B 1F1 1B1"),
            "(1F0;1B0)OVERLAP_F_B for 1F0 of rank 1",
            1,
            "1F0&1B0",
        ),
        "activations out of order": (
            ("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"),
            "rank 1 wants the output of stage 0, microbatch 1 from rank 0, which sends that of stage 0, microbatch 0 before",
            1,
            "1F1",
        ),
        "gradients out of order": (
            ("0F0 0F1 0B1 0B0", GOOD[1]),
            "rank 0 wants the gradient of stage 1, microbatch 1 from rank 1, which sends that of stage 1, microbatch 0",
            0,
            "0B1",
        ),
    }.values(),
)
def test_what_is_illegal_is_refused_at_its_cell(rows, words, rank, cell):
    message, at, pointed = refused(write(*rows))
    assert message.startswith("schedule mine: ") and words in message
    assert (at, pointed) == (rank, cell)


def test_activations_and_gradients_go_through_lanes_of_their_own():
    """On two ranks a loop sends outputs and gradients both ways between the same ranks."""
    rows = ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
    check(write(*rows, fold=Fold.LOOP, stages=4))


def test_too_many_rows_are_refused():
    schedule = write(*GOOD)
    with pytest.raises(IllegalSchedule, match="it has 3 rows for 2 ranks; write a row per rank"):
        check(Schedule(name="mine", grid=schedule.grid, rows=(*schedule.rows, schedule.rows[0])))


def test_more_activations_than_the_bound_are_refused_where_they_are_first_held():
    check(write(*GOOD, activation_bound=(2, 1)))
    message, rank, cell = refused(write(*GOOD, activation_bound=(1, 1)))
    assert "rank 0 holds 2 activations, and the bound of mine is 1" in message
    assert (rank, cell) == (0, "0F1")


def test_a_microbatch_is_held_until_its_weights_gradient():
    rows = ("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1W0 1B1")
    message, rank, cell = refused(write(*rows, activation_bound=(2, 1)))
    assert "rank 1 holds 2 activations" in message and (rank, cell) == (1, "1F1")


def test_more_versions_than_the_bound_are_refused_where_they_are_first_held():
    rows = ("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    check(write(*rows, microbatches=3, updates=Updates.STASHED, version_bound=(2, 1)))
    # After its first update rank 0 still needs the weights that microbatch 1 met.
    message, rank, cell = refused(write(*rows, microbatches=3, updates=Updates.STASHED, version_bound=(1, 1)))
    assert "rank 0 holds 2 versions of its weights, and the bound of mine is 1" in message
    assert (rank, cell) == (0, "0B0")


def test_a_refusal_is_a_wrong_request():
    assert issubclass(IllegalSchedule, RequestError) and IllegalSchedule("x").exit_code == 2
