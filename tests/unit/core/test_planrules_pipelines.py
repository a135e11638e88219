"""What a pipeline cannot be combined with is refused with both numbers, the fix and the nearest plan, in a moment."""

from dataclasses import replace
from functools import partial

import pytest

from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts
from shoal.core.pipelines import DEFAULT_SCHEDULE, SCHEDULES, is_file, schedule_facts
from shoal.core.plan import Plan, all_plans, nearest_plan
from shoal.schedules.catalogue import FAMILIES
from shoal.schedules.schedule import Fold
from support.processes.instruction_count import instructions

GPT = ModelFacts(
    name="the gpt",
    num_blocks=4,
    num_pairs=8,
    heads=((4, 2),),
    has_attention=True,
    sequence=32,
    has_sequence=True,
    num_units=8,
)
WIDE = replace(GPT, num_blocks=6, num_units=7)
TIED = replace(GPT, tied_ends="embedding.weight")
CNN = ModelFacts(name="the cnn", num_pairs=1, has_batch_norm=True, num_units=8)


def test_the_plan_knows_exactly_the_families_of_the_catalogue():
    assert list(SCHEDULES) == list(FAMILIES) and DEFAULT_SCHEDULE in FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_plan_knows_of_a_schedule_is_what_the_schedule_does(name):
    facts, family = SCHEDULES[name], FAMILIES[name]
    assert facts.takes_chunks == (family.chunks is None)
    assert facts.chunks == (family.default_chunks if family.chunks is None else family.chunks)
    assert facts.is_asynchronous == family.updates.are_asynchronous
    assert facts.updates_each == (family.updates.are_asynchronous and not family.accumulates)
    assert facts.is_bidirectional == (family.fold is Fold.CROSS)
    assert facts.takes_replicas == family.takes_replicas


def test_a_file_and_no_name_have_facts_too():
    assert is_file("folder/own.csv") and not is_file("1f1b")
    assert schedule_facts("own.csv").takes_chunks and not schedule_facts("own.csv").is_asynchronous
    assert schedule_facts(None) == SCHEDULES["1f1b"]
    assert schedule_facts("interleaved", 5).chunks == 5


REFUSED = [
    ("schedule=1f1b", GPT, ["schedule=1f1b is of a pipeline", "pp is 1", "set pp to 2", "leave schedule out"], "dp=1"),
    ("chunks=2", GPT, ["chunks=2 is of a pipeline", "pp is 1", "leave chunks out"], "dp=1"),
    ("pp=2 schedule=1f1", GPT, ["schedule=1f1 is neither", ".csv", "did you mean '1f1b'?"], "pp=2"),
    ("pp=2 schedule=Zbv", GPT, ["schedule=Zbv", "did you mean 'zbv'?"], "pp=2"),
    ("pp=2 schedule=zbv chunks=3", GPT, ["zbv has 2 stage(s) per rank", "chunks=3"], "pp=2 schedule=zbv"),
    ("pp=2 chunks=2", GPT, ["the default, 1f1b, has 1 stage(s)", "chunks=2", "schedule=interleaved"], "pp=2"),
    (
        "dp=2 pp=2 schedule=pipedream zero=1",
        GPT,
        ["zero=1 does not go with schedule=pipedream", "leave zero out", "schedule=1f1b"],
        "dp=2 pp=2 schedule=pipedream",
    ),
    (
        "tp=2 pp=2 schedule=pipedream-vsync",
        GPT,
        ["tp=2 does not go with schedule=pipedream-vsync", "leave tp out"],
        "tp=2 pp=2",
    ),
    ("pp=8", GPT, ["pp=8 ranks are more than the 4 blocks of the gpt", "lower pp to 4"], "pp=4"),
    (
        "pp=4 schedule=zbv",
        WIDE,
        ["pp=4 ranks of 2 stages each want 8 stages", "the gpt can be cut into 7", "lower pp to 3"],
        "pp=4",
    ),
    ("pp=2 schedule=interleaved chunks=5", GPT, ["5 stages each want 10 stages", "cut into 8", "lower pp to 1"], None),
    ("pp=9", CNN, ["pp=9 ranks want 9 stages, and the cnn can be cut into 8", "lower pp to 8"], "pp=8"),
    ("pp=2 schedule=chimera", CNN, ["schedule=chimera has two ranks for each stage", "batch norm"], "pp=2"),
    ("pp=2 schedule=dualpipe", CNN, ["schedule=dualpipe has two ranks for each stage", "batch norm"], "pp=2"),
    ("replicas=2-1", GPT, ["replicas=2-1 is of a pipeline", "pp is 1", "leave replicas out"], "dp=1"),
    ("pp=3 replicas=2+1", GPT, ["replicas=2+1 is no row of numbers", "such as replicas=2-1"], "pp=3"),
    ("pp=3 replicas=-1-4", GPT, ["replicas=-1-4 is no row of numbers"], "pp=3"),
    ("pp=4 replicas=2-1", GPT, ["replicas=2-1 are 3 ranks, and pp is 4", "set pp to 3"], None),
    ("pp=3 replicas=3", GPT, ["replicas=3 is one stage on 3 ranks", "write dp=3"], "pp=3"),
    ("pp=3 replicas=1-1-1", GPT, ["gives every stage one rank", "leave replicas out"], "pp=3"),
    ("pp=3 replicas=3-0", GPT, ["leaves a stage without a rank", "1 or more"], "pp=3"),
    ("pp=3 replicas=2-1 chunks=2 schedule=own.csv", GPT, ["replicas=2-1 gives every rank one stage", "chunks=2"], None),
    (
        "pp=4 schedule=zbv replicas=2-2",
        GPT,
        ["replicas=2-2 does not go with schedule=zbv", "one of gpipe, 1f1b, pipedream-flush"],
        "pp=4 schedule=zbv",
    ),
    (
        "pp=3 schedule=pipedream replicas=2-1",
        GPT,
        ["does not go with schedule=pipedream", "only one of the ranks of a stage has seen"],
        "pp=3 schedule=pipedream",
    ),
    ("pp=3 replicas=2-1", CNN, ["replicas=2-1 has several ranks for a stage", "batch norm of the cnn"], "pp=3"),
    (
        "pp=6 replicas=2-1-1-1-1",
        GPT,
        ["are 5 stages, more than the 4 blocks of the gpt", "name 4 stages or fewer"],
        None,
    ),
    (
        "pp=2 schedule=pipedream",
        TIED,
        ["'embedding.weight' is held by the first and the last of 2", "untie it"],
        "pp=2",
    ),
]


@pytest.mark.parametrize(("text", "model", "words", "near"), REFUSED, ids=[case[0] for case in REFUSED])
def test_a_refusal_has_both_numbers_the_fix_and_the_nearest_plan(text, model, words, near):
    with pytest.raises(RequestError) as refused:
        Plan.parse(text).check(model)
    for word in words:
        assert word in str(refused.value)
    found = str(refused.value).partition("the nearest plan that works: ")[2].strip("'")
    if near is not None:
        assert found == near
    assert not Plan.parse(found).problems(model)


def test_what_pipelines_do_go_with_is_allowed():
    for text in ("dp=2 pp=2 zero=3", "tp=2 sp=true pp=2 schedule=zbv recompute=full", "pp=4 schedule=interleaved"):
        Plan.parse(text).check(GPT)
    Plan.parse("pp=4 schedule=zbv").check(CNN)
    Plan.parse("pp=2").check(TIED)
    Plan.parse("pp=2 schedule=own.csv chunks=2").check(GPT)
    for text in (
        "pp=3 replicas=2-1",
        "dp=2 tp=2 pp=4 replicas=1-2-1 zero=3 recompute=full",
        "pp=5 replicas=1-4 schedule=gpipe",
    ):
        Plan.parse(text).check(GPT)
    # As many ranks as one likes of as many stages as there are blocks.
    Plan.parse("pp=8 replicas=5-1-1-1").check(TIED)


def test_replicas_are_a_key_of_the_line_and_decide_the_stages():
    plan = Plan.parse("pp=4 replicas=1-2-1 microbatches=8")
    assert str(plan) == "pp=4 replicas=1-2-1 microbatches=8" and Plan.parse(str(plan)) == plan
    assert (plan.stage_replicas, plan.num_stages, plan.world_size) == ((1, 2, 1), 3, 4)
    plain = Plan.parse("pp=4 schedule=zbv")
    assert (plain.stage_replicas, plain.num_stages) == (None, 8)


def test_one_plan_with_replicas_is_listed_for_three_ranks_and_more():
    for num_processes, listed in ((2, []), (3, ["2-1"]), (4, ["2-1-1"])):
        found = [plan for plan in all_plans(num_processes, GPT) if plan.replicas]
        assert [plan.replicas for plan in found] == listed
        assert all(plan.dp == 1 and plan.schedule == "1f1b" for plan in found)
    assert not [plan for plan in all_plans(3, CNN) if plan.replicas], "batch norm"


def test_a_plan_of_many_wrong_things_takes_hardly_more_work_for_more_ranks():
    work = []
    for dp in (1, 4):
        plan = Plan.parse(f"dp={dp} tp=2 sp=true pp=4 schedule=pipedream chunks=2 zero=3 recompute=full")
        near = nearest_plan(plan, GPT)
        assert near is not None and not near.problems(GPT)
        work.append(instructions(partial(nearest_plan, plan, GPT)))
    assert work[1] < 4 * work[0]
