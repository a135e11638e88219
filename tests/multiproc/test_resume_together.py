"""On resume one checkpoint is chosen for all: a rank that cannot read it, or finds another one, fails the start on every rank."""

import tomllib
from pathlib import Path

import pytest

import shoal.trainer.persist as persist
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from support.processes.command import TINY


def build(world, folder, steps, resume, plan=None, seed=1):
    tables = tomllib.loads(TINY)
    tables["train"]["seed"] = seed
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
        plan=plan or Plan(dp=world.size),
        run_dir=Path(folder),
        resume=resume,
        world=world,
    )


def train_then_resume_with_a_bad_disk(world, folder):
    first = build(world, folder, 4, resume=False)
    first.train()
    first.persistence.close()
    honest = persist.read_local

    def fail_on_rank_1(path, placements, **options):
        if world.rank == 1:
            raise OSError(5, "Input/output error", str(path))
        return honest(path, placements, **options)

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


def resume_while_it_is_swapped(world, folder, line):
    """The chosen checkpoint is replaced by that of another run, of the same model and step, before the second rank reads."""
    plan = Plan.parse(line)
    for name, seed in (("run", 1), ("other", 2)):
        trainer = build(world, f"{folder}/{name}", 4, resume=False, plan=plan, seed=seed)
        trainer.train()
        trainer.persistence.close()
        trainer.mesh.close()
    mine, other = (Path(folder) / name / "checkpoints" / "step-00000004" for name in ("run", "other"))
    honest = persist.Persistence._load

    def swap_first(self, path, *arguments):
        # The first rank is done when the second begins: whichever reads the other one must notice.
        loaded = honest(self, path, *arguments) if world.is_first else None
        world.barrier()
        if world.is_first:
            mine.rename(Path(folder) / "gone")
            other.rename(mine)
        world.barrier()
        return loaded or honest(self, path, *arguments)

    persist.Persistence._load = swap_first
    try:
        with pytest.raises(RunError) as refusal:
            build(world, f"{folder}/run", 6, resume=True, plan=plan)
    finally:
        persist.Persistence._load = honest
    return str(refusal.value)


@pytest.mark.parametrize("line", ["pp=2 schedule=1f1b microbatches=2", "dp=2 zero=3"])
def test_a_checkpoint_that_is_swapped_while_ranks_read_it_is_refused_by_all(tmp_path, line):
    first, second = run_on_ranks(resume_while_it_is_swapped, 2, str(tmp_path), line)
    assert "1 other rank(s) cannot go on" in first
    assert "rank 1 cannot go on" in second and "not the one that all ranks agreed on" in second, second
