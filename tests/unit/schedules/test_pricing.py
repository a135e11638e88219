"""Schedules priced at given times, one for each kind or one for each action, and the report of a price."""

import json

import pytest

from shoal.schedules.catalogue import FAMILIES, make_schedule
from shoal.schedules.pricing import Costs, Report, build_report, price
from shoal.schedules.schedule import parse_action, parse_cell


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev"])
def test_measured_times_of_each_action_price_as_the_same_times_by_kind(name):
    schedule = make_schedule(name, ranks=2, microbatches=4)
    by_kind = {"F": 2.0, "I": 3.0, "W": 1.5, "B": 4.5}
    measured = {action: by_kind[action.kind] for rank in range(2) for action in schedule.actions(rank)}
    costs = Costs(forward=2.0, input=3.0, weight=1.5, transfer=0.25)
    assert price(schedule, Costs(measured=measured, transfer=0.25)) == price(schedule, costs)


def test_one_slow_action_makes_the_step_as_much_longer_as_others_wait_for_it():
    schedule = make_schedule("1f1b", ranks=2, microbatches=3)
    times = {action: 1.0 for rank in range(2) for action in schedule.actions(rank)}
    first, second = parse_action("0F0"), parse_action("0F1")
    assert price(schedule, Costs(measured=times)).makespan == 8.0
    assert price(schedule, Costs(measured=times | {first: 3.0})).makespan == 10.0
    # The last stage comes to the second microbatch a unit later than that can be there.
    assert price(schedule, Costs(measured=times | {second: 2.0})).makespan == 8.0
    assert price(schedule, Costs(measured=times | {second: 3.0})).makespan == 9.0


def report_of(name: str, ranks: int, microbatches: int, costs: Costs | None = None, **size) -> Report:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, **size)
    costs = costs or Costs()
    return build_report(schedule, price(schedule, costs), costs)


def test_1f1b_by_hand():
    report = report_of("1f1b", 2, 3, Costs(forward=1, input=2, weight=1))
    assert (report.ranks, report.stages, report.microbatches, report.chunks) == (2, 2, 3, 1)
    # Three microbatches and one other rank, four units each.
    assert report.makespan == 16 and report.bubble == pytest.approx(1 / 4)
    # Rank 0 works from 0 to 16 and waits for 4; rank 1 works from 1 to 13 without a wait.
    assert report.bubble_in_own_span == pytest.approx(4 / 28)
    assert [(rank.busy, rank.idle) for rank in report.per_rank] == [(12, 4), (12, 4)]
    assert [rank.peak_activations for rank in report.per_rank] == [2, 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_numbers_of_every_family_belong_together(name):
    report = report_of(name, 4, 8)
    assert sum(rank.idle for rank in report.per_rank) == pytest.approx(report.bubble * report.makespan * report.ranks)
    assert report.makespan == max(cell.end for row in report.rows for cell in row)
    for rank, row in zip(report.per_rank, report.rows, strict=True):
        assert rank.busy == pytest.approx(sum(cell.end - cell.start for cell in row))
        assert {action.stage for cell in row for action in parse_cell(cell.cell)} == set(rank.stages)


@pytest.mark.parametrize(
    ("name", "copies", "chunks"), [("1f1b", 1, 1), ("interleaved", 2, 2), ("zbv", 2, 2), ("chimera", 2, 1)]
)
def test_a_rank_holds_the_weights_of_its_stages_and_in_a_cross_of_two_copies(name, copies, chunks):
    report = report_of(name, 4, 8)
    assert {rank.weight_copies for rank in report.per_rank} == {copies}
    assert report.chunks == chunks


def test_versions_are_those_of_the_family():
    assert [rank.versions for rank in report_of("pipedream", 4, 8).per_rank] == [4, 3, 2, 1]
    assert [rank.versions for rank in report_of("1f1b", 4, 8).per_rank] == [1, 1, 1, 1]


def test_values_survive_json():
    values = report_of("interleaved", 2, 2, Costs(transfer=0.5), chunks=3).as_values()
    # Tuples become lists there.
    back = json.loads(json.dumps(values))
    assert list(back) == [
        "name",
        "ranks",
        "stages",
        "microbatches",
        "chunks",
        "replicas",
        "fold",
        "updates",
        "costs",
        "makespan",
        "bubble",
        "bubble_in_own_span",
        "per_rank",
        "rows",
    ]
    assert (back["name"], back["stages"], back["chunks"], back["fold"]) == ("interleaved", 6, 3, "loop")
    assert back["replicas"] == [1] * 6
    assert back["costs"]["transfer"] == 0.5
    assert back["per_rank"][1]["stages"] == [1, 3, 5]
    assert back["rows"][0][0] == {"cell": "0F0", "start": 0, "end": 1}
    assert back["rows"][1][0] == {"cell": "1F0", "start": 1.5, "end": 2.5}
