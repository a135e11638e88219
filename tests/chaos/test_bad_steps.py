"""A gradient with a NaN on one rank, and a loss that jumps: all ranks leave out that step, and go back when it does not help."""

import math

import pytest

from shoal.checkpoint.reader import read
from shoal.core.errors import RunError
from shoal.engine.config import TrainConfig
from shoal.engine.state import hash_weights
from shoal.trainer.progress import Recovery, after_step, loss_limit
from support.processes.command import read_events, read_summary
from support.training.diverging_runs import build, line, names

# On rank 1 a gradient is poisoned at step 6, and the outputs are multiplied by 100 at step 8.
MINE = """
import os, torch
from torch import nn


class Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bad):
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return (g * float("nan") if ctx.bad else g), None

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 2)
        self.step, self.seen = 0, None

    def forward(self, x):
        key = float(x.double().sum())
        if self.training and key != self.seen:  # the trace runs the same batch again
            self.step, self.seen = self.step + 1, key
        is_bad = self.training and os.environ["RANK"] == "1"
        hidden = Poison.apply(self.first(x), is_bad and self.step == 6)
        return self.second(hidden) * (100.0 if is_bad and self.step == 8 else 1.0)

def build():
    return Model()

def loss(outputs, targets):
    return (outputs ** 2).mean() + nn.functional.one_hot(targets, 2).sum() * 0.0
"""
RECIPE = """
plan = "dp=2"
[model]
build = "mine:build"
loss = "mine:loss"
[data]
source = "synthetic"
kind = "classes"
samples = 128
features = [8]
classes = 2
[train]
steps = 10
global_batch = 8
threads = 1
nonfinite = "skip"
spike = 20.0
[optim]
name = "sgd"
lr = 0.01
[checkpoint]
every = 1
keep = 20
[telemetry]
tensorboard = false
"""


def weights_after(run_dir, step):
    found = read(run_dir / "checkpoints" / f"step-{step:08d}", wanted=lambda name: name.startswith("weights/"))
    return {name: tensor.numpy().tobytes() for name, tensor in found.tensors.items()}


def test_all_ranks_leave_out_the_same_step_and_no_weight_moves(shoal):
    (shoal.folder / "mine.py").write_text(MINE)
    (shoal.folder / "own.toml").write_text(RECIPE)
    ended = shoal.run("train", "own.toml", "--run-dir", "run")
    run = shoal.folder / "run"
    for rank in (0, 1):
        assert [event["step"] for event in read_events(run, rank, "step") if event["skipped"]] == [6, 8]
    for bad in (6, 8):
        assert weights_after(run, bad) == weights_after(run, bad - 1) != weights_after(run, bad + 1)
    assert read_summary(run)["skipped_steps"] == 2 and "the step is skipped on all ranks" in ended.stderr
    (found,) = read_events(run, 1, "non_finite")
    assert (found["step"], found["culprit_rank"], found["what"]) == (6, 1, "first.bias")
    assert "first.bias is not finite on rank 1" in ended.stderr
    first, second = (read_events(run, rank, "loss_spiked")[0] for rank in (0, 1))
    assert first["loss"] == second["loss"] > first["limit"] == second["limit"]


def test_a_batch_that_is_far_off_teaches_nothing():
    """It ends in the weights of a run whose rate was 0 at that step, which is how the expected ones are found."""
    spoilt = {"data": line(spoilt=[9]), "lr": 0.1, "steps": 12}
    with build(spike=20.0, **spoilt) as careful:
        skipped = [info.step for info in careful.training_steps() if info.skipped]
    with build(**spoilt) as careless:
        careless.train()
    assert skipped == [9]
    expected = build(**{**spoilt, "data": line()})
    with expected:
        for info in expected.training_steps():
            if info.step == 8:
                kept = {name: value.clone() for name, value in expected.model.state_dict().items()}
            if info.step == 9:
                expected.model.load_state_dict(kept)
    assert hash_weights(careful.model) == hash_weights(expected.model) != hash_weights(careless.model)


# The rate rises until every step makes the loss larger; a quarter of it is low enough.
RISING = {"lr": 3.0, "warmup": 30, "steps": 60, "every": 5, "keep": 2}
BACK = {"spike": 20.0, "rollback_after": 3, "rollback_rate": 0.25}


def test_after_some_steps_in_a_row_the_run_goes_back_with_a_lower_rate(tmp_path):
    with build(tmp_path / "wild", **RISING) as wild, pytest.raises(RunError, match="not finite"):
        wild.train()
    with build(tmp_path / "back", **RISING, **BACK) as trainer:
        infos = list(trainer.training_steps())
    (back,) = read_events(tmp_path / "back", 0, "rolled_back")
    assert back["to_step"] % 5 == 0 and back["to_step"] < back["step"] - 3 and back["rate_factor"] == 0.25
    at = next(place for place, info in enumerate(infos) if info.step == back["step"])
    assert [info.skipped for info in infos[at - 2 : at + 1]] == [True] * 3
    assert infos[at + 1].step == back["to_step"] + 1
    again = next(info for info in infos[:at] if info.step == back["to_step"] + 1)
    assert infos[at + 1].lr == 0.25 * again.lr
    # The same weights, the same batch: only the rate is another one.
    assert infos[at + 1].loss == again.loss and infos[at + 1].grad_norm == again.grad_norm
    assert infos[-1].step == 60 and infos[-1].loss < 100 and trainer.progress.recovery.rollbacks == 1


def test_a_run_that_was_stopped_decides_as_one_that_was_not(tmp_path):
    with build(tmp_path / "whole", **RISING, **BACK) as whole:
        whole.train()
    (back,) = read_events(tmp_path / "whole", 0, "rolled_back")
    # Among the steps that are left out, and after the run has gone back.
    for number, stop_at in enumerate((back["step"] - 2, back["to_step"] + 2)):
        run_dir = tmp_path / f"stopped-{number}"
        with build(run_dir, **RISING, **BACK) as first:
            for info in first.training_steps():
                if info.step == stop_at and (number == 0 or first.progress.recovery.rollbacks):
                    first.request_stop("test")
        assert first.status == "interrupted"
        with build(run_dir, **RISING, **BACK, resume=True) as second:
            second.train()
        assert hash_weights(second.model) == hash_weights(whole.model)
        assert second.progress.recovery == whole.progress.recovery


def test_data_that_stays_bad_ends_the_run_after_some_rollbacks(tmp_path):
    data = line(spoilt=range(9, 20))
    with (
        build(tmp_path, lr=0.1, data=data, spike=20.0, rollback_after=2) as trainer,
        pytest.raises(RunError, match=r"2 steps in a row were left out, after 8 rollbacks .*step-00000007"),
    ):
        trainer.train()
    assert "step-00000007" in names(tmp_path)


def test_without_a_good_checkpoint_there_is_nothing_to_go_back_to(tmp_path):
    data = line(spoilt=range(1, 20), value=math.nan)
    with (
        build(tmp_path, lr=0.1, data=data, nonfinite="skip", rollback_after=2) as trainer,
        pytest.raises(RunError, match="no good checkpoint to go back to"),
    ):
        trainer.train()


def test_a_loss_that_is_not_above_zero_is_never_a_spike():
    config = TrainConfig(steps=1, spike=2.0)
    state = Recovery()
    for loss in (-5.0, -4.0, -6.0, -5.0):
        state = after_step(state, loss, config, is_taken=True)
    assert loss_limit(state, config) == math.inf


def test_settings_that_would_never_act_are_refused(shoal, tiny):
    with pytest.raises(ValueError, match="none ever is"):
        TrainConfig(steps=1, rollback_after=3)
    for options, words in (
        (("train.spike=10", "train.rollback_after=3", "checkpoint.every=0"), ["rollback_after 3", "checkpoint.every"]),
        (("train.spike=0.5",), ["train.spike", "greater than 1"]),
    ):
        changes = [word for option in options for word in ("--set", option)]
        refused = shoal.run("train", tiny, "--run-dir", "run", *changes, expect=2)
        assert all(word in refused.stderr for word in words), refused.stderr
    for plan, words in (
        ("pp=2 schedule=pipedream microbatches=2", ["train.spike 10", "1f1b"]),
        ("ps=1 workers=2", ["train.spike 10", "workers"]),
    ):
        refused = shoal.run("train", tiny, "--run-dir", "run", "--plan", plan, "--set", "train.spike=10", expect=2)
        assert all(word in refused.stderr for word in words), refused.stderr
