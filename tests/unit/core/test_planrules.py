"""What cannot be combined is refused with both numbers, the fix and the nearest plan that works; what can is listed once."""

import pytest

from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts, Width
from shoal.core.pipelines import SCHEDULES
from shoal.core.plan import Plan, all_plans, nearest_plan
from shoal.core.planrules import sequence_multiple
from shoal.engine.resolve import setting_problems
from support.processes.instruction_count import instructions

GPT = ModelFacts(
    name="the gpt",
    num_blocks=4,
    num_pairs=8,
    widths=(Width(name="the feed-forward layer (model.ffn)", size=176),),
    heads=((4, 2),),
    has_attention=True,
    sequence=32,
    has_sequence=True,
)
MLP = ModelFacts(name="the mlp", num_blocks=2, num_pairs=1, widths=(Width(name="model.hidden", size=30),))
CNN = ModelFacts(name="the cnn", num_pairs=1, widths=(Width(name="model.hidden", size=64),), has_batch_norm=True)
NORMED = ModelFacts(num_blocks=1, num_pairs=1, has_attention=True, sequence=32, has_sequence=True, has_batch_norm=True)


def refusal(text: str, model: object = None, world_size: int | None = None) -> str:
    with pytest.raises(RequestError) as refused:
        Plan.parse(text).check(model, world_size=world_size)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "model", "words", "near"),
    [
        (
            "tp=3",
            GPT,
            [
                "tp=3 does not divide the 4 heads, nor the 2 key-value heads, nor the 176 features of the feed-forward layer "
                "(model.ffn); set tp to one of 1, 2\n"
            ],
            "tp=2",
        ),
        ("tp=4", GPT, ["tp=4 does not divide the 2 key-value heads", "one of 1, 2"], "tp=2"),
        ("dp=2 tp=3", GPT, ["4 heads"], "dp=2 tp=2"),
        # One list of degrees: 4 and 8 divide the features and not the heads.
        (
            "tp=16",
            GPT,
            ["tp=16 does not divide the 4 heads, nor the 2 key-value heads; set tp to one of 1, 2\n"],
            "tp=2",
        ),
        ("tp=4", MLP, ["tp=4 does not divide the 30 features of model.hidden"], "tp=3"),
        ("cp=3", GPT, ["sequence of 32", "2 x cp 3 = 6", "30 or 36"], "cp=2"),
        ("cp=3 cp_kind=alltoall", GPT, ["deals the 4 heads out over cp=3"], "cp=2 cp_kind=alltoall"),
        ("tp=2 cp=4 cp_kind=alltoall", GPT, ["the 2 heads on each of the 2 tp ranks"], "tp=2 cp=4"),
        ("sp=true", GPT, ["tp is 1", "leave sp out"], "dp=1"),
        ("cp_kind=alltoall", GPT, ["cp is 1", "leave cp_kind out"], "dp=1"),
        ("dp=1 zero=2", GPT, ["zero=2 has nothing to shard along dp=1", "leave zero out"], "dp=1"),
        ("cp=2", MLP, ["no row of blocks in the mlp has one", "leave cp out"], "dp=1"),
        ("tp=2 sp=true", CNN, ["no row of blocks in the cnn has one", "leave sp out"], "tp=2"),
        ("tp=2 sp=true", NORMED, ["batch norm's statistics", "leave sp out"], "tp=2"),
        ("cp=2", NORMED, ["batch norm's statistics", "leave cp out"], "dp=1"),
        ("recompute=full", CNN, ["the cnn has no row of blocks", "parallel.blocks"], "dp=1"),
        ("ep=2", GPT, ["ep=2 is not there yet"], "dp=1"),
    ],
)
def test_a_refusal_has_both_numbers_the_fix_and_the_nearest_plan(text, model, words, near):
    message = refusal(text, model)
    for word in words:
        assert word in message
    assert message.endswith(f"the nearest plan that works: {near!r}")


def test_the_sequence_multiple_of_sp_alone_is_tp():
    odd = ModelFacts(num_blocks=1, num_pairs=1, heads=((6, 6),), has_attention=True, sequence=32, has_sequence=True)
    assert "32 is not a multiple of tp 3 = 3; set the sequence to 30 or 33, or change tp" in refusal(
        "tp=3 sp=true", odd
    )
    assert sequence_multiple(Plan.parse("tp=2 sp=true cp=3")) == 12
    assert sequence_multiple(Plan.parse("tp=2 sp=true cp=3 cp_kind=alltoall")) == 6
    assert sequence_multiple(Plan.parse("dp=2 tp=2")) == 1


def test_dropout_inside_attention_is_refused_under_cp_only():
    dropping = ModelFacts(
        num_blocks=1,
        num_pairs=1,
        heads=((4, 4),),
        has_attention=True,
        sequence=32,
        has_sequence=True,
        attention_dropout=0.1,
    )
    assert "dropout of 0.1 inside attention" in refusal("cp=2", dropping)
    Plan.parse("tp=2 sp=true").check(dropping)


def test_obstacles_are_said_in_their_own_words():
    mixing = ModelFacts(
        name="Mixer",
        num_blocks=2,
        num_pairs=2,
        sequence=32,
        has_sequence=True,
        obstacle_sp="it rolls",
        obstacle_cp="it rolls",
    )
    assert "sp=true with tp=2 cannot cut the sequence of Mixer: it rolls" in refusal("tp=2 sp=true", mixing)
    assert "cp=2 cannot cut the sequence of Mixer: it rolls" in refusal("cp=2", mixing)


def test_a_model_in_which_nothing_can_be_split_is_told_why():
    message = refusal("tp=2", ModelFacts(name="Odd", note="batch norm lies between its layers"), world_size=2)
    assert "no pair of linear layers" in message and "Odd (batch norm lies between its layers)" in message
    assert message.endswith("the nearest plan that works: 'dp=2'")


def test_the_product_is_said_with_the_nearest_plan_for_the_processes_there_are():
    message = refusal("dp=2 tp=2", GPT, world_size=6)
    assert "6 processes are not dp 2 x tp 2 x cp 1 x pp 1 = 4; start 4 processes" in message
    assert message.endswith("'dp=3 tp=2'")


def test_an_unknown_model_is_asked_nothing():
    Plan.parse("tp=3 cp=5").check(object())


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
@pytest.mark.parametrize("facts", [GPT, MLP, CNN], ids=["gpt", "mlp", "cnn"])
def test_all_plans_are_exactly_those_that_check_allows(num_processes, facts):
    plans = all_plans(num_processes, facts)
    assert len({str(plan) for plan in plans}) == len(plans) > 0
    assert plans == all_plans(num_processes, facts)
    for plan in plans:
        plan.check(facts, world_size=num_processes)
    assert str(plans[0]) == f"dp={num_processes}"


def test_all_plans_of_the_tiny_gpt_on_two_processes():
    kinds = ["dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=1 cp=2", "dp=1 cp=2 cp_kind=alltoall"]
    kinds += ["dp=1 tp=2", "dp=1 tp=2 sp=true"]
    expected = [f"{kind}{suffix}" for kind in kinds for suffix in ("", " recompute=selective", " recompute=full")]
    found = all_plans(2, GPT)
    assert [str(plan) for plan in found if plan.pp == 1] == expected
    # Every schedule by itself, and one of each kind of backward pass with recompute.
    pipelines = [str(plan) for plan in found if plan.pp == 2]
    assert {f"dp=1 pp=2 schedule={name}" for name in SCHEDULES} < set(pipelines)
    assert set(pipelines) - {f"dp=1 pp=2 schedule={name}" for name in SCHEDULES} == {
        f"dp=1 pp=2 schedule={name} recompute={kind}"
        for name in ("1f1b", "zb-h1", "pipedream")
        for kind in ("selective", "full")
    }


def test_the_nearest_plan_of_a_plan_that_works_is_itself():
    plan = Plan.parse("dp=2 tp=2 zero=1")
    assert nearest_plan(plan, GPT) == plan


def test_settings_that_do_not_go_with_a_plan():
    assert setting_problems(Plan.parse("dp=4 microbatches=2"), compile_model=True, unused_parameters=True) == []
    [problem] = setting_problems(Plan.parse("dp=2 tp=2 zero=1"), compile_model=True)
    assert "train.compile goes with dp alone, and the plan has tp and zero" in problem
    [problem] = setting_problems(Plan.parse("dp=2 zero=2"), unused_parameters=True)
    assert "train.unused_parameters goes with zero=0, and the plan has zero=2" in problem


def test_a_plan_for_many_ranks_is_refused_in_a_moment():
    """Every degree for every key was 48 seconds of searching before the user heard that his model has nothing to split."""
    nothing = ModelFacts(name="a model without blocks")
    plan = Plan.parse("dp=8 tp=4 sp=true cp=2 zero=3 recompute=full")
    near = nearest_plan(plan, nothing)
    assert near is not None and not near.problems(nothing)
    assert instructions(lambda: nearest_plan(plan, nothing)) < 20_000_000
