"""``shoal verify --elastic``: replicas die and come by a script; bugs that are planted in such a run are found."""

import pytest

from shoal.core.plan import Plan
from shoal.trainer.config import read_recipe
from shoal.verify.elastic.proof import prove_elastic
from shoal.verify.mutants.elastic_bugs import BUGS
from support.processes.command import TINY


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(TINY)
    return read_recipe(path)


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp=4", "dp=4 zero=2"])
def test_four_three_one_four(recipe, plan):
    found = prove_elastic(recipe, Plan.parse(plan), "4,3,1,4")
    assert found.status == "proven" and found.bitwise, found.reason


@pytest.mark.soak
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(recipe, bug):
    found = prove_elastic(recipe, Plan.parse("dp=4 zero=2"), "4,3", bug=bug)
    if bug == "a stale copy":
        # Ranks take what they hold themselves, and the run finds by itself that counts of steps differ before it saves.
        assert found.status == "crashed" and "must be the same on all its replicas" in found.reason, found.reason
    else:
        assert found.status == "differs", found.reason


@pytest.mark.soak
@pytest.mark.parametrize(
    ("plan", "text", "said"), [("dp=2 pp=2", "2,1", "under pp=2"), ("dp=4", "4,5", "none above it")]
)
def test_what_cannot_be_proved_is_refused(recipe, plan, text, said):
    found = prove_elastic(recipe, Plan.parse(plan), text)
    assert found.status == "refused" and said in found.reason
