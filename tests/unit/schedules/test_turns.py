"""Stages of several ranks: legal in every size or refused with the reason, as long as a line, and what each rank holds."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.core.pipelines import write_replicas
from shoal.schedules.catalogue import FAMILIES, find_schedule, fitting_microbatches, make_schedule
from shoal.schedules.csv_file import read_csv, write_csv
from shoal.schedules.families.family import Size
from shoal.schedules.families.one_f_one_b import ONE_F_ONE_B
from shoal.schedules.player import peak_activations
from shoal.schedules.pricing import Costs, build_report, price
from shoal.schedules.rules import IllegalSchedule, check
from shoal.schedules.schedule import Fold, Grid, Kind, Schedule

TAKERS = [name for name, family in FAMILIES.items() if family.takes_replicas]
ROWS = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple).filter(lambda row: max(row) > 1)


def by_turns(replicas, microbatches: int, name: str = "1f1b") -> Schedule:
    return make_schedule(name, ranks=sum(replicas), microbatches=microbatches, replicas=replicas)


def balanced(replicas) -> Costs:
    """What the cut of a model aims at: a stage of R ranks has R times the work."""
    return Costs(stages=tuple(map(float, replicas)))


def words(schedule: Schedule, rank: int) -> str:
    return " ".join(map(str, schedule.actions(rank)))


def test_who_takes_replicas():
    assert TAKERS == ["gpipe", "1f1b", "pipedream-flush"]


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(TAKERS), replicas=ROWS, microbatches=st.integers(1, 24))
def test_every_size_is_legal_or_refused_for_want_of_microbatches(name, replicas, microbatches):
    """``make_schedule`` proves what it makes, bounds included; here that the bounds are no more than what is held."""
    try:
        schedule = by_turns(replicas, microbatches, name)
    except RequestError as error:
        assert microbatches < max(replicas), error
        assert f"{max(replicas)} ranks that take turns, and {microbatches} microbatches are too few" in str(error)
        return
    assert microbatches >= max(replicas)
    assert schedule.activation_bound == peak_activations(schedule)
    assert schedule.version_bound == (1,) * sum(replicas)


@settings(max_examples=100, deadline=None)
@given(replicas=ROWS, microbatches=st.integers(4, 24))
def test_a_microbatch_is_on_the_rank_whose_turn_it_is(replicas, microbatches):
    schedule = by_turns(replicas, microbatches)
    grid = schedule.grid
    for stage, count in enumerate(replicas):
        first = sum(replicas[:stage])
        assert grid.ranks_of(stage) == tuple(range(first, first + count))
        for rank in grid.ranks_of(stage):
            assert grid.stages_of(rank) == (stage,)
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                own = [action.microbatch for action in schedule.actions(rank) if action.kind is kind]
                assert own == list(range(rank - first, microbatches, count))


@settings(max_examples=150, deadline=None)
@given(replicas=ROWS, rounds=st.integers(1, 4))
def test_balanced_turns_take_no_longer_than_a_line_of_as_many_ranks(replicas, rounds):
    """3(M+P-1), as 1f1b over P stages of equal size: the replicas wait for nothing that a line would not wait for."""
    microbatches = rounds * math.lcm(*replicas)
    timeline = price(by_turns(replicas, microbatches), balanced(replicas))
    assert timeline.makespan <= 3 * (microbatches + sum(replicas) - 1) + 1e-9


@settings(max_examples=100, deadline=None)
@given(replicas=ROWS)
def test_the_first_stage_has_pipedreams_number_under_way_or_a_little_more(replicas):
    """NOAM of the paper, section 3.2; rounding up to whole rounds of turns adds less than a round at every stage."""
    held = peak_activations(by_turns(replicas, 120))[0]
    assert math.ceil(sum(replicas) / replicas[0]) <= held
    assert held * replicas[0] <= sum(replicas) + sum(count - 1 for count in replicas[:-1])


def test_one_rank_each_is_1f1b_itself():
    assert ONE_F_ONE_B.rows(Size(4, 6, 1, (1, 1, 1, 1))) == ONE_F_ONE_B.rows(Size(4, 6, 1))


def test_two_ranks_alternate_and_one_does_every_microbatch():
    schedule = by_turns((2, 1), 4)
    assert [words(schedule, rank) for rank in range(3)] == [
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert words(by_turns((2, 1), 4, "gpipe"), 2) == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    middle = by_turns((1, 2, 1), 8)
    assert peak_activations(middle) == (5, 2, 2, 1)
    # Long enough a pipeline: one other rank's worth of waiting per end, and none in between.
    assert price(by_turns((1, 2, 1), 48), balanced((1, 2, 1))).makespan == 3 * (48 + 3)


@pytest.mark.parametrize(
    ("name", "ranks", "replicas", "said"),
    [
        ("zbv", 3, (2, 1), "it has no stages of several ranks; leave replicas out, or use one of gpipe, 1f1b"),
        ("pipedream", 3, (2, 1), "it has no stages of several ranks"),
        ("1f1b", 4, (2, 1), "replicas=2-1 are 3 ranks, and pp is 4; set pp to 3, or change replicas"),
        ("1f1b", 3, (3,), "replicas=3 is one stage on 3 ranks, which is no pipeline; write dp=3"),
        ("1f1b", 2, (1, 1), "replicas=1-1 gives every stage one rank, as every pipeline has it; leave replicas out"),
        ("1f1b", 3, (3, 0), "replicas=3-0 leaves a stage without a rank"),
    ],
)
def test_what_cannot_be_had_is_refused_with_both_numbers_and_the_fix(name, ranks, replicas, said):
    with pytest.raises(RequestError) as refused:
        make_schedule(name, ranks=ranks, microbatches=8, replicas=replicas)
    assert said in str(refused.value) and write_replicas(replicas) in str(refused.value)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(TAKERS), replicas=ROWS, microbatches=st.integers(4, 12))
def test_a_file_is_read_back_with_its_turns(name, replicas, microbatches):
    ours = by_turns(replicas, microbatches, name)
    back = read_csv(write_csv(ours), name="mine", origin="mine.csv")
    assert (back.rows, back.grid) == (ours.rows, ours.grid)
    assert back.grid.fold is Fold.TURNS


GOOD = "0F0,0B0\n0F1,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F1,0B1\n0F0,0B0\n1F0,1B0,1F1,1B1\n", ["row 1 (rank 0), cell 1: 0F1 does not lie there", "row 2", "turns:"]),
        ("1F0,1B0,1F1,1B1\n0F0,0B0\n0F1,0B1\n", ["row 1 (rank 0), cell 1: 1F0 is of stage 1", "side by side"]),
        ("0F0,0B0\n1F0,1B0,1F1,1B1\n0F1,0B1\n", ["row 3 (rank 2), cell 1: 0F1 is of stage 0", "side by side"]),
        ("0F0,0B0\n0F1,0B1\n", ["replicas=2 is one stage on 2 ranks", "dp=2"]),
        ("0F0,0B0\n0F1,0B1\n0F2,1F0,1B0,0B2\n", ["no row begins with stage 1", "2 stages on 3 rows"]),
        (
            "0F0\n0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n",
            ["0B0 is in the row of rank 1, and it is the turn of rank 0", "^ here"],
        ),
        ("0F0,0B0\n0F1,0B1\n1F1,1B1,1F0\n", ["stage 1 has no B (or I) of microbatch 0", "^ here"]),
    ],
)
def test_a_file_that_breaks_the_turns_is_refused_at_the_cell(text, said):
    with pytest.raises(RequestError) as refused:
        read_csv(text, name="mine", origin="mine.csv")
    for word in said:
        assert word in str(refused.value)


def test_a_plan_need_not_repeat_a_files_turns_and_must_not_contradict_them(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(GOOD)
    for replicas in (None, (2, 1)):
        found = find_schedule(str(path), ranks=3, microbatches=2, replicas=replicas)
        assert found.grid.replicas == (2, 1)
    with pytest.raises(RequestError, match="is for replicas=2-1, and replicas=1-2 is asked for; set replicas=2-1"):
        find_schedule(str(path), ranks=3, microbatches=2, replicas=(1, 2))
    path.write_text(write_csv(make_schedule("1f1b", ranks=3, microbatches=2)))
    with pytest.raises(RequestError, match="is for replicas=1-1-1, and replicas=2-1 is asked for; leave replicas out"):
        find_schedule(str(path), ranks=3, microbatches=2, replicas=(2, 1))


def test_microbatches_that_nobody_says_are_enough_for_every_turn():
    assert fitting_microbatches("1f1b", ranks=3, samples=12, replicas=(2, 1)) == 6
    # No number as high as twice the ranks divides the samples: the largest that does, if it is enough.
    assert fitting_microbatches("1f1b", ranks=4, samples=4, replicas=(3, 1)) == 4


def test_a_grid_that_does_not_add_up_is_refused():
    for num_ranks, num_stages, replicas in ((3, 2, (2, 2)), (3, 3, (2, 1)), (2, 2, (2, 0)), (2, 0, ())):
        with pytest.raises(RequestError):
            Grid(Fold.TURNS, num_ranks, num_stages, 4, replicas)


def test_a_schedule_that_forgets_its_turns_is_illegal():
    """The rows of a line of three over a grid of two stages."""
    rows = make_schedule("1f1b", ranks=3, microbatches=4).rows
    with pytest.raises(IllegalSchedule, match="0F1 is in the row of rank 0, and it is the turn of rank 1"):
        check(Schedule(name="wrong", grid=Grid(Fold.TURNS, 3, 2, 4, (2, 1)), rows=rows))


def test_the_report_has_the_ranks_of_every_stage():
    schedule, costs = by_turns((2, 1), 4), balanced((2, 1))
    values = json.loads(json.dumps(build_report(schedule, price(schedule, costs), costs).as_values()))
    assert (values["ranks"], values["stages"], values["chunks"], values["replicas"]) == (3, 2, 1, [2, 1])
    assert values["fold"] == "turns"
    assert [rank["stages"] for rank in values["per_rank"]] == [[0], [0], [1]]
    assert {rank["busy"] for rank in values["per_rank"]} == {12.0}
