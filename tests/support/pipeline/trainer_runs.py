"""Runs of the real trainer under pipelines: ranks are started once for many runs, one process is the test's own."""

from pathlib import Path

import torch

from shoal.core.plan import Plan
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

RECIPES = {
    "gpt": {
        "model": {"name": "gpt", "layers": 4, "hidden": 16, "heads": 2, "dropout": 0.1},
        # 110 samples to train on, an odd vocabulary, and a split to evaluate whose last batch is short.
        "data": {"source": "synthetic", "kind": "tokens", "samples": 122, "sequence": 8, "vocab": 33},
        "train": {"steps": 4, "global_batch": 8, "seed": 3},
        "optim": {"name": "adamw", "lr": 1e-2, "clip": 0.5},
    },
    "cnn": {
        "model": {"name": "cnn", "dropout": 0.1},
        "data": {"source": "synthetic", "kind": "classes", "samples": 122, "features": [8, 8], "classes": 4},
        "train": {"steps": 4, "global_batch": 8, "seed": 3},
        "optim": {"name": "adamw", "lr": 1e-2, "clip": 0.5},
    },
}


def recipe_of(kind: str, settings: dict) -> Recipe:
    sections = {name: dict(section) for name, section in RECIPES[kind].items()}
    for name, section in settings.items():
        sections[name] = {**sections.get(name, {}), **section}
    if settings.get("train", {}).keys() & {"epochs", "tokens"}:
        del sections["train"]["steps"]
    return Recipe.model_validate(sections)


def train(world, job: dict) -> dict:
    """One run to its end, and what it came to; ``job`` has kind, plan, settings, run_dir and resume."""
    recipe = recipe_of(job["kind"], job.get("settings", {}))
    model, loss, data = build_parts(recipe)
    trainer = Trainer(
        model,
        data,
        loss=loss,
        train=recipe.train,
        optim=recipe.optim,
        evaluation=recipe.eval,
        checkpoint=recipe.checkpoint,
        pipeline=recipe.pipeline,
        plan=Plan.parse(job["plan"]),
        run_dir=Path(job["run_dir"]) if "run_dir" in job else None,
        resume=job.get("resume", False),
        world=world,
        environment={},
    )
    try:
        result = _train(trainer, job)
        trainer.persistence.close()
    finally:
        trainer.reporter.close()  # Before the groups, which a rank that failed may not wait for.
    trainer.mesh.close()
    return result


def _train(trainer: Trainer, job: dict) -> dict:
    if "longest" in job:
        trainer.engine.asynchronous.longest = job["longest"]
    infos = list(trainer.training_steps())
    return {
        "sha": trainer.hash_weights(),
        "losses": [info.loss for info in infos],
        "norms": [info.grad_norm for info in infos],
        "skipped": [info.step for info in infos if info.skipped],
        "validation": trainer.progress.validation_loss,
        "step": trainer.progress.step,
        "stream": [trainer.progress.async_signature, trainer.progress.async_start],
    }


def train_on_ranks(world, jobs: dict) -> dict:
    """What ``run_on_ranks`` calls: the jobs one after another, by name."""
    return {name: train(world, job) for name, job in jobs.items()}


def train_alone(job: dict) -> dict:
    """In this process."""
    torch.set_num_threads(1)
    return train(None, job)
