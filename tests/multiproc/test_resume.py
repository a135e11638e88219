"""Resume is bitwise: a run that was killed at any moment and resumed ends in the weights of the run that was left alone."""

import os
import random
import signal
import time

import pytest

from harness import ranks_of, read_events, read_summary, wait_for_step

STEPS = (
    "--set",
    "train.steps=40",
    "--set",
    "checkpoint.every=7",
    "--set",
    "optim.schedule=cosine",
    "--set",
    "optim.clip=0.5",
)


@pytest.mark.parametrize(
    ("plan", "num_kills"),
    [("dp=2", 1), *(pytest.param(plan, 3, marks=pytest.mark.soak) for plan in ("dp=1", "dp=2"))],
)
def test_killed_and_resumed_equals_left_alone(shoal, tiny, plan, num_kills):
    shoal.run("train", tiny, "--plan", plan, "--run-dir", "alone", *STEPS)
    pace = random.Random(plan)
    kills = 0
    for attempt in range(num_kills):
        resume = ("--resume",) if attempt else ()
        process = shoal.start("train", tiny, "--plan", plan, "--run-dir", "killed", *STEPS, *resume)
        done = (
            max([event["step"] for event in read_events(shoal.folder / "killed", 0, "step")], default=0)
            if attempt
            else 0
        )
        wait_for_step(shoal.folder / "killed", done + 1)
        # Not a wait for something to happen: the moment of the kill is meant to be arbitrary.
        time.sleep(pace.uniform(0.0, 0.15))
        for victim in ranks_of(process).values():
            if victim.is_running():
                os.kill(victim.pid, signal.SIGKILL)
                kills += 1
        process.communicate(timeout=30)
    shoal.run("train", tiny, "--plan", plan, "--run-dir", "killed", *STEPS, "--resume")
    alone, killed = read_summary(shoal.folder / "alone"), read_summary(shoal.folder / "killed")
    assert kills > 0
    assert killed["weights_sha256"] == alone["weights_sha256"]
    assert killed["first_loss"] == alone["first_loss"] and killed["steps"] == 40


def test_resume_under_another_number_of_processes_goes_on_with_the_next_sample(shoal, tiny):
    """First on one process, then on two: microbatches keep their size, so the weights keep their bits."""
    same = ("--set", "train.micro_batch=4")
    shoal.run("train", tiny, "--plan", "dp=1", "--run-dir", "one", *same)
    for plan, steps in (("dp=1", 3), ("dp=2", 8)):
        resume = () if steps == 3 else ("--resume",)
        shoal.run("train", tiny, "--plan", plan, "--run-dir", "moved", *same, "--set", f"train.steps={steps}", *resume)
    one, moved = read_summary(shoal.folder / "one"), read_summary(shoal.folder / "moved")
    assert moved["weights_sha256"] == one["weights_sha256"]
