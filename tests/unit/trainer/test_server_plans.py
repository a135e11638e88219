"""Plans with parameter servers: what is derived, what is refused, and what a step's updates are."""

from dataclasses import replace

import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts
from shoal.core.plan import Plan
from shoal.engine.config import TrainConfig
from shoal.engine.resolve import choose_plan, resolve_plan, server_settings, updates_per_step
from shoal.optim.config import OptimConfig
from shoal.paramserver.config import ParamServerConfig
from shoal.paramserver.sharding import match_hot
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import TrainRequest, prepare


def test_hot_parameters_are_named_by_pattern():
    names = ["embed.weight", "blocks.0.weight", "blocks.1.weight"]
    assert match_hot(["blocks.*"], names) == {"blocks.0.weight", "blocks.1.weight"}
    with pytest.raises(
        RequestError, match=r"paramserver.hot 'embd.weight' is no parameter .* did you mean 'embed.weight'"
    ):
        match_hot(["embd.weight"], names)
    for pattern, fix in (("measrued", "did you mean 'measured'"), ("zzz", "it has 3, such as 'blocks.0.weight'")):
        with pytest.raises(RequestError, match=f"paramserver.hot '{pattern}' is no parameter of this model; {fix}"):
            match_hot([pattern], names)


@pytest.mark.parametrize("name", ["batch_shares", "local_lr", "local_steps"])
def test_a_word_in_the_place_of_a_list_is_said_to_be_none(name):
    """It read: Input should be a valid tuple."""
    with pytest.raises(RequestError, match=rf"{name}: 'abc' is no list; write one in brackets, such as \[3, 1\]"):
        validate(ParamServerConfig, {name: "abc"}, origin="recipe.toml")


def test_orders_that_workers_do_not_follow_are_refused_together(tiny):
    """They were ignored without a word."""
    changes = ("data.order=time", "data.replay=0.25", "data.replay_from=[3]")
    request = TrainRequest(recipe=tiny, plan="ps=1 workers=2", overrides=changes, run_dir=tiny.parent / "run")
    with pytest.raises(
        RequestError, match=r"(?s)leave data.order out, .* leave data.replay out, or use a plan with dp"
    ):
        prepare(request, own=OwnPartsHere())
    prepare(replace(request, plan="dp=2"), own=OwnPartsHere())


def test_settings_of_servers_that_a_plan_does_not_have_are_said_to_do_nothing(tiny):
    """They were ignored without a word."""
    changes = ("paramserver.staleness_aware=true", "paramserver.hot=measured", "paramserver.lease_seconds=2.0")
    request = TrainRequest(recipe=tiny, plan="dp=2", overrides=changes, run_dir=tiny.parent / "run")
    (warning,) = prepare(request, own=OwnPartsHere()).warnings
    assert warning == (
        "paramserver.staleness_aware, paramserver.hot: no effect, because the plan 'dp=2' has no parameter servers; add ps and "
        "workers, or leave it out"
    )
    served = prepare(replace(request, plan="ps=2 workers=2 backup=1 update=async"), own=OwnPartsHere())
    assert not any("no effect" in said for said in served.warnings)


def test_what_servers_do_not_do_is_refused_and_not_left_out(tiny):
    request = TrainRequest(recipe=tiny, plan="ps=1 workers=2", run_dir=tiny.parent / "run")
    for change, key in (('log.to=["wandb"]', "log.to"), ('eval.metrics=["perplexity"]', "eval.metrics")):
        with pytest.raises(RequestError, match=f"{key} needs a loop of steps .* leave {key} out, or use dp=2"):
            prepare(replace(request, overrides=(change,)), own=OwnPartsHere())


def test_a_metric_that_nobody_knows_gets_one_sentence(tiny):
    """Two said: did you mean 'accuracy'?, or."""
    request = TrainRequest(recipe=tiny, plan="dp=1", run_dir=tiny.parent / "run")
    for change in ('eval.metrics=["acuracy"]', 'train.early_stop={metric="acuracy", mode="max"}'):
        with pytest.raises(RequestError, match=r"; did you mean 'accuracy'\?$"):
            prepare(replace(request, overrides=(change,)), own=OwnPartsHere())


@pytest.mark.parametrize(
    ("text", "processes", "wanted"),
    [
        ("ps=2", None, "ps=2 workers=2 update=bsp"),
        ("ps=2", 6, "ps=2 workers=4 update=bsp"),
        ("ps=1 workers=4 update=half", None, "ps=1 workers=4 update=half:4,0.25"),
        ("ps=1 tp=2", 7, "tp=2 ps=1 workers=3 update=bsp"),
        ("ps=1 pp=2 cp=2", None, "cp=2 pp=2 ps=1 workers=2 update=bsp"),
    ],
)
def test_what_a_plan_leaves_out_is_derived(text, processes, wanted):
    assert str(choose_plan("dp=1", plan_text=text, num_processes=processes)) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workers=2", "workers=2 is of parameter servers, and ps is 0"),
        ("ps=1 backup=1", "backup=1 needs 2 servers, and ps is 1"),
        ("ps=2 backup=2", "backup=2 is not there yet"),
        ("ps=1 dp=2", "dp=2 does not go with ps=1: its replicas are the workers"),
        ("ps=1 tp=2 dp=2", "dp=2 does not go with ps=1: its replicas are the workers"),
        ("ps=1 pp=2 schedule=pipedream", "schedule=pipedream does not go with ps=1: its stages update weights"),
        ("ps=1 zero=2", "zero=2 does not go with ps=1"),
        ("ps=1 workers=2 update=half:3,0", "closes an update at 3 arrivals, and there are 2 workers; lower it to 2"),
        ("ps=1 update=spp:1", "unknown name 'spp'; did you mean 'ssp'"),
        ("ps=1 workers=0", "workers=0 is below 1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_its_fix(text, words):
    with pytest.raises(RequestError) as caught:
        choose_plan("dp=1", plan_text=text, num_processes=None)
    assert words in str(caught.value)


def test_more_backups_than_there_can_be_are_not_met_with_more_servers():
    (problem,) = Plan.parse("ps=2 workers=2 backup=2").problems()
    assert problem.startswith("backup=2 is not there yet")


def test_statistics_that_servers_do_not_hold_are_refused_and_others_are_not():
    plan = Plan.parse("ps=1 workers=2")
    (problem,) = plan.problems(ModelFacts(name="the cnn", has_batch_norm=True, keeps_statistics=True))
    assert "ps=1 does not go with the cnn: its batch norm keeps running statistics" in problem
    assert "use dp in the place of ps" in problem
    assert plan.problems(ModelFacts(name="the net", has_batch_norm=True)) == []
    assert Plan.parse("dp=2").problems(ModelFacts(name="the cnn", has_batch_norm=True, keeps_statistics=True)) == []


def test_processes_are_servers_and_workers():
    assert Plan.parse("ps=2 workers=3").world_size == 5
    with pytest.raises(RequestError, match=r"4 processes are not ps 2 \+ workers 3 = 5"):
        choose_plan("dp=1", plan_text="ps=2 workers=3", num_processes=4)
    assert Plan.parse("ps=2 workers=3 tp=2 pp=2").world_size == 14
    with pytest.raises(RequestError, match=r"6 processes are not ps 1 \+ workers 2 x 2 ranks each = 5"):
        choose_plan("dp=1", plan_text="ps=1 tp=2", num_processes=6)


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [("bsp", 1), ("ssp:3", 1), ("async", 4), ("half:3,0.25", 2), ("downpour:2,2", 2), ("downpour:5,5", 1)],
)
def test_a_step_has_as_many_updates_as_its_rule_makes_of_four_shares(plan, wanted):
    assert updates_per_step(Plan.parse(f"ps=1 workers=4 update={plan}")) == wanted


def test_shares_are_of_the_batch():
    layout = resolve_plan(TrainConfig(steps=1, global_batch=12), Plan.parse("ps=1 workers=3"))
    assert (layout.micro_batch, layout.plan.microbatches) == (4, 1)
    with pytest.raises(RequestError, match=r"global_batch 16 is not divisible by workers 3"):
        resolve_plan(TrainConfig(steps=1, global_batch=16), Plan.parse("ps=1 workers=3"))


def test_shares_of_unequal_size_need_no_batch_that_divides_evenly():
    """It was refused for a division that nobody makes."""
    train, plan = TrainConfig(steps=1, global_batch=16), Plan.parse("ps=1 workers=3 microbatches=2")
    layout = resolve_plan(train, plan, sizes=(3.0, 1.0, 1.0))
    # Work units of 10, 3 and 3 samples.
    assert (layout.micro_batch, layout.plan.microbatches) == (5, 2)


def test_settings_that_no_server_can_carry_out_are_listed_together():
    train = TrainConfig(steps=1, precision="float16", nonfinite="skip", time_limit="1m")
    found = server_settings(train, OptimConfig(clip=1.0, schedule="plateau"), Plan.parse("ps=2"))
    words = ["optim.clip 1 ", "plateau", "float16", "nonfinite", "time_limit"]
    assert len(found) == 5 and all(word in text for word, text in zip(words, found, strict=True))
    assert server_settings(TrainConfig(steps=1), OptimConfig(), Plan.parse("ps=2")) == []
