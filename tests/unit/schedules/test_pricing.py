"""Schedules priced at times that were taken from a run, one for each action."""

import pytest

from shoal.schedules.catalogue import make_schedule
from shoal.schedules.pricing import Costs, price
from shoal.schedules.schedule import parse_action


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
