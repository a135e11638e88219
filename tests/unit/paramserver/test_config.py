"""Settings that do not go with the update rule are refused before anything starts, with the fix."""

import pytest

from shoal.core.plan import Plan
from shoal.paramserver.config import rule_problems
from support.paramserver.run_in_process import recipe_of


def problems_of(recipe, plan):
    """Settings of a recipe that do not go with a plan."""
    train = recipe.train
    return list(
        rule_problems(
            recipe.paramserver,
            Plan.parse(plan),
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            precision=train.precision,
            weight_decay=recipe.optim.weight_decay,
        )
    )


CASES = [
    ("bsp", ["paramserver.aggregate=fednova"], "local_steps is not set"),
    ("bsp", ["paramserver.local_steps=[1, 2]"], "need aggregate fednova, and it is average"),
    ("downpour:2,2", ["paramserver.aggregate=fednova", "paramserver.local_steps=2"], "do not go with downpour"),
    (
        "bsp",
        ["paramserver.aggregate=fednova", "paramserver.local_steps=[1, 2, 3]"],
        "name 3 workers, and the plan has 2",
    ),
    ("bsp", ["paramserver.aggregate=fednova", "paramserver.local_steps=9"], "9 steps on the 8 samples"),
    ("bsp", ["paramserver.batch_shares=[1, 2, 3]"], "name 3 workers, and the plan has 2"),
    (
        "bsp",
        ["paramserver.batch_shares=[99, 1]"],
        "leave 0 of the 16 samples of global_batch to a work unit of 1 microbatches",
    ),
    (
        "bsp",
        ["paramserver.batch_shares=[3, 1]", "paramserver.aggregate=adasum"],
        "aggregate adasum joins gradients by their directions",
    ),
    ("lbfgs", ["paramserver.batch_shares=[3, 1]"], "under lbfgs small work units of a batch go to whoever is free"),
    (
        "bsp",
        ["paramserver.batch_shares=[3, 1]", "paramserver.aggregate=fednova", "paramserver.local_steps=[2, 5]"],
        "5 steps on the 4 samples of a work unit",
    ),
    ("async", ["paramserver.warm_start=5"], "warm_start 5 is of downpour, and the rule is async"),
    ("async", ["paramserver.local_lr=0.1"], "leave it out"),
    ("lbfgs", ["train.precision=bfloat16"], "set train.precision to float32 or float64"),
    ("lbfgs", ["train.precision=float16"], "set train.precision to float32 or float64"),
    ("lbfgs", ["optim.weight_decay=0.1"], "put the penalty into the loss"),
    ("lbfgs", ["paramserver.aggregate=adasum"], "use average"),
    ("lbfgs", ["paramserver.drop_beyond=3"], "paramserver.drop_beyond is about old gradients"),
]


@pytest.mark.parametrize(("update", "settings", "words"), CASES, ids=lambda value: str(value)[:24])
def test_what_does_not_go_together_is_said_with_its_fix(update, settings, words):
    found = problems_of(recipe_of(*settings), f"ps=2 workers=2 update={update}")
    assert len(found) == 1 and words in found[0]


def test_a_cache_that_could_never_be_used_is_refused():
    """It was taken, and did nothing."""
    recipe = recipe_of("paramserver.cache_staleness=3")
    for plan, words in (
        ("ps=1 workers=2 update=async", "the plan has ps=1; take ps=2 or more"),
        ("ps=2 workers=2 update=bsp", "does nothing under bsp"),
        ("ps=2 workers=2 update=ssp:0", "use ssp:3 or async"),
    ):
        [found] = problems_of(recipe, plan)
        assert "paramserver.cache_staleness 3 " in found and words in found
    for update in ("ssp:1", "async", "half:2,0.1", "downpour:2,2"):
        assert not problems_of(recipe, f"ps=2 workers=2 update={update}")


@pytest.mark.parametrize("update", ["bsp", "ssp:2", "async", "half:2,0.1", "downpour:2,2", "lbfgs"])
def test_plain_settings_go_with_every_rule(update):
    assert not problems_of(recipe_of(), f"ps=2 workers=2 update={update}")
