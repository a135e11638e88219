"""What goes wrong on one stage of a pipeline ends the run with its name, and what a run leaves can be read by every command."""

import json
import os
import signal
import time

import pytest

from support.processes.command import ranks_of, read_events, read_summary, wait_for_step

PLAN = "pp=2 microbatches=4"
OWN = """
import os, torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))

class Poisoned(Block):
    # A weight goes bad in the third step and stays so, or a pass does for that step alone.
    kind, steps, seen = os.environ["POISON"], 0, None

    def forward(self, x):
        if torch.is_grad_enabled() and self.training and os.environ.get("RANK") == "1":
            # Weights move at every step, so a sum that was not seen before is a new step.
            key = float(self.second.weight.detach().double().sum())
            if key != Poisoned.seen:
                Poisoned.seen, Poisoned.steps = key, Poisoned.steps + 1
            if Poisoned.steps == 3 and self.kind == "weight":
                with torch.no_grad():
                    self.first.weight[0, 0] = float("nan")
            if Poisoned.steps == 3 and self.kind == "pass":
                return super().forward(x) * float("nan")
        return super().forward(x)

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), Block(), Block(), Poisoned(), torch.nn.Linear(8, 2))
"""
RECIPE = (
    '[model]\nbuild = "mine:build"\n[data]\nsource = "synthetic"\nkind = "classes"\nsamples = 64\nfeatures = [8]\nclasses = 2\n'
    "[train]\nsteps = 6\nglobal_batch = 8\n[pipeline]\nstages = ['2']\n[telemetry]\ntensorboard = false\n"
)


def write_own(shoal):
    (shoal.folder / "mine.py").write_text(OWN)
    (shoal.folder / "own.toml").write_text(RECIPE)


@pytest.mark.parametrize(
    ("schedule", "pause"),
    [
        ("1f1b", 0.0),
        pytest.param("pipedream", 0.0, marks=pytest.mark.soak),
        *(pytest.param("zbv", pause, marks=pytest.mark.soak) for pause in (0.003, 0.011, 0.029)),
    ],
)
def test_a_stage_that_dies_in_a_step_is_named_and_nothing_hangs(shoal, tiny, schedule, pause):
    plan = f"{PLAN} schedule={schedule}"
    process = shoal.start("train", tiny, "--plan", plan, "--run-dir", "run", "--set", "train.steps=100000")
    wait_for_step(shoal.folder / "run", 2)
    time.sleep(pause)
    os.kill(ranks_of(process)[1].pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    story = stderr[stderr.index("error:") :]
    assert "rank 1 failed" in story and "SIGKILL" in story and "rank 0 failed" not in story, stderr


def test_a_weight_of_a_later_stage_that_is_not_finite_is_traced_to_it(shoal):
    write_own(shoal)
    ended = shoal.run(
        "train", "own.toml", "--plan", PLAN, "--run-dir", "run", expect=1, environment={"POISON": "weight"}
    )
    assert "step 3: weight 3.first.weight is not finite on rank 1" in ended.stderr, ended.stderr
    assert read_summary(shoal.folder / "run")["status"] == "failed"


@pytest.mark.soak
def test_a_step_that_is_not_finite_on_one_stage_is_skipped_by_all(shoal):
    write_own(shoal)
    options = ("--run-dir", "run", "--set", "train.nonfinite=skip")
    shoal.run("train", "own.toml", "--plan", PLAN, *options, environment={"POISON": "pass"})
    found = read_events(shoal.folder / "run", 0, "non_finite")
    # The skipped step leaves weights as they are, so nothing moves any more and every later step is as bad.
    assert [(event["step"], event["culprit_rank"], event["what"]) for event in found] == [
        (step, 1, "loss") for step in range(3, 7)
    ]
    skipped = [[e["step"] for e in read_events(shoal.folder / "run", rank, "step") if e["skipped"]] for rank in (0, 1)]
    assert skipped == [[3, 4, 5, 6]] * 2 and read_summary(shoal.folder / "run")["steps"] == 6


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["pipedream", "zbv"])
def test_every_command_reads_what_a_pipeline_leaves(shoal, tiny, schedule):
    plan = f"{PLAN} schedule={schedule}"
    shoal.run("train", tiny, "--plan", plan, "--run-dir", "run", "--set", "train.steps=4")
    summary = read_summary(shoal.folder / "run")
    assert summary["status"] == "completed" and summary["world_size"] == 2
    shoal.run("eval", "run", "--samples", "16", "--json", "eval.json")
    found = json.loads((shoal.folder / "eval.json").read_text())
    assert found["loss"] == pytest.approx(summary["validation_loss"], rel=1e-6)
    assert shoal.run("sample", "run", "--tokens", "5").stdout
    checkpoint = "run/checkpoints/step-00000004"
    shown = shoal.run("ckpt", "show", checkpoint).stdout
    assert "weights/blocks.0.attention.query.weight" in shown and "weights/head.weight" in shown
    assert ("versions/1/" in shown) == (schedule == "pipedream")
    shoal.run("ckpt", "verify", checkpoint)
    shoal.run("ckpt", "export", "run", "--to", "out")
    assert (shoal.folder / "out").is_dir()
