"""One process at a time in a run directory, and only with the recipe that it holds."""

import os

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.engine.resolve import RunSetup
from shoal.trainer.claim import Claim, check_claim, choose_run_dir, ends_alike, read_plan, read_setup
from shoal.trainer.config import Recipe

TABLES = {
    "model": {"name": "mlp"},
    "data": {"source": "synthetic", "kind": "regression"},
    "train": {"steps": 5},
}


def recipe(**sections):
    return Recipe.model_validate({**TABLES, **sections})


def test_a_second_claim_is_refused_by_the_holders_id_until_it_lets_go(tmp_path):
    first = Claim(tmp_path / "run")
    with pytest.raises(RequestError, match=f"in use by process {os.getpid()}"):
        Claim(tmp_path / "run")
    first.release()
    second = Claim(tmp_path / "run")
    second.release()
    assert not (tmp_path / "run" / "run.lock").exists()


def test_what_decides_the_weights_may_not_change_and_the_rest_may(tmp_path):
    claim = Claim(tmp_path / "run")
    claim.write(recipe(), Plan(dp=1))
    claim.release()
    with pytest.raises(RequestError, match="already holds a run of this recipe; add --resume"):
        check_claim(tmp_path / "run", recipe(), resume=False)
    for allowed in (
        recipe(),
        recipe(train={"steps": 50, "micro_batch": 2}),
        recipe(checkpoint={"every": 3}),
        recipe(plan="dp=2"),
        recipe(train={"steps": 5, "watch_every": 7}, parallel={"split": {"layers.*": "none"}}),
    ):
        check_claim(tmp_path / "run", allowed, resume=True)
    for key, other in (
        ("train.seed", recipe(train={"steps": 5, "seed": 9})),
        ("optim.lr", recipe(optim={"lr": 0.5})),
        ("model.hidden", recipe(model={"name": "mlp", "hidden": 3})),
    ):
        with pytest.raises(RequestError, match=f"another recipe: {key} is"):
            check_claim(tmp_path / "run", other, resume=True)


def test_a_run_that_stopped_early_is_over_only_by_the_same_rule(tmp_path):
    """One with more patience, or none of it, was told that there is nothing to do."""
    stopping = recipe(train={"steps": 5, "early_stop": {"patience": 1}})
    claim = Claim(tmp_path / "run")
    claim.write(stopping, Plan(dp=1))
    claim.release()
    assert ends_alike(claim.run, stopping)
    for other in (recipe(), recipe(train={"steps": 5, "early_stop": {"patience": 2}})):
        check_claim(tmp_path / "run", other, resume=True)
        assert not ends_alike(claim.run, other)


def test_run_directories_are_numbered_and_resume_takes_the_newest(tmp_path):
    def choose(resume=False):
        return choose_run_dir("tiny", given=None, resume=resume, parent=tmp_path).name

    assert choose() == "tiny" == choose(resume=True)
    for name in ("tiny", "tiny-2", "tiny-10", "tiny-old"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    assert choose() == "tiny-11"
    assert choose(resume=True) == "tiny-10"
    assert choose_run_dir("tiny", given=tmp_path / "mine", resume=False) == tmp_path / "mine"


def test_a_file_is_not_a_run_directory(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RequestError, match="is a file"):
        check_claim(tmp_path / "run", recipe(), resume=False)


def test_what_was_decided_of_a_run_is_handed_down_in_its_directory(tmp_path):
    setup = RunSetup(plan=Plan.parse("dp=2 microbatches=2"), micro_batch=4, train_samples=77, total_steps=5)
    claim = Claim(tmp_path / "run")
    claim.write(recipe(), setup.plan, setup)
    assert (read_setup(tmp_path / "run"), read_plan(tmp_path / "run")) == (setup, str(setup.plan))
    claim.write(recipe(), setup.plan)
    claim.release()
    with pytest.raises(RequestError, match="it is not an object with plan, micro_batch, train_samples, total_steps"):
        read_setup(tmp_path / "run")
