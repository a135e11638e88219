"""Plans that need no price: few are priced, and the answer is that of pricing all."""

from dataclasses import replace

import pytest

from shoal.core.plan import Plan
from shoal.planner.hardware.presets import GIB
from shoal.planner.pricing.cost import least_seconds
from shoal.planner.search import search as module
from shoal.planner.search.candidates import Limits, plans_of
from shoal.planner.search.estimate import estimate
from shoal.planner.search.search import Cutoff
from support.planner.jobs import job_of, shape_of

EXPERTS = {"experts": 8, "chosen_experts": 2, "is_gated": True, "layers": 16, "hidden": 4096, "heads": 32}
JOBS = {
    "experts, long": (shape_of(**EXPERTS, sequence=16384), "h100:2x8", 32, "megatron-core"),
    "experts": (shape_of(**EXPERTS), "a100-40gb:2x8", 64, "shoal"),
    "dense": (shape_of(hidden=5120, heads=40, layers=40), "a100-40gb:2x8", 64, "megatron"),
    "roomy": (shape_of(), "h100:1x4", 32, "shoal"),
    "too large": (shape_of(layers=96, hidden=12288, heads=96), "a100-40gb:1x8", 8, "megatron"),
}


def job(name):
    shape, cluster, batch, software = JOBS[name]
    return job_of(shape, cluster=cluster, global_batch=batch, software=software)


def told(found):
    shown = [*found.ranked, found.refused, found.runnable, *([] if found.ranked else [found.least])]
    return [None if one is None else (str(one.plan), one.seconds, one.memory.allocated) for one in shown]


@pytest.mark.parametrize("limits", [Limits(), Limits(schedules=("1f1b",), zero=(0, 1))], ids=["all", "few"])
@pytest.mark.parametrize("name", JOBS)
def test_it_answers_what_pricing_all_answers(monkeypatch, name, limits):
    answers, is_beyond = [], Cutoff.is_beyond
    monkeypatch.setattr(Cutoff, "is_beyond", lambda *asked: answers.append(is_beyond(*asked)) or answers[-1])
    found = module.search(job(name), limits, top=2)
    assert any(answers) == (name != "too large"), "something was left out, or this compares nothing"
    monkeypatch.setattr(Cutoff, "is_beyond", lambda self, plan, least: False)
    assert told(found) == told(module.search(job(name), limits, top=2))


def test_what_is_refused_may_be_among_what_was_left_out(monkeypatch):
    """Tensor-parallel ranks that cannot cut 4,095 positions hold all of 32 samples, and take four times as long as replicas."""
    shape = shape_of(layers=1, hidden=512, heads=8, vocab=128, sequence=4095)
    roomy = job_of(shape, cluster="v100-16gb:8x1", global_batch=32)
    device = replace(roomy.cluster.device, memory_bytes=0.7 * GIB, context_bytes=0.0)
    tight = replace(roomy, cluster=replace(roomy.cluster, device=device))
    limits = Limits(most_tensor=8)
    left_out, is_beyond = set(), Cutoff.is_beyond

    def listen(self, plan, least):
        if is_beyond(self, plan, least):
            left_out.add(str(plan))
        return is_beyond(self, plan, least)

    monkeypatch.setattr(Cutoff, "is_beyond", listen)
    found = module.search(tight, limits)
    assert found.refused is not None and str(found.refused.plan) == "dp=1 tp=8"
    assert "dp=1 tp=8" in left_out and found.refused.seconds > 3 * found.ranked[0].seconds
    monkeypatch.setattr(Cutoff, "is_beyond", lambda self, plan, least: False)
    assert told(found) == told(module.search(tight, limits))


def test_few_of_many_plans_are_priced(monkeypatch):
    """A search over experts and a long sequence took 11 s: fifty thousand plans, each with a price."""
    priced = []
    monkeypatch.setattr(module, "estimate", lambda *args, **kwargs: priced.append(args) or estimate(*args, **kwargs))
    found = module.search(job("experts, long"))
    assert found.num_plans > 5000 and len(priced) < found.num_plans / 3


@pytest.mark.parametrize("name", JOBS)
def test_no_plan_takes_less_than_its_least(name):
    known = {}
    for number, plan in enumerate(plans_of(job(name), Limits())):
        if number % 7 == 0:
            for recompute in ("none", "selective", "full"):
                one = replace(plan, recompute=recompute)
                least = least_seconds(job(name), one, known)
                assert 0 < least <= estimate(job(name), one, known).seconds * (1 + 1e-9)


def test_what_is_beyond():
    cutoff = Cutoff(precision="bfloat16", num_best=2, num_executed=1, num_pipelines=1)
    plain, experts, pipeline = Plan(dp=8), Plan(dp=8, ep=8), Plan(dp=4, pp=2)
    one = estimate(job_of(cluster="a100:8"), Plan(dp=8, microbatches=1))
    assert not cutoff.is_beyond(experts, 1e9)
    for plan, seconds in ((experts, 1.0), (replace(experts, zero=1), 2.0), (experts, 1.5)):
        cutoff.add(replace(one, plan=plan, seconds=seconds))
    assert cutoff.is_beyond(experts, 2.01) and not cutoff.is_beyond(experts, 2.001), "four digits decide"
    assert not cutoff.is_beyond(plain, 2.01), "none that runs is found yet"
    cutoff.add(replace(one, plan=pipeline, seconds=3.0))
    assert cutoff.is_beyond(plain, 3.01) and not cutoff.is_beyond(plain, 2.01)
    assert cutoff.is_beyond(pipeline, 3.01) and not cutoff.is_beyond(pipeline, 2.9), "the best layout with a pipeline"
