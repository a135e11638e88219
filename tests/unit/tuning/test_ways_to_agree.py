"""Other ways to agree: ranked apart, worth their arithmetic on slow links alone, and never chosen by themselves."""

from dataclasses import replace

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan, all_plans
from shoal.planner.pricing.agreement import is_exact
from shoal.planner.search.candidates import Limits
from shoal.planner.search.estimate import estimate
from shoal.planner.search.search import search
from shoal.trainer.config import read_recipe
from shoal.trainer.own_parts import OwnPartsHere
from shoal.tuning.agreement import agreement_of
from shoal.tuning.planning import build_job, plan
from shoal.tuning.ways_to_agree import CODECS, POLICIES, other_ways

MODEL = ("model.hidden=256", "model.layers=2")


@pytest.fixture(scope="module")
def jobs():
    """The same job on a slow and on a fast network."""
    recipe = read_recipe("recipes/tiny.toml", MODEL)
    clusters = ("x86-server:4x1@ethernet-1g", "x86-server:4x1@infiniband-xdr")
    return recipe, *(build_job(recipe, cluster, own=OwnPartsHere())[0] for cluster in clusters)


def ways_on(jobs, at, *, every=True, top=100):
    recipe, job = jobs[0], jobs[at]
    return other_ways(recipe, job, Limits(), search(job, top=1).ranked[0], top=top, every=every)


def test_every_policy_and_codec_has_a_row_and_none_is_exact(jobs):
    ways = ways_on(jobs, 1)
    found = {(way.found.plan.sync, way.found.plan.compress) for way in ways}
    # What the plan's rules refuse has no row: dgc is for sgd, and so on.
    assert {sync for sync, _ in found} == {"allreduce", *POLICIES}
    assert {"int8", "int4", "fp16", "powersgd:4", "topk:0.01"} <= {codec for _, codec in found} <= {None, *CODECS}
    assert not any(is_exact(way.found.plan) for way in ways) and all(is_exact(way.dense.plan) for way in ways)
    assert [way.found.seconds for way in ways] == sorted(way.found.seconds for way in ways)
    for way in ways:
        assert not way.found.plan.problems(), way.found.plan
        assert not way.found.as_dict()["equals_one_process"] and way.found.longest_seconds >= way.found.seconds - 1e-12


def test_a_codec_is_worth_it_where_the_bytes_it_saves_take_longer_than_its_arithmetic(jobs):
    for at, is_worth in ((1, True), (2, False)):
        for way in ways_on(jobs, at):
            if way.found.plan.compress in ("natural", "qsgd:4") and way.found.plan.islands == 1:
                saved = way.dense.parts.reduce - way.found.parts.reduce
                assert way.is_worth == (way.found.parts.codec < saved) == is_worth, way.found.plan
                assert way.dense.plan == replace(way.found.plan, compress=None)


def test_only_what_is_much_faster_is_shown_where_nobody_asks(jobs):
    best = search(jobs[1], top=1).ranked[0]
    slow = ways_on(jobs, 1, every=False)
    assert slow and all(way.is_worth and way.found.seconds < 0.9 * best.seconds for way in slow)
    assert not any(way.found.plan.compress == "natural" for way in ways_on(jobs, 2, every=False))


def price(recipe, job, text):
    wanted = Plan.parse(text)
    agreement = agreement_of(job, wanted, compression=recipe.compression, step_seconds=1.0)
    return agreement, estimate(job, wanted, agreement=agreement)


def test_memory_has_what_a_policy_and_a_codec_keep(jobs):
    recipe, job = jobs[0], jobs[1]
    weights = job.chain.weights * job.weight_bytes
    _, plain = price(recipe, job, "dp=4")
    for sync, copies in (("local:5", 1), ("diloco:5", 2), ("stream:4,2,1", 3), ("sparse:5,0.1", 2), ("gossip:ring", 0)):
        _, found = price(recipe, job, f"islands=4 dp=1 sync={sync}")
        assert found.memory.agreement == pytest.approx(copies * weights)
        assert found.memory.allocated == pytest.approx(plain.memory.allocated + copies * weights, rel=1e-6)
    _, sharded = price(recipe, job, "islands=2 dp=2 zero=1 sync=diloco:5")
    assert sharded.memory.agreement == pytest.approx(weights, rel=1e-3), "a rank keeps two copies of its half"
    _, residual = price(recipe, job, "dp=4 compress=int4")
    assert 2 * weights < residual.memory.agreement < 2.6 * weights, "each rank's, its slice of the sum's, and the next"


def test_rounds_by_the_clock_are_as_many_steps_as_fit(jobs):
    agreement, found = price(jobs[0], jobs[1], "islands=4 dp=1 sync=local:7s")
    assert len(agreement.cycle) == 7 and found.agreement.bytes_per_step < max(found.agreement.sent) / 6
    with pytest.raises(RequestError, match="1000000 steps apart, and 100000 are priced at most"):
        price(jobs[0], jobs[1], "islands=4 dp=1 sync=local:1000000")


def test_a_longer_period_sends_less_in_proportion(jobs):
    sent = [
        price(jobs[0], jobs[1], f"islands=4 dp=1 sync=diloco:{period}")[1].agreement.bytes_per_step
        for period in (5, 50)
    ]
    assert sent[0] / sent[1] == pytest.approx(10, rel=1e-3)


def test_plan_ranks_them_apart_and_has_no_command_of_its_own_for_them():
    found = plan("recipes/tiny.toml", "x86-server:2x1@ethernet-100m", overrides=MODEL, top=3)
    values = found.as_values()
    assert all(one["equals_one_process"] for one in values["plans"]) and values["other_ways"]
    assert is_exact(found.best)
    with pytest.raises(RequestError, match="did you mean 'lossy'"):
        plan("recipes/tiny.toml", "x86-server:2x1", allow=["losy"])


@pytest.mark.parametrize("count", [2, 4])
def test_auto_has_nothing_but_exact_plans_to_choose_from(count):
    """``shoal train --plan auto`` and ``shoal tune`` take what ``all_plans`` has."""
    assert all(is_exact(one) for one in all_plans(count))
