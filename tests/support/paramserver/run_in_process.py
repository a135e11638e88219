"""A whole run with parameter servers inside one process: the same roles, over the same sockets, without the seconds that
starting six interpreters takes. Nobody can be killed here; that is what ``tests/chaos`` and ``tests/multiproc`` are for.

A model of this run must not draw random numbers while it trains: the roles share torch's generator.
"""

import asyncio
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from shoal.comm.wire.node import new_instance_id
from shoal.core.config import apply_overrides, validate
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.engine.resolve import choose_plan
from shoal.engine.state import hash_weights
from shoal.serverrun.center import lead
from shoal.serverrun.process import ProcessSpec
from shoal.serverrun.server import source as serving
from shoal.serverrun.server.finalize import read_steps
from shoal.serverrun.server.process import serve
from shoal.serverrun.worker import process as working
from shoal.serverrun.worker.process import work
from shoal.trainer.build import build_parts, load_run
from shoal.trainer.config import Recipe, dump_recipe
from shoal.trainer.loop import Trainer

DIGITS = {
    "model": {"name": "mlp", "hidden": 24},
    "data": {"source": "digits"},
    "train": {"steps": 6, "global_batch": 16, "threads": 1, "seed": 3},
    "optim": {"name": "sgd", "lr": 0.1},
    "checkpoint": {"every": 0},
    "telemetry": {"tensorboard": False},
    "paramserver": {"centers": 1},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left behind."""

    run_dir: Path
    weights: dict[str, torch.Tensor]
    sha256: str
    steps: list[dict]


def recipe_of(*overrides, base=DIGITS):
    return validate(Recipe, apply_overrides(base, overrides), origin="test")


@contextmanager
def _one_builds_at_a_time():
    lock = threading.Lock()

    def build(recipe):
        with lock:
            return build_parts(recipe)

    with ExitStack() as stack:
        for module in (serving, working):
            stack.enter_context(patch.object(module, "build_parts", build))
        yield


def run_alone(recipe, plan="dp=1"):
    """The hash of the weights that one process makes of a recipe."""
    model, loss, data = build_parts(recipe)
    parts = {"train": recipe.train, "optim": recipe.optim, "plan": Plan.parse(plan)}
    with Trainer(model, data, loss=loss, environment={}, **parts) as trainer:
        trainer.train()
        return hash_weights(trainer.model)


def place_in(folder, role, index, plan, recipe, *, sockets=None, resume=False):
    """The place of one role in a run."""
    rank = {"server": 0, "worker": plan.ps, "center": plan.ps + plan.workers}[role] + index
    return ProcessSpec(
        name=f"{role}-{index}",
        rank=rank,
        num_ranks=plan.ps + plan.workers + recipe.paramserver.centers,
        instance_id=new_instance_id(),
        folder=Path(sockets or folder),
        run_dir=Path(folder) / "run",
        resume=resume,
        recipe=recipe,
        plan=plan,
    )


async def _run(place_of, plan, num_centers):
    centers = [asyncio.ensure_future(lead(place_of("center", index))) for index in range(num_centers)]
    members = [asyncio.ensure_future(serve(place_of("server", index))) for index in range(plan.ps)]
    members += [
        asyncio.ensure_future(asyncio.to_thread(work, place_of("worker", index))) for index in range(plan.workers)
    ]
    try:
        await asyncio.wait_for(asyncio.gather(*members), 60)
    finally:
        for task in [*centers, *members]:
            task.cancel()
        await asyncio.gather(*centers, return_exceptions=True)


def run_inside(folder, plan, recipe, *, resume=False):
    """Run to the end, and read what was written."""
    run_dir = Path(folder) / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    parsed = choose_plan(plan, plan_text=None, num_processes=None)
    recipe = recipe.model_copy(update={"plan": str(parsed)})
    RunDir(run_dir).recipe.write_text(dump_recipe(recipe))

    # Not below the test's own folder: the path of a socket may have 107 bytes.
    with TemporaryDirectory(prefix="job-") as sockets, _one_builds_at_a_time():

        def place_of(role, index):
            return place_in(folder, role, index, parsed, recipe, sockets=sockets, resume=resume)

        asyncio.run(_run(place_of, parsed, recipe.paramserver.centers))
    run = load_run(run_dir)
    return Outcome(
        run_dir=run_dir,
        weights={name: tensor.detach().clone() for name, tensor in run.model.named_parameters()},
        sha256=hash_weights(run.model),
        steps=read_steps(run_dir),
    )
