"""Resume is bitwise: a run that was killed at any moment and resumed ends in the weights of the run that was left alone.

Each kill comes after a checkpoint was committed and further steps were done, and each test asserts that the run went on from that
checkpoint: a run that begins again from nothing ends in the same weights, whatever a checkpoint forgets. The model draws from
torch's, Python's and numpy's generators, the optimizer has a state, and the checkpoint lies within an epoch.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import load_recipe
from shoal.trainer.loop import Trainer
from support.processes.command import ROOT, ranks_of, read_events, read_summary, wait_until

PLANS = ("dp=2", "dp=2 zero=3", "pp=2 microbatches=2")
STEPS, EVERY = 12, 4
RECIPE = """
[model]
build = "support.models.pausing:build"
args = {{ folder = "{folder}", passes = {passes} }}
[data]
source = "synthetic"
kind = "tokens"
samples = 64
vocab = 33
sequence = 8
[train]
steps = {steps}
global_batch = 8
threads = 1
[optim]
name = "adamw"
lr = 1e-2
clip = 0.5
schedule = "cosine"
[eval]
samples = 8
[checkpoint]
every = {every}
[telemetry]
tensorboard = false
"""
PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def write_recipe(folder, *, passes, steps=STEPS):
    folder.mkdir(exist_ok=True)
    path = folder / "held.toml"
    path.write_text(RECIPE.format(folder=folder, passes=passes, steps=steps, every=EVERY))
    return path


def train_alone(world, recipe_path, plans):
    """The hash of the weights under each plan, of runs without a checkpoint."""
    recipe = load_recipe(Path(recipe_path))
    found = {}
    for plan in plans:
        model, loss, data = build_parts(recipe)
        options = {"train": recipe.train, "optim": recipe.optim, "plan": Plan.parse(plan)}
        trainer = Trainer(model, data, loss=loss, world=world, environment={}, **options)
        trainer.train()
        found[plan] = trainer.hash_weights()
        trainer.reporter.close()
        trainer.mesh.close()
    return found


def alone(folder, plans, **options):
    path = write_recipe(folder, passes=0, **options)
    (folder / "go").touch()
    return run_on_ranks(train_alone, 2, str(path), list(plans), deadline_seconds=90.0, environment=PATH)[0]


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    return alone(tmp_path_factory.mktemp("alone"), PLANS)


def newest(checkpoints):
    """The name of the newest checkpoint that is committed: another has another name until it is."""
    return max((path.name for path in checkpoints.glob("step-*")), default="")


def check_went_on(run_dir, saved):
    """The newest start of the run was from the checkpoint of step ``saved``, and it did every step after it once."""
    for rank in (0, 1):
        events = read_events(run_dir, rank)
        start = max(index for index, event in enumerate(events) if event["kind"] == "run_started")
        assert events[start]["step"] == saved, "it did not go on from the newest checkpoint"
        done = [event["step"] for event in events[start:] if event["kind"] == "step"]
        assert done == list(range(saved + 1, read_summary(run_dir)["steps"] + 1))


@pytest.mark.parametrize("plan", PLANS)
def test_killed_and_resumed_equals_left_alone(shoal, left_alone, plan):
    """The first plan by a command of its own, ``--resume``; the others by a restart, which saves a start.

    A process makes so many passes that it stands still in the sixth or seventh step: after one checkpoint and before the next.
    """
    recipe = write_recipe(shoal.folder, passes=6 * Plan.parse(plan).degree(Axis.PIPELINE))
    command = ("train", recipe, "--plan", plan, "--run-dir", "run")
    by_command = plan == PLANS[0]
    process = shoal.start(*command, *(() if by_command else ("--max-restarts", "1")), environment=PATH)
    checkpoints = shoal.folder / "run" / "checkpoints"
    wait_until(
        lambda: newest(checkpoints) and list(shoal.folder.glob("held-*")), "a checkpoint, and steps after it", 60
    )
    saved = int(newest(checkpoints).removeprefix("step-"))
    assert saved == EVERY
    ranks = ranks_of(process)
    for victim in ranks.values() if by_command else [ranks[1]]:
        os.kill(victim.pid, signal.SIGKILL)
    (shoal.folder / "go").touch()
    _, stderr = process.communicate(timeout=60)
    if by_command:
        assert process.returncode == 1
        stderr = shoal.run(*command, "--resume", environment=PATH).stderr
    assert f"going on from step {saved}, " in stderr
    check_went_on(shoal.folder / "run", saved)
    assert read_summary(shoal.folder / "run")["weights_sha256"] == left_alone[plan]


@pytest.mark.soak
@pytest.mark.parametrize("plan", [*PLANS, "dp=2 zero=1", "dp=2 zero=2", "pp=2 microbatches=2 schedule=pipedream"])
def test_killed_again_and_again_at_any_moment(shoal, plan):
    """Each process may do twelve steps, so that none of the three reaches the end before its kill."""
    steps = 60
    expected = alone(shoal.folder / "alone", [plan], steps=steps)[plan]
    recipe = write_recipe(shoal.folder, passes=12 * Plan.parse(plan).degree(Axis.PIPELINE), steps=steps)
    command = ("train", recipe, "--plan", plan, "--run-dir", "run")
    dice, checkpoints = random.Random(plan), shoal.folder / "run" / "checkpoints"
    saved = ""
    for attempt in range(3):
        process = shoal.start(*command, *(("--resume",) if attempt else ()), environment=PATH)
        wait_until(lambda before=saved: newest(checkpoints) > before, "a further checkpoint", 60)
        # Not a wait for something to happen: the moment of the kill is meant to be arbitrary.
        time.sleep(dice.uniform(0.0, 0.1))
        for victim in ranks_of(process).values():
            os.kill(victim.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        saved = newest(checkpoints)
    (shoal.folder / "go").touch()
    shoal.run(*command, "--resume", environment=PATH)
    check_went_on(shoal.folder / "run", int(saved.removeprefix("step-")))
    assert read_summary(shoal.folder / "run")["weights_sha256"] == expected


def test_resume_under_another_number_of_processes_goes_on_with_the_next_sample(shoal, tiny):
    """First on one process, then on two: microbatches keep their size, so the weights keep their bits."""
    same = ("--set", "train.micro_batch=4")
    shoal.run("train", tiny, "--plan", "dp=1", "--run-dir", "one", *same)
    for plan, steps in (("dp=1", 3), ("dp=2", 8)):
        resume = () if steps == 3 else ("--resume",)
        shoal.run("train", tiny, "--plan", plan, "--run-dir", "moved", *same, "--set", f"train.steps={steps}", *resume)
    one, moved = read_summary(shoal.folder / "one"), read_summary(shoal.folder / "moved")
    assert moved["weights_sha256"] == one["weights_sha256"]
