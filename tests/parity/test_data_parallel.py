"""Data parallelism against one process that imports nothing of ``parallel/``.

The reference is written here in plain torch: it sums microbatches in order, one partial sum per replica, replicas in rank
order, and runs the same optimizer kernel. Replicas on one machine must give the same bits, however many.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal.engine.parallelize as laying
import shoal.parallel.data as data_parallel
from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.order import Position, permute, take
from shoal.engine.state import seed_for_build
from shoal.models.build import build_model
from shoal.models.losses import build_loss
from shoal.optim.build import build_optimizer
from shoal.optim.precision import Precision
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.testing.parity import assert_close, compare
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

STEPS = 3
MUTANTS = ["mean over replicas", "no reduction", "dropout by rank"]
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
        "data": {"source": "synthetic", "kind": "reverse", "samples": 13, "validation": 0, "test": 0},
    },
    "lamb": {"model": GPT, "data": TEXT, "optim": {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1}},
    "lars": {"model": GPT, "data": TEXT, "optim": {"name": "lars", "lr": 1.0, "weight_decay": 0.1}},
    "adagrad": {"model": GPT, "data": TEXT, "optim": {"name": "adagrad", "lr": 1e-2}},
    "float64": {"model": GPT, "data": TEXT, "train": {"precision": "float64"}},
    "nesterov": {"model": GPT, "data": TEXT, "optim": {"name": "nesterov", "lr": 1e-2, "weight_decay": 0.1}},
}


def recipe_of(case):
    tables = {key: dict(value) for key, value in CASES[case].items()}
    # The watch would stop a planted bug before it can be compared.
    tables["train"] = {"steps": STEPS, "global_batch": 12, "seed": 3, "watch_every": 0, **tables.get("train", {})}
    return Recipe.model_validate(tables)


def snapshot(model, optimizer, loss, norm):
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {"loss": torch.tensor(loss), "norm": torch.tensor(norm)}
    for parameter, name in names.items():
        found[f"grad/{name}"] = parameter.grad.clone()
        found[f"weight/{name}"] = parameter.detach().clone()
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer/{name}/{key}"] = torch.as_tensor(value).clone()
    return found


def run_reference(case, replicas):
    """One process, plain torch, the same global batches: a run's tree of sums."""
    torch.set_num_threads(1)
    recipe = recipe_of(case)
    data = build_splits(recipe.data, recipe.train.seed)
    seed_for_build(recipe.train.seed)
    precision = Precision.named(recipe.train.precision)
    model: nn.Module = build_model(recipe.model, data.spec).to(precision.weight_dtype)
    loss_of = build_loss(recipe.model, data.spec)
    dropout = apply_keyed_dropout(model, recipe.train.seed)
    optimizer = build_optimizer(recipe.optim, model)
    position, found = Position(), []
    for step in range(STEPS):
        place, after = take(position, len(data.train), recipe.train.global_batch)
        ids = permute(recipe.train.seed, position.epoch, len(data.train), np.arange(place.start, place.stop))
        position = after
        size = recipe.train.micro_batch or recipe.train.global_batch // replicas
        count = recipe.train.global_batch // size
        cuts, own = np.array_split(ids, count), count // replicas
        parts = [[cut for cut in cuts[first : first + own] if len(cut)] for first in range(0, count, own)]
        total = float(sum(data.train.collate(chunk).weight for part in parts for chunk in part))
        sums, losses = None, []
        for part in parts:
            optimizer.zero_grad()
            replica_loss = torch.zeros((), dtype=precision.weight_dtype)
            for chunk in part:
                items = data.train.collate(chunk)
                dropout.begin(step, chunk)
                inputs = [precision.cast_input(tensor) for tensor in items.inputs]
                targets = precision.cast_input(items.targets)
                loss = loss_of(model(*inputs), targets) * (items.weight / total)
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


def run_replicas(world, cases, mutants):
    """The real trainer on one rank: every case, then the first case with each bug planted in the real path."""
    found = {case: run_replica(world, case) for case in cases}
    for mutant in mutants:
        undo = plant(world, mutant)
        found[mutant] = run_replica(world, "gpt")
        undo()
    return found


def run_replica(world, case):
    recipe = recipe_of(case)
    model, loss, data = build_parts(recipe)
    plan = Plan(dp=world.size)
    trainer = Trainer(model, data, loss=loss, train=recipe.train, optim=recipe.optim, plan=plan, world=world)
    return [snapshot(trainer.model, trainer.optimizer, info.loss, info.grad_norm) for info in trainer.training_steps()]


def plant(world, mutant):
    """Break the real path of this process; the returned function mends it."""
    honest_sum, honest_dropout = data_parallel._sum_bucket, laying.apply_keyed_dropout

    def divided(group, bucket):
        return honest_sum(group, bucket).then(lambda done: done.value() / world.size)

    def kept(group, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    if mutant == "mean over replicas":
        data_parallel._sum_bucket = _annotated(divided, honest_sum)
    elif mutant == "no reduction":
        data_parallel._sum_bucket = _annotated(kept, honest_sum)
    elif mutant == "dropout by rank":
        laying.apply_keyed_dropout = lambda model, seed: honest_dropout(model, seed + world.rank)

    def undo():
        data_parallel._sum_bucket, laying.apply_keyed_dropout = honest_sum, honest_dropout

    return undo


def _annotated(function, like):
    function.__annotations__ = like.__annotations__
    return function


def assert_steps_close(reference, found, bound):
    assert len(reference) == len(found) > 0
    for step, (theirs, ours) in enumerate(zip(reference, found, strict=True)):
        # Without clipping the reported norm is a float32 sum per tensor: display, not arithmetic.
        theirs_norm, ours_norm = theirs.pop("norm"), ours.pop("norm")
        assert float(ours_norm) == pytest.approx(float(theirs_norm), rel=1e-6), f"step {step}: norm"
        theirs_loss, ours_loss = theirs.pop("loss"), ours.pop("loss")
        assert float(ours_loss) == pytest.approx(float(theirs_loss), rel=1e-7), f"step {step}: loss"
        assert_close(theirs, ours, bound=bound)


@pytest.fixture(scope="module")
def two():
    """What two ranks found, for every case and every planted bug: processes take seconds to start, so they start once."""
    return run_on_ranks(run_replicas, 2, list(CASES), MUTANTS, deadline_seconds=100.0)


@pytest.mark.parametrize("case", CASES)
def test_two_replicas_give_the_bits_of_one_process(case, two):
    first, second = two[0][case], two[1][case]
    for ours, theirs in zip(first, second, strict=True):
        assert compare(ours, theirs).is_bitwise, "replicas must agree with each other"
    assert_steps_close(run_reference(case, 2), first, bound=0.0)


@pytest.mark.soak
def test_three_replicas_give_the_bits_of_one_process_too():
    """Shared memory adds in the order of ranks; a ring would not."""
    cases = ["gpt", "seq2seq, ragged"]
    first, *_ = run_on_ranks(run_replicas, 3, cases, [])
    for case in cases:
        assert_steps_close(run_reference(case, 3), first[case], bound=0.0)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_caught_by_every_comparison(mutant, two):
    """Not by the norm alone: gradients, weights and optimizer state must each show it."""
    reference, found = run_reference("gpt", 2)[0], two[0][mutant][0]
    for kind in ("grad/", "weight/", "optimizer/"):
        theirs, ours = (
            {name: value for name, value in side.items() if name.startswith(kind)} for side in (reference, found)
        )
        assert not compare(theirs, ours).is_bitwise, kind
    with pytest.raises(AssertionError):
        assert_steps_close([reference], [found], bound=0.0)


@pytest.mark.parametrize("case", CASES)
def test_the_flat_sum_over_the_global_batch_is_near(case, two):
    """One forward pass over all samples, the loss written out in plain torch: no weight, no share, no order of sums in common."""
    recipe = recipe_of(case)
    data = build_splits(recipe.data, recipe.train.seed)
    seed_for_build(recipe.train.seed)
    model = build_model(recipe.model, data.spec).to(Precision.named(recipe.train.precision).weight_dtype)
    ids = permute(recipe.train.seed, 0, len(data.train), np.arange(min(12, len(data.train))))
    apply_keyed_dropout(model, recipe.train.seed).begin(0, ids)
    items = data.train.collate(ids)
    inputs = [Precision.named(recipe.train.precision).cast_input(tensor) for tensor in items.inputs]
    output = model(*inputs)
    if items.targets.is_floating_point():
        loss = F.mse_loss(output, items.targets.to(output.dtype))
    else:
        loss = F.cross_entropy(output.reshape(-1, output.shape[-1]), items.targets.reshape(-1), ignore_index=-100)
    loss.backward()
    scale = 1.0
    norm = float(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm())
    if recipe.optim.clip is not None and norm > recipe.optim.clip:
        scale = recipe.optim.clip / norm
    flat = {f"grad/{name}": parameter.grad * scale for name, parameter in model.named_parameters()}
    found = {name: value for name, value in two[0][case][0].items() if name.startswith("grad/")}
    assert_close(flat, found, bound=1e-5)
