"""Batches of any form under plans: Hugging Face models with their labels, a DLRM, several targets, the user's own step."""

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.engine.hooks import Hook
from shoal.engine.meancheck import find_other_mean
from shoal.engine.objective import StepFunction, refuse_step
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject
from support.models.formed import metrics_step
from support.processes.command import ROOT

HERE = "support.models.formed"
LLAMA = {"build": f"{HERE}:build_llama"}, {"build": f"{HERE}:causal_texts", "collate": f"{HERE}:pad"}
T5 = {"build": f"{HERE}:build_t5"}, {"build": f"{HERE}:seq2seq_texts"}
WHISPER = {"build": f"{HERE}:build_whisper"}, {"build": f"{HERE}:sounds"}
DLRM = {"build": f"{HERE}:build_dlrm", "loss": f"{HERE}:click_loss"}, {"build": f"{HERE}:clicks"}
TASKS = {"build": f"{HERE}:build_two_tasks", "loss": f"{HERE}:both_losses"}, {"build": f"{HERE}:two_tasks"}
FEW = (
    (LLAMA, "dp=2 microbatches=2", "float32"),
    (LLAMA, "pp=2 microbatches=2", "float32"),
    (T5, "dp=2 zero=3", "float32"),
    (DLRM, "dp=2", "float32"),
    (TASKS, "tp=2", "float64"),
    (TASKS, "pp=2 microbatches=2", "float32"),
)
MANY = (
    *((model, plan, "float32") for model in (LLAMA, T5, WHISPER, DLRM, TASKS) for plan in ("dp=2", "dp=2 zero=3")),
    *((model, "tp=2", "float64") for model in (LLAMA, T5, WHISPER, TASKS)),
    *((model, "pp=2 microbatches=2", "float32") for model in (LLAMA, T5, WHISPER, DLRM)),
)


def _recipe(model, data, **train):
    sizes = {"steps": 4, "global_batch": 8, "threads": 1, **train}
    return Recipe.model_validate({"model": model, "data": data, "train": sizes, "optim": {"name": "adamw"}})


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(600)])], ids=len
)
def test_batches_of_any_form_equal_one_process(cases, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    wrong = []
    with Prover(steps=3) as prover:
        for (model, data), plan, precision in cases:
            subject = build_subject(_recipe(model, data, precision=precision))
            result = prover.prove(subject, Plan.parse(plan), precision)
            if not result.ok:
                wrong.append(f"{model['build']} under {plan}: {result.first_difference}")
    assert not wrong, "\n".join(wrong)


class Kept(Hook):
    """Keeps what every step found."""

    def __init__(self):
        self.found = []

    def on_update(self, step, result):
        self.found.append((result.loss, dict(result.metrics)))


def _train_step(world, plan, chosen):
    """Five steps of which the third is short, so that replicas have unequal parts, by the user's own step."""
    recipe = _recipe(*TASKS, steps=5, global_batch=12)
    model, _, data = build_parts(recipe)
    how = {"world": world} if world is not None else {"environment": {}}
    step, kept = StepFunction(chosen), Kept()
    trainer = Trainer(
        model, data, loss=step, train=recipe.train, optim=recipe.optim, plan=Plan.parse(plan), hooks=[kept], **how
    )
    try:
        trainer.train()
        return kept.found, trainer.evaluate("validation").loss, trainer.hash_weights()
    finally:  # Not the world: the next plan runs in it.
        for part in (trainer.persistence, trainer.reporter, trainer.engine):
            part.close()


def _train_steps(world, plans):
    return [_train_step(world, plan, metrics_step) for plan in plans]


def test_the_users_own_step_and_its_metrics_equal_one_process():
    plans = ["dp=2", "dp=2 zero=3", "tp=2"]
    alone = _train_step(None, "dp=1 microbatches=2", metrics_step)
    whole = _train_step(None, "dp=1", metrics_step)
    for rank in run_on_ranks(_train_steps, 2, plans, deadline_seconds=90.0):
        (first, first_eval, first_hash), (second, _, second_hash), (third, third_eval, _) = rank
        assert first_hash == second_hash == alone[2] and first_eval == pytest.approx(alone[1], rel=1e-6)
        for (loss, metrics), (_, again), (_, split), (wanted, theirs), (_, together) in zip(
            first, second, third, alone[0], whole[0], strict=True
        ):
            assert loss == pytest.approx(wanted, rel=1e-6) and metrics == again == theirs
            # Of unequal parts a mean without weights would be another number.
            assert metrics == pytest.approx(together, rel=1e-5) and split == pytest.approx(together, rel=1e-5)
        assert third_eval == pytest.approx(whole[1], rel=1e-5)


def test_plans_that_cannot_follow_a_step_of_the_users_own_are_refused_with_one_that_can():
    for plan, nearest in (("pp=2", "dp=2"), ("dp=2 cp=2", "dp=4")):
        with pytest.raises(RequestError, match=rf"loss=function\(output, batch\) instead, or use the plan '{nearest}'"):
            refuse_step(Plan.parse(plan))


def test_a_batch_weighs_the_labels_that_its_loss_counts():
    """A causal model compares nothing with the first label, an encoder-decoder compares all; lengths differ."""
    pytest.importorskip("transformers")
    for (model, data), counts in ((LLAMA, False), (T5, True)):
        recipe = _recipe(model, data)
        built, loss, splits = build_parts(recipe)
        plan = Plan.parse("dp=2 microbatches=2")
        collator = splits.train.collator
        assert collator.first_label_counts is counts
        assert find_other_mean(built, loss, splits.train, plan=plan, train=recipe.train) is None
        collator.first_label_counts = not counts
        found = find_other_mean(built, loss, splits.train, plan=plan, train=recipe.train)
        assert found is not None and "not the mean over its items" in found
