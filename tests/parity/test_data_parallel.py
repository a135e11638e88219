"""Data parallelism against one process that imports nothing of ``parallel/``.

The reference is written here in plain torch: it sums microbatches in order, one partial sum per replica, replicas in rank
order, and runs the same optimizer kernel. Two replicas must give the same bits; more may differ by the order of the sum, at
most 1e-6.
"""

import json

import numpy as np
import pytest
import torch
from torch import nn

from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.order import Position, microbatches, permute, replica_share, take
from shoal.models.build import build_loss, build_model
from shoal.models.dropout import apply_keyed_dropout
from shoal.optim.build import build_optimizer
from shoal.testing.parity import assert_close, compare
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from shoal.trainer.rng import seed_for_build

STEPS = 3
GPT = {"name": "gpt", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1}
TEXT = {"source": "stdlib", "sequence": 16, "limit_bytes": 200_000}
CASES = {
    "gpt": {"model": GPT, "data": TEXT},
    "gpt accumulating": {"model": GPT, "data": TEXT, "train": {"micro_batch": 2}},
    "gpt tied, clipped": {
        "model": {**GPT, "tied": True},
        "data": TEXT,
        "optim": {"name": "adamw", "lr": 1e-2, "clip": 0.1},
    },
    "mlp": {
        "model": {"name": "mlp", "layers": 2, "hidden": 16, "dropout": 0.1},
        "data": {"source": "synthetic", "kind": "regression", "samples": 64},
    },
    # Lengths vary, so replicas carry different weights; the last batch of an epoch is short and leaves a replica without a
    # sample.
    "seq2seq, ragged": {
        "model": {"name": "seq2seq", "layers": 1, "hidden": 16, "heads": 2, "dropout": 0.1},
        "data": {"source": "synthetic", "kind": "reverse", "samples": 27, "validation": 0.1, "test": 0.1},
        "train": {"global_batch": 10},
    },
    "lamb": {"model": GPT, "data": TEXT, "optim": {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1}},
    "nesterov": {"model": GPT, "data": TEXT, "optim": {"name": "nesterov", "lr": 1e-2, "weight_decay": 0.1}},
}


def recipe_of(case):
    tables = {key: dict(value) for key, value in CASES[case].items()}
    tables["train"] = {"steps": STEPS, "global_batch": 12, "seed": 3, **tables.get("train", {})}
    return Recipe.model_validate(tables)


def snapshot(model, optimizer, loss, norm):
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {"loss": torch.tensor(loss), "norm": torch.tensor(norm)}
    for parameter, name in names.items():
        found[f"grad/{name}"] = parameter.grad.clone()
        found[f"weight/{name}"] = parameter.detach().clone()
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer/{name}/{key}"] = torch.as_tensor(value).clone().float()
    return found


def run_reference(case, replicas):
    """One process, plain torch, the same global batches: the law's tree of sums."""
    torch.set_num_threads(1)
    recipe = recipe_of(case)
    data = build_splits(recipe.data, recipe.train.seed)
    seed_for_build(recipe.train.seed)
    model: nn.Module = build_model(recipe.model, data.spec)
    loss_of = build_loss(recipe.model, data.spec)
    dropout = apply_keyed_dropout(model, recipe.train.seed)
    optimizer = build_optimizer(recipe.optim, model)
    position, found = Position(), []
    for step in range(STEPS):
        place, after = take(position, len(data.train), recipe.train.global_batch)
        ids = permute(recipe.train.seed, position.epoch, len(data.train), np.arange(place.start, place.stop))
        position = after
        size = recipe.train.micro_batch or recipe.train.global_batch // replicas
        parts = [microbatches(replica_share(ids, replica, replicas), size) for replica in range(replicas)]
        total = float(sum(data.train.collate(chunk).weight for part in parts for chunk in part))
        sums, losses = None, []
        for part in parts:
            optimizer.zero_grad()
            replica_loss = torch.zeros(())
            for chunk in part:
                items = data.train.collate(chunk)
                dropout.begin(step, chunk)
                loss = loss_of(model(*items.inputs), items.targets) * (items.weight / total)
                loss.backward()
                replica_loss += loss.detach()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
            losses.append(float(replica_loss))
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient
        ordered = [parameter.grad for _, parameter in sorted(model.named_parameters())]
        norm = float(torch.cat([g.double().reshape(g.shape[0], -1).square().sum(1) for g in ordered]).sum().sqrt())
        if recipe.optim.clip is not None and norm > recipe.optim.clip:
            for gradient in ordered:
                gradient *= recipe.optim.clip / norm
        optimizer.step()
        found.append(snapshot(model, optimizer, sum(losses), norm))
    return found


def run_replica(world, case, mutant):
    """The real trainer, on one rank of the plan; ``mutant`` plants a bug in the real path."""
    recipe = recipe_of(case)
    if mutant == "mean over replicas":
        import shoal.parallel.data as data_parallel

        honest = data_parallel._sum_bucket

        def divided(group, bucket):
            return honest(group, bucket).then(lambda done: done.value() / world.size)

        data_parallel._sum_bucket = _annotated(divided, honest)
    elif mutant == "no reduction":
        import shoal.parallel.data as data_parallel

        def kept(group, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        data_parallel._sum_bucket = _annotated(kept, data_parallel._sum_bucket)
    elif mutant == "dropout by rank":
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": recipe.train.seed})})
    model, loss, data = build_parts(recipe)
    trainer = Trainer(
        model,
        data,
        loss=loss,
        train=recipe.train,
        optim=recipe.optim,
        plan=Plan(dp=world.size),
        world=world,
        prefetch=0,
    )
    if mutant == "dropout by rank":
        trainer.runner.dropout.seed = trainer.runner.dropout.seed + world.rank
    found = []
    for info in trainer.training_steps():
        found.append(snapshot(trainer.model, trainer.optimizer, info.loss, info.grad_norm))
    trainer.reporter.close()
    return found


def _annotated(function, like):
    function.__annotations__ = like.__annotations__
    return function


def assert_steps_close(reference, found, bound):
    assert len(reference) == len(found) == STEPS
    for step, (theirs, ours) in enumerate(zip(reference, found, strict=True)):
        exact_norm = "grad/" in json.dumps(list(theirs))
        assert exact_norm, "the reference must hold gradients"
        # Without clipping the reported norm is a float32 sum per tensor: display, not arithmetic.
        theirs_norm, ours_norm = theirs.pop("norm"), ours.pop("norm")
        assert float(ours_norm) == pytest.approx(float(theirs_norm), rel=1e-6), f"step {step}: norm"
        theirs_loss, ours_loss = theirs.pop("loss"), ours.pop("loss")
        assert float(ours_loss) == pytest.approx(float(theirs_loss), rel=1e-7), f"step {step}: loss"
        assert_close(theirs, ours, bound=bound)


@pytest.mark.parametrize("case", CASES)
def test_two_replicas_give_the_bits_of_one_process(case):
    first, second = run_on_ranks(run_replica, 2, case, "")
    assert_steps_close(run_reference(case, 2), first, bound=0.0)
    for ours, theirs in zip(first, second, strict=True):
        ours.pop("norm", None), theirs.pop("norm", None), theirs.pop("loss", None)
        assert compare(ours, theirs).is_bitwise, "replicas must agree with each other"


@pytest.mark.parametrize("case", ["gpt", "seq2seq, ragged"])
def test_three_replicas_are_within_the_order_of_the_sum(case):
    first, *_ = run_on_ranks(run_replica, 3, case, "")
    assert_steps_close(run_reference(case, 3), first, bound=1e-6)


@pytest.mark.parametrize("mutant", ["mean over replicas", "no reduction", "dropout by rank"])
def test_planted_bugs_are_caught(mutant):
    first, *_ = run_on_ranks(run_replica, 2, "gpt", mutant)
    with pytest.raises(AssertionError):
        assert_steps_close(run_reference("gpt", 2), first, bound=0.0)
