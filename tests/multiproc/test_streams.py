"""A run on an iterable dataset that ended within an epoch goes on exactly where it was, on any number of replicas."""

import os

import pytest

from support.processes.command import ROOT, read_summary

RECIPE = """
[model]
name = "gpt"
layers = 1
hidden = 16
heads = 2
dropout = 0.1
[data]
build = "support.training.streams:{build}"
[train]
steps = 8
global_batch = 4
micro_batch = 1
threads = 1
[optim]
name = "adamw"
lr = 1e-2
[checkpoint]
every = 4
[telemetry]
tensorboard = false
"""
PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


@pytest.mark.soak
def test_a_resumed_stream_repeats_and_loses_nothing(shoal):
    """The stream has 22 samples: steps of 4 end their epoch in the sixth step, and four steps are the middle of it."""
    for build in ("counted", "stateless"):
        (shoal.folder / f"{build}.toml").write_text(RECIPE.format(build=build))

    def train(build, run, plan, *more):
        return shoal.run("train", f"{build}.toml", "--plan", plan, "--run-dir", run, *more, environment=PATH)

    train("counted", "whole", "dp=2")
    train("counted", "cut", "dp=2", "--set", "train.steps=4")
    train("counted", "cut", "dp=2", "--resume")
    train("stateless", "again", "dp=2", "--set", "train.steps=4")
    said = train("stateless", "again", "dp=2", "--resume")
    train("counted", "other", "dp=2", "--set", "train.steps=4")
    train("counted", "other", "dp=1", "--resume")
    whole, cut, again, other = (read_summary(shoal.folder / run) for run in ("whole", "cut", "again", "other"))
    assert cut["weights_sha256"] == whole["weights_sha256"]
    assert again["weights_sha256"] == whole["weights_sha256"], "the same samples, found by reading them again"
    assert "has no state_dict" in said.stderr + said.stdout
    # One process adds up the same samples in another order.
    assert abs(other["final_loss"] - whole["final_loss"]) <= 1e-5 * whole["final_loss"]
    refused = shoal.run(
        "train", "counted.toml", "--plan", "ps=1 workers=2", "--run-dir", "x", expect=2, environment=PATH
    )
    assert "the training data is an iterable dataset; use a plan with dp" in refused.stderr
