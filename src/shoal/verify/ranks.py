"""One rank of a proof: the real trainer under the plan, with what it computes put down after every step.

Each job joins a group of its own over a file store and leaves it again, so one process serves many plans; nothing of the trainer is
replaced, except by a mutant, and then only for that job.
"""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import FileStore  # torch types this name only there

from shoal.comm.ledger import Account
from shoal.comm.mesh import GRID
from shoal.comm.shared import SharedTransport
from shoal.comm.world import join_world
from shoal.core.plan import Plan
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from shoal.verify.capture import Recorder, model_tensors, placement_values, saved_buffers
from shoal.verify.mutants import MUTANTS, planted
from shoal.verify.worker import serve


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train the job's recipe under its plan for some steps and record each; says what crossed between ranks and what it weighs."""
    torch.set_num_threads(job["threads"])
    folder = Path(job["folder"])
    recipe = Recipe.model_validate(job["recipe"])
    store = FileStore(str(folder / "store"), int(os.environ["WORLD_SIZE"]))
    world = join_world(os.environ, deadline_seconds=job["deadline_seconds"], store=store)
    mutant = MUTANTS[job["mutant"]] if job["mutant"] else None
    with planted(mutant, world):
        model, loss, data = build_parts(recipe)
        trainer = Trainer(
            model,
            data,
            loss=loss,
            train=recipe.train,
            optim=recipe.optim,
            telemetry=recipe.telemetry,
            elastic=recipe.elastic,
            parallel=recipe.parallel,
            plan=Plan.parse(job["plan"]),
            prefetch=recipe.data.prefetch,
            workers=recipe.data.workers,
            world=world,
        )
        with trainer:
            return _record(trainer, job["steps"], folder)


def _record(trainer: Trainer, steps: int, folder: Path) -> dict[str, Any]:
    recorder = Recorder(folder, f"rank-{trainer.world.rank:03d}")
    gradients: dict[str, torch.Tensor] = {}

    def keep(updated: Mapping[str, nn.Parameter], scale: float) -> None:
        gradients.clear()
        for name, parameter in updated.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients[f"grad/{name}"] = parameter.grad.detach() / scale  # A new tensor: clipping writes into the old one.

    trainer.runner.on_gradients = keep
    accounts: list[Account] = []
    expected: list[Account] = []
    running = itertools.islice(trainer.training_steps(), steps)
    while True:
        with trainer.mesh.ledger.counting() as account:
            done = next(running, None)
        if done is None:
            break
        accounts.append(dict(account))
        expected.append(dict(account))
        tensors = model_tensors(trainer.reduction.updated.items(), trainer.optimizer, saved_buffers(trainer.model))
        if not done.skipped:
            tensors |= gradients
        recorder.add(loss=done.loss, norm=done.grad_norm, skipped=done.skipped, tensors=tensors)
    recorder.close(placements={name: placement_values(place) for name, place in trainer.reduction.placements.items()})
    return {
        "coordinates": {axis.value: trainer.mesh.coordinate(axis) for axis in GRID},
        "degrees": {axis.value: trainer.mesh.degree(axis) for axis in GRID},
        "microbatches": trainer.plan.microbatches or 1,
        "adds_in_order": adds_in_order(trainer),
        "traffic": [_account_values(account) for account in accounts],
        "expected_traffic": [_account_values(account) for account in expected],
        "sizes": {},
    }


def adds_in_order(trainer: Trainer) -> bool:
    """True when sums over replicas run in the order of ranks, so that any number of them keeps the reference's bits."""
    transport = trainer.mesh.replicas.transport
    return transport is None or isinstance(transport, SharedTransport)


def _account_values(account: Account) -> dict[str, list[int]]:
    return {
        f"{axis} {operation}": [traffic.calls, traffic.num_bytes]
        for (axis, operation), traffic in sorted(account.items())
    }


if __name__ == "__main__":
    serve(lambda job: run_job(job))
