"""On resume one checkpoint is chosen for all: a rank that cannot read it fails the start on every rank."""

import tomllib
from pathlib import Path

import pytest

import shoal.trainer.persist as persist
from harness import TINY
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer


def build(world, folder, steps, resume):
    tables = tomllib.loads(TINY)
    tables["train"]["steps"] = steps
    tables["data"]["limit_bytes"] = 60_000
    recipe = Recipe.model_validate(tables)
    model, loss, data = build_parts(recipe)
    return Trainer(
        model,
        data,
        loss=loss,
        train=recipe.train,
        checkpoint=recipe.checkpoint,
        telemetry=recipe.telemetry,
        plan=Plan(dp=world.size),
        run_dir=Path(folder),
        resume=resume,
        world=world,
    )


def train_then_resume_with_a_bad_disk(world, folder):
    first = build(world, folder, 4, resume=False)
    first.train()
    first.persistence.close()
    honest = persist.read_local

    def fail_on_rank_1(path, placements):
        if world.rank == 1:
            raise OSError(5, "Input/output error", str(path))
        return honest(path, placements)

    persist.read_local = fail_on_rank_1
    with pytest.raises(RunError) as refusal:
        build(world, folder, 6, resume=True)
    persist.read_local = honest
    again = build(world, folder, 6, resume=True)
    start = again.progress.step
    again.train()
    again.persistence.close()
    return [str(refusal.value), start]


def test_a_rank_that_cannot_read_the_checkpoint_stops_all(tmp_path):
    (first, first_step), (second, second_step) = run_on_ranks(
        train_then_resume_with_a_bad_disk, 2, str(tmp_path / "run")
    )
    assert (
        "1 other rank(s) cannot go on" in first and "rank 1 cannot go on" in second and "Input/output error" in second
    )
    assert first_step == second_step == 4
