"""The "last good checkpoint" of a run that had blown up was the bad one, and the only one.

With ``checkpoint.keep=1 checkpoint.every=1`` the state after the update that ruined the weights was saved, the one before it
expired, and the next step's loss was not finite. The message named the ruined state as the last good checkpoint, and every
``--resume`` loaded it and failed at once. A checkpoint is good once a step was taken from it, and the newest good one stays.
"""

import math

import pytest

from blowups import build, names
from harness import read_summary
from shoal.core.errors import RunError

RATE = 1e12


def blow_up(run_dir, **options):
    with build(run_dir, **options) as trainer, pytest.raises(RunError, match="not finite") as caught:
        trainer.train()
    return trainer, str(caught.value)


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_checkpoint_that_a_step_was_taken_from_is_kept_and_named(tmp_path, keep):
    trainer, message = blow_up(tmp_path, lr=RATE, keep=keep)
    failed_after = trainer.progress.step
    good, bad = f"step-{failed_after - 1:08d}", f"step-{failed_after:08d}"
    assert failed_after >= 2, "the run must have checkpoints to lose"
    assert f"last good checkpoint: {tmp_path / 'checkpoints' / good}" in message and bad in message
    assert good in names(tmp_path) and bad not in names(tmp_path)


def test_a_resume_goes_on_from_it_and_a_lower_rate_helps(tmp_path):
    first, _ = blow_up(tmp_path, lr=RATE)
    again, message = blow_up(tmp_path, lr=RATE, resume=True)
    # The same steps lead to the same end, and not to a worse one.
    assert again.progress.step == first.progress.step and f"step-{first.progress.step - 1:08d}" in message
    with build(tmp_path, lr=1e-3, clip=1.0, resume=True) as third:
        infos = list(third.training_steps())
    assert infos[0].step == first.progress.step and infos[-1].step == 40
    assert all(math.isfinite(info.loss) for info in infos)


def test_keep_counts_again_as_soon_as_the_newest_is_known_to_be_good(tmp_path):
    with build(tmp_path, lr=0.1, every=4, steps=10) as trainer:
        for info in trainer.training_steps():
            if info.step == 7:
                trainer.persistence.wait()
                trainer.persistence.settle()
                assert names(tmp_path) == ["step-00000004"]
    # Nothing was computed from the last one.
    assert names(tmp_path) == ["step-00000008", "step-00000010"]


def test_an_evaluation_that_is_finite_shows_that_the_last_one_is_good(tmp_path):
    from blowups import line

    with build(tmp_path, lr=0.1, every=4, steps=10, validation=line()) as trainer:
        trainer.train()
    assert names(tmp_path) == ["step-00000010"]


def test_a_run_that_skips_every_step_after_it_blew_up_keeps_what_was_good(tmp_path):
    with build(tmp_path, lr=RATE, nonfinite="skip") as trainer:
        taken = [info.step for info in trainer.training_steps() if not info.skipped]
    assert len(taken) < 40
    assert f"step-{taken[-1] - 1:08d}" in names(tmp_path) and len(names(tmp_path)) == 2


RECIPE = """
plan = "{plan}"
[model]
name = "mlp"
hidden = 8
[data]
source = "synthetic"
kind = "regression"
samples = 64
features = [4]
[train]
steps = 30
global_batch = 8
threads = 1
[optim]
name = "sgd"
lr = 20
[checkpoint]
every = 1
keep = 1
[telemetry]
tensorboard = false
"""


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("dp=2 zero=2", marks=pytest.mark.soak),
        "pp=2 schedule=pipedream-2bw microbatches=2",
        pytest.param("pp=2 schedule=1f1b microbatches=2", marks=pytest.mark.soak),
        pytest.param("dp=2", marks=pytest.mark.soak),
        pytest.param("ps=1 workers=1", marks=pytest.mark.soak),
    ],
)
def test_the_command_goes_on_with_a_lower_rate_under_every_plan(shoal, plan):
    (shoal.folder / "wild.toml").write_text(RECIPE.format(plan=plan))
    failed = shoal.run("train", "wild.toml", "--run-dir", "run", expect=1)
    assert "last good checkpoint: " in failed.stderr and "set aside" in failed.stderr, failed.stderr
    clip = () if "ps" in plan else ("--set", "optim.clip=1.0")
    options = ("--set", "optim.lr=1e-4", *clip, "--resume")
    done = shoal.run("train", "wild.toml", "--run-dir", "run", *options)
    assert "going on from step" in done.stderr and "optim.lr" in done.stderr, done.stderr
    assert read_summary(shoal.folder / "run")["steps"] == 30
    refused = shoal.run("train", "wild.toml", "--run-dir", "run", "--resume", expect=2)
    assert "optim.lr is 0.0001 there and 20.0 here" in refused.stderr
