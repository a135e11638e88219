"""Bugs of a resume under ``compress``, planted in the ranks: each ends in other weights than the run that was left alone."""

from pathlib import Path

import pytest

from shoal.checkpoint.config import CheckpointConfig
from shoal.compression.exchange import CompressedSum
from shoal.core.plan import Plan
from shoal.engine.compression import SavedSums
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

RECIPE = {
    "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2, "dropout": 0.1},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 48, "sequence": 8, "vocab": 97},
    "optim": {"name": "adamw", "lr": 1e-2},
    "compression": {"min_elements": 256},
}
# What is planted between the save and the end, by plan.
BUGS = {
    "dp=2 compress=int4": ("lose residual", "lose sum_residual", "swap replicas"),
    "dp=2 compress=topk:0.05@5": ("count from the resume",),
    "dp=2 zero=1 compress=int4": ("lose residual", "swap replicas"),
    "dp=2 compress=powersgd:2": ("lose right", "lose residual"),
    "dp=2 compress=dgc:0.05": ("lose momentum", "lose unsent"),
    "dp=2 compress=onebit@2": ("lose frozen_at", "lose residual"),
}
FEW = ("dp=2 compress=int4", "dp=2 compress=topk:0.05@5")


def lose(what):
    """A checkpoint is read without one kind of what compressed sums remember."""
    honest = SavedSums.to_load

    def broken(self, own, saved):
        return honest(self, own, {name for name in saved if not name.startswith(f"compression/{what}")})

    return SavedSums, "to_load", broken


def swap_replicas():
    """Every replica reads what the other one had not sent."""
    honest = SavedSums._tensors

    def broken(self):
        tensors, placements = honest(self)
        own, other = self.sums.channel.rank, 1 - self.sums.channel.rank
        renamed = {name: name.replace(f"/residual/{own}/", f"/residual/{other}/") for name in tensors}
        return {renamed[name]: one for name, one in tensors.items()}, {
            renamed[name]: one for name, one in placements.items()
        }

    return SavedSums, "_tensors", broken


def count_from_resume():
    """Steps before the first compressed one are counted by the process, which has just begun."""
    honest, first = CompressedSum.begin_step, []

    def broken(self, number):
        first.append(number)
        honest(self, number - first[0])

    return CompressedSum, "begin_step", broken


def plant(bug):
    if bug == "swap replicas":
        return swap_replicas()
    if bug == "count from the resume":
        return count_from_resume()
    return lose(bug.removeprefix("lose "))


def train_on_ranks(world, folder, plans):
    """By plan, the hash of the weights of a run that was left alone, of one that was resumed, and of each with a bug."""

    def train(plan, name, steps, resume=False):
        recipe = Recipe.model_validate({**RECIPE, "train": {"steps": steps, "global_batch": 8, "seed": 3}})
        model, loss, data = build_parts(recipe)
        trainer = Trainer(
            model,
            data,
            loss=loss,
            train=recipe.train,
            optim=recipe.optim,
            compression=recipe.compression,
            checkpoint=CheckpointConfig(every=4),
            plan=Plan.parse(plan),
            run_dir=Path(folder) / name,
            resume=resume,
            world=world,
        )
        trainer.train()
        digest = trainer.engine.hash_weights()
        trainer.persistence.close()
        trainer.reporter.close()
        trainer.mesh.close()
        return digest

    def resumed(plan, bug):
        name = f"{plan} {bug}"
        train(plan, name, 4)
        owner, attribute, broken = (object, "", None) if bug is None else plant(bug)
        honest = None if bug is None else vars(owner)[attribute]
        if bug is not None:
            setattr(owner, attribute, broken)
        try:
            return train(plan, name, 8, resume=True)
        finally:
            if bug is not None:
                setattr(owner, attribute, honest)

    found = {}
    for plan in plans:
        found[plan] = {"alone": train(plan, f"{plan} alone", 8), "resumed": resumed(plan, None)}
        found[plan] |= {bug: resumed(plan, bug) for bug in BUGS[plan]}
    return found


@pytest.mark.parametrize("plans", [FEW, pytest.param(tuple(BUGS)[1:], marks=pytest.mark.soak)], ids=["few", "all"])
def test_every_bug_of_a_resume_is_seen(tmp_path, plans):
    found = run_on_ranks(train_on_ranks, 2, str(tmp_path), list(plans), deadline_seconds=200.0)
    assert found[0] == found[1]
    for plan, digests in found[0].items():
        assert digests["resumed"] == digests["alone"], plan
        for bug in BUGS[plan]:
            assert digests[bug] != digests["alone"], (plan, bug)
