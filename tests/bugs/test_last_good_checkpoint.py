"""The "last good checkpoint" of a run that had blown up was the bad one, and the only one.

With ``checkpoint.keep=1 checkpoint.every=1`` the state after the update that ruined the weights was saved, the one before it
expired, and the next step's loss was not finite. The message named the ruined state as the last good checkpoint, and every
``--resume`` loaded it and failed at once. A checkpoint is good once a step was taken from it, and the newest good one stays.
"""

import math
import shutil

import pytest

from shoal.core.errors import RequestError, RunError
from support.processes.command import read_summary
from support.training.diverging_runs import build, line, names

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
    with build(tmp_path, lr=0.1, every=4, steps=10, validation=line()) as trainer:
        trainer.train()
    assert names(tmp_path) == ["step-00000010"]


def test_a_run_that_skips_every_step_after_it_blew_up_keeps_what_was_good(tmp_path):
    with build(tmp_path, lr=RATE, nonfinite="skip") as trainer:
        taken = [info.step for info in trainer.training_steps() if not info.skipped]
    assert len(taken) < 40
    assert f"step-{taken[-1] - 1:08d}" in names(tmp_path) and len(names(tmp_path)) == 2


def ruin(run_dir, **options):
    """Go on with a model that returns nothing but NaN; the message."""
    with build(run_dir, lr=0.1, resume=True, **options) as trainer:
        trainer.model.register_forward_hook(lambda module, given, outputs: outputs * math.nan)
        with pytest.raises(RunError, match="not finite") as caught:
            trainer.train()
    return str(caught.value)


@pytest.mark.parametrize(("every", "keep"), [(2, 3), (1, 1)])
def test_failing_again_and_again_takes_no_good_checkpoint_away(tmp_path, every, keep):
    """Each failed resume set one more aside and deleted what the one before had set aside, until there was none."""
    with build(tmp_path, lr=0.1, every=every, keep=keep, steps=6) as trainer:
        trainer.train()
    good = f"step-{6 - every:08d}"
    for _ in range(3):
        # What the message names is there, and is what a resume takes.
        assert f"last good checkpoint: {tmp_path / 'checkpoints' / good}" in ruin(
            tmp_path, every=every, keep=keep, steps=12
        )
        assert names(tmp_path)[-1] == good
        assert [name[:20] for name in names(tmp_path) if name.startswith(".")] == [".aside-step-00000006"]
    with build(tmp_path, lr=0.1, every=every, keep=keep, steps=12, resume=True) as trainer:
        assert next(iter(trainer.training_steps())).step == 7 - every


def test_where_none_is_known_to_be_good_the_only_one_stays(tmp_path):
    with build(tmp_path, lr=0.1, every=6, steps=6) as trainer:
        trainer.train()
    for _ in range(2):
        assert "none is known (no step was taken from" in ruin(tmp_path, every=6, steps=12)
        assert names(tmp_path) == ["step-00000006"]
    # A step that a resumed run took from it is known to the next one, although nothing was saved since.
    with build(tmp_path, lr=0.1, every=6, steps=12, resume=True) as trainer:
        next(iter(trainer.training_steps()))
    assert f"last good checkpoint: {tmp_path / 'checkpoints' / 'step-00000006'}" in ruin(tmp_path, every=6, steps=12)


def test_the_forecast_of_the_disk_counts_the_good_one_and_the_one_being_written(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("shoal.trainer.persist.warn_if_short", lambda path, num_bytes: asked.append(num_bytes))
    for keep in (1, 2):
        with build(tmp_path / str(keep), lr=0.1, keep=keep, steps=1) as trainer:
            trainer.train()
    assert asked[0] / 3 == asked[1] / 4 > 0


def test_a_resume_that_finds_only_what_was_set_aside_says_so(tmp_path):
    with build(tmp_path, lr=0.1, every=3, steps=6) as trainer:
        trainer.train()
    ruin(tmp_path, every=3, steps=12)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    with pytest.raises(RequestError, match=r"\.aside-step-00000006-.*rename it"):
        build(tmp_path, lr=0.1, every=3, steps=12, resume=True)


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
    failed = shoal.run("train", "wild.toml", "--run-dir", "run", "--max-restarts", "2", expect=1)
    # The same steps lead to the same end.
    assert "starting all ranks again" not in failed.stderr
    assert "last good checkpoint: " in failed.stderr and "was set aside" in failed.stderr, failed.stderr
    clip = () if "ps" in plan else ("--set", "optim.clip=1.0")
    options = ("--set", "optim.lr=1e-4", *clip, "--resume")
    done = shoal.run("train", "wild.toml", "--run-dir", "run", *options)
    assert "going on from step" in done.stderr and "optim.lr" in done.stderr, done.stderr
    assert read_summary(shoal.folder / "run")["steps"] == 30
    refused = shoal.run("train", "wild.toml", "--run-dir", "run", "--resume", expect=2)
    assert "optim.lr is 0.0001 there and 20.0 here" in refused.stderr
