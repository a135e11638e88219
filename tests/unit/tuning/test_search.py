"""Which plans are looked at, in which order, and which never: on a clock that says what it is told, without any process."""

import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.models.check import facts_of
from shoal.trainer.config import Recipe
from shoal.tuning.rehearsal import build_subject
from shoal.tuning.rehearsal_pool import NoRoom, held_bytes
from shoal.tuning.rehearsal_worker import legal_plans
from shoal.tuning.search import choose_finalists, family_of, search_plans
from support.planner.machines import build

MACHINE = build()
RECIPE = {
    "plan": "auto",
    "model": {"name": "gpt", "layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 8, "vocab": 33},
    "train": {"steps": 10, "global_batch": 8},
}


@pytest.fixture(scope="module")
def subject():
    return build_subject(validate(Recipe, RECIPE, origin="test"))


class Told:
    """Says that a plan takes what a table says; whatever is not in it takes long."""

    def __init__(self, table, *, peak=1):
        self.table, self.asked, self.peak = table, [], peak

    def __call__(self, plan):
        self.asked.append(str(plan))
        seconds = next((value for text, value in self.table.items() if matches(plan, text)), 9.0)
        if isinstance(seconds, Exception):
            raise seconds
        rank = {"state_bytes": {"weights": 1}, "traffic": {}, "peak_bytes": self.peak}
        return {"plan": str(plan), "seconds": seconds, "ranks": [rank] * plan.world_size}


def search(subject, told, *, budget_seconds=1e9):
    return search_plans(legal_plans(subject, 2), told, MACHINE, origin="a test", budget_seconds=budget_seconds)


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


def test_a_plan_that_the_run_would_refuse_is_not_legal_here():
    """With one head ``tp=2`` was rehearsed, tried for real and picked, and the run then refused it."""
    one = {**RECIPE, "model": {"name": "gpt", "layers": 1, "hidden": 16, "heads": 1, "kv_heads": 1}}
    subject = build_subject(validate(Recipe, one, origin="test"))
    plans = legal_plans(subject, 2)
    facts = facts_of(subject.recipe.model, subject.data.spec)
    assert plans and not [str(plan) for plan in plans if plan.problems(facts)]


def test_a_batch_that_cannot_be_shared_out_leaves_other_plans(subject):
    odd = subject.recipe.model_copy(update={"train": subject.recipe.train.model_copy(update={"global_batch": 7})})
    plans = legal_plans(type(subject)(odd, subject.model, subject.loss, subject.data), 2)
    assert plans and all(plan.dp == 1 for plan in plans)


def test_the_variants_of_the_best_families_are_looked_at(subject):
    told = Told({"dp=1 tp=2 sp=true": 1.0, "dp=1 tp=2 sp=false": 2.0, "dp=2 zero=0": 3.0, "dp=2 zero=1": 2.5})
    choice = search(subject, told)
    assert choice.plan == "dp=1 tp=2 sp=true"
    assert choice.ranked[1]["plan"] == "dp=1 tp=2"
    assert len(told.asked) == len(set(told.asked))
    # Families that were slow had one plan rehearsed.
    assert sum("pp=2" in text for text in told.asked) == 1
    assert sum("cp=2" in text for text in told.asked) == 1


def test_all_families_that_are_near_are_looked_at(subject):
    told = Told({"dp=2 zero=0": 1.0, "dp=1 tp=2": 1.1, "dp=1 cp=2": 1.2, "dp=1 pp=2": 1.6})
    search(subject, told)
    assert "dp=1 cp=2 cp_kind=alltoall" in told.asked and "dp=1 tp=2 sp=true" in told.asked
    assert sum("pp=2" in text for text in told.asked) == 1


def test_a_plan_that_does_not_fit_after_all_is_passed_over_and_named(subject):
    choice = search(subject, Told({"dp=2 zero=0": RequestError("no"), "dp=1 tp=2 sp=false": 1.0}))
    assert choice.plan == "dp=1 tp=2"
    assert choice.refused == {"dp=2": "no"} and "1 plans could not be rehearsed" in choice.warnings


def test_a_plan_without_room_is_said_and_others_of_its_family_are_looked_at(subject):
    told = Told({"dp=2 zero=0": NoRoom("plan dp=2 does not fit"), "dp=2 zero=3": 1.0})
    choice = search(subject, told)
    assert choice.plan == "dp=2 zero=3"
    assert "1 plans do not fit this machine's memory: plan dp=2 does not fit" in choice.warnings


def test_a_rehearsal_that_dies_does_not_end_the_search(subject):
    choice = search(
        subject, Told({"dp=2 zero=0": RunError("rank 1: the process ended with code -11"), "dp=1 tp=2": 1.0})
    )
    assert choice.plan == "dp=1 tp=2" and "dp=2" in choice.refused


def test_where_nothing_can_be_run_the_first_reason_is_said(subject):
    plans = legal_plans(subject, 2)
    told = Told({str(plan): NoRoom("plan needs a lot") for plan in plans})
    with pytest.raises(RequestError, match=f"none of the {len(plans)} plans .*: plan needs a lot"):
        search(subject, told)


def test_a_search_that_has_no_time_says_what_it_left_out(subject):
    choice = search(subject, Told({}), budget_seconds=0.0)
    assert len(choice.ranked) == 1
    assert f"{choice.num_legal - 1} of {choice.num_legal} plans were not rehearsed" in choice.warnings[0]


def test_what_does_not_fit_in_memory_comes_last_and_is_said(subject):
    choice = search(subject, Told({"dp=2 zero=0": 1.0}, peak=2**50))
    assert choice.ranked and "are free" in choice.warnings[-1]


def test_without_a_peak_the_state_counts(subject):
    page = Told({}, peak=None)(legal_plans(subject, 2)[0])
    assert held_bytes(page, build(rank_bytes=7)) == 2 * (7 + 1)


def pages(*plans):
    return [{"plan": plan, "seconds": 1.0 + number / 100} for number, plan in enumerate(plans)]


def chosen(ranked, **how):
    return [page["plan"] for page in choose_finalists(ranked, **{"most": 4, "fewest": 2, "unsure": 1.25, **how})]


def test_finalists_are_not_all_of_one_family():
    """Of four processes eight schedules of one pipeline were tried, and the fastest plan, which has none, never."""
    pipelines = [f"dp=1 pp=4 schedule={name}" for name in ("1f1b", "gpipe", "chimera", "zb-h1", "zbv")]
    assert chosen(pages(*pipelines, "dp=4", "dp=4 zero=2")) == [*pipelines[:2], "dp=4", "dp=4 zero=2"]
    assert chosen(pages(*pipelines, "dp=4")) == [*pipelines[:3], "dp=4"], "what is free goes to the next best"
    assert chosen(pages(*pipelines)) == pipelines[:4]
    assert chosen(pages("dp=4", *pipelines), most=2) == ["dp=4", pipelines[0]]


def test_finalists_are_close_or_the_two_best():
    far = [
        {"plan": "dp=4", "seconds": 1.0},
        {"plan": "dp=2 pp=2", "seconds": 2.0},
        {"plan": "dp=1 pp=4", "seconds": 2.1},
    ]
    assert chosen(far) == ["dp=4", "dp=2 pp=2"]
    assert chosen(far[:1]) == ["dp=4"]


def test_variants_of_the_best_families_are_looked_at_by_turns(subject):
    told = Told({"dp=2": 1.0, "pp=2": 1.1})
    search(subject, told)
    variants = [text for text in told.asked if text.startswith("dp=2 zero") or "pp=2 schedule" in text]
    kinds = ["pp" if "pp=2" in text else "dp" for text in variants[:6]]
    assert {"pp", "dp"} <= set(kinds[1:5]), variants[:6]
