"""What a rank holds beside one set of weights: versions, both ways of a bidirectional schedule, gradients under accumulation."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.core.plan import Plan
from shoal.pipeline.versions import VersionRule, Versions
from shoal.planner.pricing.cost import price_parts
from shoal.planner.pricing.job import count_ranks
from shoal.planner.pricing.memory import price_memory, version_copies
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.schedule import Kind
from support.planner.jobs import job_of, shape_of

ASYNCHRONOUS = ("pipedream", "pipedream-vsync", "pipedream-2bw")


def copies_at_most(schedule, rank: int) -> int:
    """Sets of weights that the runtime's own book-keeping has at its fullest on one rank."""
    rule = VersionRule(updates=schedule.updates, num_stages=schedule.grid.num_ranks, accumulate=schedule.accumulate)
    versions = Versions({"w": nn.Parameter(torch.zeros(()))}, rule, stage=rank)
    most = 0
    for action in schedule.actions(rank):
        if action.kind is Kind.FORWARD:
            versions.use(action.microbatch)
        elif rule.ends_version(action.microbatch):
            versions.take_gradients(action.microbatch)
            versions.before_update(action.microbatch)
            most = max(most, len(versions.sets))
            versions.after_update(action.microbatch)
        most = max(most, len(versions.sets))
    return most


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8)])
def test_versions_are_those_that_the_runtime_copies(name, ranks, microbatches):
    """They were priced at nothing: a search took PipeDream for as small as 1F1B."""
    plan = Plan(dp=1, pp=ranks, schedule=name, microbatches=microbatches)
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, steps=4)
    found = price_memory(job_of(), plan)
    for rank, memory in enumerate(found):
        assert version_copies(plan, rank) == copies_at_most(schedule, rank)
        assert memory.versions == version_copies(plan, rank) * memory.weights
    assert found[0].versions > 0
    assert not any(memory.versions for memory in price_memory(job_of(), replace(plan, schedule="1f1b")))


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_a_bidirectional_schedule_trains_two_stages_on_every_rank(name):
    """Gradients and the optimizer's state of the way up cost nothing, and its stage was taken for the one of the way down."""
    job = job_of()
    plan = Plan(dp=1, pp=4, schedule=name, microbatches=8)
    one, both = (price_memory(job, replace(plan, schedule=schedule)) for schedule in ("1f1b", name))
    for rank in range(4):
        for part in ("weights", "gradients", "optimizer"):
            wanted = getattr(one[rank], part) + getattr(one[3 - rank], part)
            assert getattr(both[rank], part) == pytest.approx(wanted)
        assert both[rank].versions == 0
    assert count_ranks(job.chain, plan)[0] == count_ranks(job.chain, plan)[3]
    two, once = price_parts(job, plan), price_parts(job, replace(plan, schedule="1f1b"))
    assert two.update > once.update and two.reduce > once.reduce == 0, "copies are added up, also without replicas"


def test_activations_of_a_bidirectional_schedule_are_of_as_many_microbatches_as_it_holds():
    job = job_of()
    line, both = (
        price_memory(job, Plan(dp=1, pp=4, schedule=name, microbatches=16), [6, 6, 6, 6])
        for name in ("1f1b", "dualpipe")
    )
    assert both[1].activations == pytest.approx(line[1].activations)
    assert both[0].activations == pytest.approx((line[0].activations + line[3].activations) / 2)


@pytest.mark.parametrize(("schedule", "chunks"), [("zbv", 2), ("dualpipe", None)])
def test_a_tied_matrix_is_once_on_a_rank_that_has_both_ends(schedule, chunks):
    plan = Plan(dp=1, pp=4, schedule=schedule, chunks=chunks, microbatches=8)
    tied, untied = (price_memory(job_of(shape_of(tied=tied)), plan)[0] for tied in (True, False))
    assert untied.weights - tied.weights == pytest.approx(2 * 51200 * 1024)


@pytest.mark.parametrize("zero", [2, 3])
def test_ours_keeps_whole_gradients_under_accumulation_and_reduces_them_once(zero):
    """As ``parallel/zero/apply.py`` says; they were divided by dp, and reduced with every microbatch."""
    ours, theirs = job_of(software="shoal"), job_of(software="fsdp")
    plan = Plan(dp=8, zero=zero, microbatches=4)
    one, four = (price_memory(ours, replace(plan, microbatches=number))[0] for number in (1, 4))
    assert four.gradients == pytest.approx(8 * one.gradients) and four.weights == one.weights
    assert price_memory(theirs, plan)[0].gradients == pytest.approx(one.gradients)
    once, often = (price_parts(ours, replace(plan, microbatches=number)) for number in (1, 4))
    assert often.reduce == pytest.approx(once.reduce)
    assert often.gather == pytest.approx(once.gather * (4 if zero == 3 else 1))
