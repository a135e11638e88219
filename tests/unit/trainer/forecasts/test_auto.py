"""Which plans are looked at, in which order, and which never: on a clock that says what it is told, without any process."""

import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.planner.local import LocalTime
from shoal.trainer.config import Recipe
from shoal.trainer.forecasts.auto import family_of, legal_plans, pick_plan
from shoal.trainer.forecasts.forecast import RankForecast
from shoal.trainer.forecasts.localtime import PlanTime
from shoal.trainer.forecasts.rehearsal import build_subject

RECIPE = {
    "plan": "auto",
    "model": {"name": "gpt", "layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 8, "vocab": 33},
    "train": {"steps": 10, "global_batch": 8},
}


@pytest.fixture(scope="module")
def subject():
    return build_subject(validate(Recipe, RECIPE, origin="test"))


class ToldClock:
    """Says that a plan takes what a table says; whatever is not in it takes long."""

    class machine:
        rank_bytes = 0

    def __init__(self, subject, table, *, state=1):
        self.subject, self.table, self.asked, self.state = subject, table, [], state

    def predict(self, plan):
        self.asked.append(str(plan))
        seconds = next((value for text, value in self.table.items() if matches(plan, text)), 9.0)
        if isinstance(seconds, Exception):
            raise seconds
        time = LocalTime(seconds=seconds, compute=seconds, communication={}, bubble=None, fixed=0.0)
        rank = RankForecast(traffic={}, state={"weights": self.state})
        return PlanTime(plan=plan, time=time, ranks=(rank,) * plan.world_size, peak_bytes=(None,) * plan.world_size)


def matches(plan, text):
    wanted = Plan.parse(text)
    keys = [word.partition("=")[0] for word in text.split()]
    return all(getattr(plan, key) == getattr(wanted, key) for key in keys) and (family_of(plan) == family_of(wanted))


def test_plans_that_change_what_is_computed_are_not_legal_here(subject):
    for count in (2, 4):
        plans = legal_plans(subject, count)
        assert all(plan.world_size == count and not plan.ps for plan in plans)
        assert not [
            plan
            for plan in plans
            if plan.schedule and plan.schedule.startswith("pipedream") and "flush" not in plan.schedule
        ]
        assert {plan.recompute for plan in plans} == {"none"}
    families = {family_of(plan) for plan in legal_plans(subject, 4)}
    assert {(4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 1, 4)} <= families


def test_a_batch_that_cannot_be_shared_out_leaves_other_plans(subject):
    odd = subject.recipe.model_copy(update={"train": subject.recipe.train.model_copy(update={"global_batch": 7})})
    plans = legal_plans(type(subject)(odd, subject.model, subject.loss, subject.data), 2)
    assert plans and all(plan.dp == 1 for plan in plans)


def test_the_variants_of_the_best_families_are_looked_at(subject):
    clock = ToldClock(
        subject, {"dp=1 tp=2 sp=true": 1.0, "dp=1 tp=2 sp=false": 2.0, "dp=2 zero=0": 3.0, "dp=2 zero=1": 2.5}
    )
    choice = pick_plan(clock, 2)
    assert str(choice.best.plan) == "dp=1 tp=2 sp=true"
    assert str(choice.ranked[1].plan) == "dp=1 tp=2"
    # Families that were slow had one plan tried.
    assert sum("pp=2" in text for text in clock.asked) == 1
    assert sum("cp=2" in text for text in clock.asked) == 1


def test_plans_that_are_close_are_timed_twice(subject):
    clock = ToldClock(subject, {"dp=2 zero=0": 1.0, "dp=2 zero=1": 1.02, "dp=2 zero=2": 2.0})
    pick_plan(clock, 2)
    assert clock.asked.count("dp=2") == 2 and clock.asked.count("dp=2 zero=1") == 2
    assert clock.asked.count("dp=2 zero=2") == 1


def test_a_plan_that_does_not_fit_after_all_is_passed_over_and_named(subject):
    clock = ToldClock(subject, {"dp=2 zero=0": RequestError("no"), "dp=1 tp=2 sp=false": 1.0})
    choice = pick_plan(clock, 2)
    assert str(choice.best.plan) == "dp=1 tp=2"
    assert choice.refused == {"dp=2": "no"}


def test_a_search_that_has_no_time_says_what_it_left_out(subject):
    choice = pick_plan(ToldClock(subject, {}), 2, budget_seconds=0.0)
    assert len(choice.ranked) == 1
    assert f"{choice.num_legal - 1} of {choice.num_legal} plans were not tried" in choice.remarks[0]


def test_what_does_not_fit_in_memory_comes_last_and_is_said(subject):
    choice = pick_plan(ToldClock(subject, {"dp=2 zero=0": 1.0}, state=2**50), 2)
    assert choice.ranked and "GiB are free" in choice.remarks[-1]


def test_more_processes_than_any_plan_takes(subject):
    with pytest.raises(RequestError, match="no plan for 77 processes"):
        pick_plan(ToldClock(subject, {}), 77)
