"""The list of planted bugs: every kind that users reported, each with a recipe that can run it and a plant that finds its
line."""

import pytest

from shoal.comm.world import World
from shoal.core.place import Place
from shoal.core.plan import Plan
from shoal.verify.mutants.catalogue import MUTANTS, PREDICTION, own_recipe, planted
from shoal.verify.reference.recording import KINDS
from shoal.verify.request import build_subject, check_plan
from support.processes.command import ROOT

# The words of the promise, one for each kind.
PROMISED = (
    "all-reduce dropped",
    "scaled by tp",
    "scaled by cp",
    "scaled by accumulation",
    "norm over one shard only",
    "norm weight not reduced under sequence parallelism",
    "padded vocabulary in the loss",
    "wrong causal mask at a ring boundary",
    "dropout mask depends on the rank",
    "optimizer state of the wrong shard",
    "loss averaged over unequal batches",
    "not synchronised",
    "tied weight reduced once only",
    "stale scale",
    "updated by more than noise",
    "push applied twice",
    "share dropped",
    "scaled by the number of workers",
    "learning rate of another update",
    "in the order of arrival",
    "ignores the bound",
    "late gradient not weighted",
    "promoted with an old version",
)


@pytest.mark.parametrize("words", PROMISED)
def test_every_promised_kind_is_there(words):
    assert any(words in name for name in MUTANTS)


def test_the_guide_counts_them():
    """It said 31 when there were 42."""
    plans = [Plan.parse(mutant.plan) for mutant in MUTANTS.values()]
    servers, pipelines = sum(plan.ps > 0 for plan in plans), sum(plan.pp > 1 and not plan.ps for plan in plans)
    guide = (ROOT / "docs" / "guides" / "verify.md").read_text()
    assert f"plants {len(MUTANTS)} bugs" in guide
    assert f"{servers} are of parameter servers, and {pipelines} of pipelines" in guide


def test_each_says_which_comparison_should_see_it():
    assert all(set(mutant.by.split(" or ")) <= {*KINDS, PREDICTION, "rule"} for mutant in MUTANTS.values())


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_each_plants_in_a_line_that_exists_and_takes_it_out_again(mutant):
    import torch

    world = World(Place(), device=torch.device("cpu"), deadline_seconds=1.0)
    swaps = mutant.bug(world)
    assert swaps
    before = [vars(owner)[name] for owner, name, _ in swaps]
    with planted(mutant, world):
        assert [vars(owner)[name] for owner, name, _ in swaps] != before
    assert [vars(owner)[name] for owner, name, _ in swaps] == before


@pytest.mark.parametrize(
    "name",
    [
        "padded vocabulary in the loss",
        "batch norm statistics not synchronised",
        "tied weight reduced once only",
        "a server adds in the order of arrival",
    ],
)
def test_its_own_recipe_can_run_its_plan(name):
    mutant = MUTANTS[name]
    subject = build_subject(own_recipe(mutant))
    check_plan(subject, Plan.parse(mutant.plan))
