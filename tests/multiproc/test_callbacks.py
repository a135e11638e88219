"""Callbacks and metrics on several ranks: each must find, decide and average what one process does, and survive a resume."""

import os
import signal

import pytest
import torch

from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.engine.callbacks.ema import EMA
from shoal.engine.callbacks.monitor import BestCheckpoint, EarlyStopping
from shoal.engine.hooks import Hook
from shoal.engine.metrics import GatheredMetric
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

RECIPE = {
    "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 8, "vocab": 17},
    "train": {"steps": 12, "global_batch": 8},
    "optim": {"lr": 0.05, "schedule": "constant"},
    # One sample at a time: the loss of a batch is a float32 mean, which another share of the samples would round otherwise.
    "eval": {"every": 1, "batch": 1, "metrics": ["accuracy", "top3", "perplexity", "f1"]},
    "checkpoint": {"every": 4, "keep": 1},
}
PLANS = [
    pytest.param("dp=2 microbatches=1", marks=pytest.mark.soak),
    "dp=2 zero=3 microbatches=1",
    "pp=2 microbatches=2",
]


class Numbers(Hook):
    """Writes down what evaluations found."""

    def __init__(self):
        self.found = []

    def on_evaluation(self, step, found):
        self.found.append([step, found.loss, dict(found.metrics)])


def mean_of_logits(outputs, targets):
    assert outputs.shape[:2] == targets.shape
    return float(outputs.double().sum() / targets.numel())


class Kill(Hook):
    """Ends this process where nobody expects it, once."""

    def __init__(self, step):
        self.step = step

    def on_step_start(self, step, batch):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(world, plan, folder, resume=False, kill_at=-1):
    recipe = Recipe.model_validate(RECIPE)
    model, loss, data = build_parts(recipe)
    ema, numbers = EMA(0.75, start=2), Numbers()
    stop, best = EarlyStopping("loss", patience=2), BestCheckpoint("accuracy", keep=2)
    with Trainer(
        model,
        data,
        loss=loss,
        train=recipe.train,
        optim=recipe.optim,
        evaluation=recipe.eval,
        checkpoint=recipe.checkpoint,
        plan=Plan.parse(plan),
        run_dir=folder,
        world=world,
        resume=resume,
        hooks=[ema, stop, best, numbers, Kill(kill_at)],
        # Under cp no rank has whole outputs, and one that needs them is refused.
        metrics=[GatheredMetric(mean_of_logits, name="mean_logit")] if "cp" not in plan else [],
    ) as trainer:
        trainer.train()
        before = trainer.hash_weights()
        with ema.applied():
            averaged = {name: tensor.clone() for name, tensor in trainer.engine.whole_weights()}
        assert trainer.hash_weights() == before, "the trained weights are back"
        again = dict(ema.whole_weights())
        assert all(torch.equal(averaged[name], again[name]) for name in averaged)
        return {
            "weights": before,
            "averaged": averaged,
            "numbers": numbers.found,
            "step": trainer.progress.step,
            "status": trainer.status,
            "stopped_by": trainer.stopped_by,
            "stop": dict(stop.state()),
            "best": dict(best.state()),
            "kept": sorted(path.name for path in (trainer.persistence.root).glob("step-*")),
        }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds, with the microbatches of two replicas."""
    (found,) = run_on_ranks(train, 1, "dp=1 microbatches=2", str(tmp_path_factory.mktemp("alone")))
    assert found["status"] == "completed" and found["stopped_by"] == "early_stop"
    assert found["step"] == 9, "it stops because the loss was not better twice, and not at the end"
    # The newest, the one before it from which a step was taken, and the two best however old.
    assert found["kept"] == ["step-00000003", "step-00000004", "step-00000008", "step-00000009"]
    return found


def assert_same(found, reference):
    for key in ("step", "status", "stopped_by", "kept", "weights", "stop", "best"):
        assert found[key] == reference[key], key
    assert found["numbers"] == reference["numbers"][-len(found["numbers"]) :]
    assert found["averaged"].keys() == reference["averaged"].keys()
    for name, tensor in reference["averaged"].items():
        assert torch.equal(found["averaged"][name], tensor), name


@pytest.mark.parametrize("plan", PLANS)
def test_every_rank_finds_decides_and_averages_what_one_process_does(tmp_path, plan, alone):
    for found in run_on_ranks(train, 2, plan, str(tmp_path)):
        assert_same(found, alone)


@pytest.mark.parametrize(
    "plan", ["tp=2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("tp=2 sp=true", "cp=2"))]
)
def test_ranks_that_split_sums_decide_alike_and_count_what_one_process_counts(tmp_path, alone, plan):
    first, second = run_on_ranks(train, 2, f"{plan} microbatches=2", str(tmp_path))
    assert_same(second, first)
    for key in ("step", "status", "stopped_by", "kept"):
        assert first[key] == alone[key], key
    for (step, loss, metrics), (_, expected, others) in zip(first["numbers"], alone["numbers"], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5), step
        assert metrics == pytest.approx({name: others[name] for name in metrics}, rel=1e-4, abs=1e-4), step
    for name, tensor in alone["averaged"].items():
        assert torch.allclose(first["averaged"][name], tensor, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("plan", ["dp=2 zero=1 microbatches=1", "pp=2 microbatches=2"])
def test_a_killed_run_goes_on_with_the_average_and_the_count_that_it_had(tmp_path, plan, alone):
    """The kill comes between checkpoints: the resumed run evaluates some steps again, and must count none of them twice."""
    with pytest.raises(RunError, match="code -9"):
        run_on_ranks(train, 2, plan, str(tmp_path), False, 7)
    for found in run_on_ranks(train, 2, plan, str(tmp_path), True):
        assert found["numbers"][0][0] > 3, "it went on from a checkpoint"
        assert_same(found, alone)
