"""ZeRO 1, 2 and 3 against one process that imports nothing of ``parallel/``.

The reference is written here in plain torch: it sums microbatches in order, one partial sum per replica, replicas in rank
order, and runs the same optimizer kernel on whole tensors. Every stage must give the same bits: gradients, norm, weights and
optimizer state, which the ranks' pieces are put together from. Shared memory adds in rank order, so that holds for any number of
replicas; gloo promises no order, and two numbers have none.
"""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.channel import DONE
from shoal.comm.full_tensor import put_local
from shoal.comm.mesh import build_mesh
from shoal.core.axes import Axis
from shoal.core.placement import Patch, Placement
from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.order import Position, permute, take
from shoal.engine.state import seed_for_build
from shoal.models.build import build_model
from shoal.models.losses import build_loss
from shoal.optim.build import build_optimizer, initialise_state
from shoal.optim.precision import Precision
from shoal.parallel.analysis.structure import ModuleAnalysis, Stack
from shoal.parallel.gradnorm import build_norms, clip_, global_norm
from shoal.parallel.zero.apply import apply_zero
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.testing.parity import assert_close, compare
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.config import Recipe

STEPS = 3
STAGES = (1, 2, 3)
GPT = {"name": "gpt", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1}
TEXT = {"source": "stdlib", "sequence": 16, "limit_bytes": 200_000}
CASES = {
    "gpt": {"model": GPT, "data": TEXT},
    "gpt accumulating, clipped": {
        "model": GPT,
        "data": TEXT,
        "train": {"micro_batch": 2},
        "optim": {"name": "adamw", "lr": 1e-2, "clip": 0.1},
    },
    "gpt tied, clipped": {
        "model": {**GPT, "tied": True},
        "data": TEXT,
        "optim": {"name": "adamw", "lr": 1e-2, "clip": 0.1, "weight_decay": 0.1},
    },
    "gpt recomputed": {"model": GPT, "data": TEXT, "optim": {"name": "adamw", "lr": 1e-2, "clip": 0.1}},
    # Sizes that 16 does not divide: some rows cannot be cut at all, and some ranks own nothing of a tensor.
    "mlp, odd": {
        "model": {"name": "mlp", "layers": 2, "hidden": 17, "dropout": 0.1},
        "data": {"source": "synthetic", "kind": "regression", "samples": 64},
        "optim": {"name": "adam", "lr": 1e-2, "clip": 0.1},
    },
    "cnn": {
        "model": {"name": "cnn", "channels": (5, 7), "hidden": 18},
        "data": {"source": "digits"},
        "optim": {"name": "nesterov", "lr": 1e-2, "weight_decay": 0.1},
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
    "bfloat16": {"model": GPT, "data": TEXT, "train": {"precision": "bfloat16"}, "optim": {"clip": 0.1}},
    "float16, scaled": {"model": GPT, "data": TEXT, "train": {"precision": "float16"}, "optim": {"clip": 0.1}},
}
STACKS = {
    "gpt": (("blocks.0", "blocks.1"),),
    "mlp": (("layers.0", "layers.1"),),
    "seq2seq": (("encoder.0",), ("decoder.0",)),
    "cnn": (),
}
THREE = ["gpt", "gpt accumulating, clipped", "gpt tied, clipped", "mlp, odd", "seq2seq, ragged", "lamb"]
MUTANTS = ("no reduction", "mean over replicas", "stale weights", "norm of one shard", "state of the wrong shard")


def recipe_of(case):
    tables = {key: dict(value) for key, value in CASES[case].items()}
    tables["train"] = {"steps": STEPS, "global_batch": 12, "seed": 3, **tables.get("train", {})}
    return Recipe.model_validate(tables)


@functools.cache
def data_of(case):
    recipe = recipe_of(case)
    return build_splits(recipe.data, recipe.train.seed)


def build(case):
    """The same start on every side: model, loss, data, dropout, precision."""
    recipe, data = recipe_of(case), data_of(case)
    seed_for_build(recipe.train.seed)
    precision = Precision.named(recipe.train.precision)
    model: nn.Module = build_model(recipe.model, data.spec).to(precision.weight_dtype)
    dropout = apply_keyed_dropout(model, recipe.train.seed)
    return recipe, data, model, build_loss(recipe.model, data.spec), dropout, precision


def step_parts(recipe, data, replicas):
    """For each step the sample ids of every replica's microbatches, cut as a run cuts them."""
    position = Position()
    for _ in range(STEPS):
        place, after = take(position, len(data.train), recipe.train.global_batch)
        ids = permute(recipe.train.seed, position.epoch, len(data.train), np.arange(place.start, place.stop))
        position = after
        size = recipe.train.micro_batch or recipe.train.global_batch // replicas
        count = recipe.train.global_batch // size
        cuts, own = np.array_split(ids, count), count // replicas
        yield [cuts[first : first + own] for first in range(0, count, own)]


def share_of_loss(model, loss_of, data, dropout, precision, *, chunk, step, total):
    items = data.train.collate(chunk if len(chunk) else [0])
    dropout.begin(step, chunk)
    inputs = [precision.cast_input(tensor)[: len(chunk)] for tensor in items.inputs]
    with precision.autocast("cpu"):
        output = model(*inputs)
        if not len(chunk):
            return output.reshape(-1)[:0].float().sum()
        loss = loss_of(output, precision.cast_input(items.targets))
    loss = loss if loss.dtype == torch.float64 else loss.float()
    return loss * (items.weight / total)


def loss_scale(precision):
    return 2.0**10 if precision.scales_loss else 1.0


def run_reference(case, replicas):
    """One process, plain torch, the same global batches: a run's tree of sums."""
    torch.set_num_threads(1)
    recipe, data, model, loss_of, dropout, precision = build(case)
    optimizer = build_optimizer(recipe.optim, model)
    initialise_state(optimizer)
    found = []
    scale = loss_scale(precision)
    for step, parts in enumerate(step_parts(recipe, data, replicas)):
        total = float(sum(data.train.collate(chunk).weight for part in parts for chunk in part if len(chunk)))
        sums = None
        for part in parts:
            optimizer.zero_grad()
            for chunk in part:
                if len(chunk):
                    how = {"chunk": chunk, "step": step, "total": total}
                    (share_of_loss(model, loss_of, data, dropout, precision, **how) * scale).backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient
        ordered = [parameter.grad for _, parameter in sorted(model.named_parameters())]
        squares = [gradient.double().reshape(gradient.shape[0], -1).square().sum(1).sum() for gradient in ordered]
        norm = float(torch.stack(squares).sqrt().square().sum().sqrt()) / scale
        factor = recipe.optim.clip / norm if recipe.optim.clip is not None and norm > recipe.optim.clip else 1.0
        if factor / scale != 1.0:
            for gradient in ordered:
                gradient *= factor / scale
        optimizer.step()
        found.append({"norm": torch.tensor(norm, dtype=torch.float64)})
        for name, parameter in model.named_parameters():
            found[-1][f"grad/{name}"] = parameter.grad.clone()
            found[-1][f"weight/{name}"] = parameter.detach().clone()
            for key, value in optimizer.state[parameter].items():
                found[-1][f"optimizer/{name}/{key}"] = torch.as_tensor(value).clone()
    return found


def recompute(model, dropout):
    """Every block's forward pass is run again in the backward pass, inside the blocks' own hooks."""
    for block in model.blocks:
        plain = block.forward

        def again(*inputs, plain=plain):
            return checkpoint(plain, *inputs, use_reentrant=False, context_fn=dropout.recompute_contexts)

        block.forward = again


def run_cases(world, cases, stages, shared, mutants, hosts=()):
    """Every case at every stage on this rank, then each bug planted in the real path."""
    world.hosts = tuple(hosts) or None
    mesh = build_mesh(world, Plan(dp=world.size), shared=shared)
    found = {f"{case} {stage}": run_rank(mesh, case, stage) for case in cases for stage in stages}
    for mutant in mutants:
        found[mutant] = run_rank(mesh, "lamb" if mutant == "norm of one shard" else "gpt", 2, mutant)
    mesh.close()
    return found


def run_rank(mesh, case, stage, mutant=None):
    """The pieces of this rank after each step, with their places, and the step's traffic."""
    recipe, data, model, loss_of, dropout, precision = build(case)
    replicas, rank = mesh.degree(Axis.DATA), mesh.coordinate(Axis.DATA)
    analysis = ModuleAnalysis(stacks=tuple(Stack(blocks=blocks) for blocks in STACKS[recipe.model.name]))
    if case == "gpt recomputed":
        recompute(model, dropout)
    size = recipe.train.micro_batch or recipe.train.global_batch // replicas
    count = recipe.train.global_batch // size // replicas
    reduction = apply_zero(model, analysis=analysis, mesh=mesh, stage=stage, num_microbatches=count, placements={})
    norms = build_norms(model, mesh=mesh, placements={}, updated=reduction.placements, is_sharded=True)
    optimizer = build_optimizer(recipe.optim, model, reduction.updated, norms)
    initialise_state(optimizer)
    plant(mutant, reduction, norms)
    scale, found = loss_scale(precision), []
    for step, parts in enumerate(step_parts(recipe, data, replicas)):
        total = float(sum(data.train.collate(chunk).weight for part in parts for chunk in part if len(chunk)))
        with mesh.traffic.counting() as moved:
            reduction.begin_step()
            # At stage 3 replicas run equally many passes, with an empty batch where one has no sample.
            own = [chunk for chunk in parts[rank] if len(chunk) or reduction.stage == 3]
            for index, chunk in enumerate(own):
                with reduction.microbatch(is_last=index == len(own) - 1):
                    how = {"chunk": chunk, "step": step, "total": total}
                    (share_of_loss(model, loss_of, data, dropout, precision, **how) * scale).backward()
            reduction.finish()
            grads = {name: piece.grad for name, piece in reduction.updated.items()}
            counted = dict(moved)
            norm = global_norm(grads.items(), exact=True, norms=norms) / scale
            fast = global_norm(grads.items(), exact=False, norms=norms) / scale
            clip_(grads.values(), norm, recipe.optim.clip, scale)
            optimizer.step()
            before_publish = dict(moved)
            reduction.publish()
        gathers = moved.get(("dp", "all_gather"))
        traffic = dict(counted)
        if gathers is not None and ("dp", "all_gather") not in before_publish:
            traffic["dp", "all_gather"] = gathers
        expected = reduction.forecast_traffic(count)
        found.append(
            {
                "norm": torch.tensor(norm, dtype=torch.float64),
                "is fast norm near": abs(fast - norm) <= 1e-5 * norm,
                "traffic": describe(traffic),
                "expected": describe(expected) if len(own) == count else describe(traffic),
                "untouched": reduction.untouched() if any(len(chunk) for chunk in own) else [],
                "pieces": {name: pieces(reduction, optimizer, name) for name in reduction.updated},
                "visible": visible(model, stage),
            }
        )
    return found


def visible(model, stage):
    """What modules hold between steps: the whole weights at stages 1 and 2, and nothing but NaN at stage 3."""
    if stage < 3:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
    return {}


def describe(moved):
    return {f"{axis} {operation}": [traffic.calls, traffic.num_bytes] for (axis, operation), traffic in moved.items()}


def pieces(reduction, optimizer, name):
    placement, piece = reduction.placements[name], reduction.updated[name]
    state = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[piece].items()}
    patches = [[list(patch.local_start), list(patch.whole_start), list(patch.shape)] for patch in placement.patches]
    return {
        "grad": piece.grad.clone(),
        "weight": piece.detach().clone(),
        "state": state,
        "whole_shape": list(placement.whole_shape),
        "patches": patches,
    }


def plant(mutant, reduction, norms):
    """Break the real path of this rank."""
    gradients = reduction.gradients
    honest = gradients._data.reduce_scatter
    if mutant == "no reduction":
        gradients._data = Broken(
            gradients._data, lambda whole, own, counts: own.copy_(own_part(gradients, whole, counts))
        )
    elif mutant == "mean over replicas":
        gradients._data = Broken(
            gradients._data, lambda whole, own, counts: honest(whole, own, counts).div_(len(counts))
        )
    elif mutant == "stale weights":
        reduction.publish = lambda: None
    elif mutant == "norm of one shard":
        norms._is_sharded = False
    elif mutant == "state of the wrong shard":
        honest_finish = reduction.finish

        def finish():
            honest_finish()
            for piece in reduction.updated.values():
                piece.grad = piece.grad.roll(1, 0)

        reduction.finish = finish


class Broken:
    """A channel of which one operation is replaced."""

    def __init__(self, channel, reduce_scatter):
        self.channel = channel
        self.reduce_scatter = reduce_scatter

    def start_reduce_scatter(self, whole, own, counts):
        self.reduce_scatter(whole, own, counts)
        return DONE

    def __getattr__(self, name):
        return getattr(self.channel, name)


def own_part(gradients, whole, counts):
    start = sum(counts[: gradients.rank])
    return whole[start : start + counts[gradients.rank]]


def put_together(ranks, step):
    """Whole tensors from all ranks' pieces of one step; every element must come from exactly one rank."""
    found = {"norm": ranks[0][step]["norm"]}
    covered = {}
    for rank in ranks:
        for name, piece in rank[step]["pieces"].items():
            placement = _placement(piece)
            tensors = {"grad": piece["grad"], "weight": piece["weight"]}
            tensors |= {f"optimizer/{key}": value for key, value in piece["state"].items()}
            for key, local in tensors.items():
                kind, _, state_key = key.partition("/")
                full = f"{kind}/{name}" + (f"/{state_key}" if state_key else "")
                if local.shape != piece["weight"].shape:
                    found[full] = local
                    continue
                whole = found.setdefault(full, torch.full(piece["whole_shape"], torch.nan, dtype=local.dtype))
                put_local(local, whole, placement)
            count = covered.setdefault(name, torch.zeros(piece["whole_shape"]))
            ones = torch.zeros(piece["whole_shape"])
            put_local(torch.ones_like(piece["weight"]), ones, placement)
            count += ones
    assert all(bool((count == 1).all()) for count in covered.values())
    return found


def _placement(piece):
    patches = tuple(
        Patch(local_start=tuple(local), whole_start=tuple(whole), shape=tuple(shape))
        for local, whole, shape in piece["patches"]
    )
    return Placement(whole_shape=tuple(piece["whole_shape"]), local_shape=tuple(piece["weight"].shape), patches=patches)


def assert_equals_one_process(reference, ranks):
    for step, theirs in enumerate(reference):
        ours = put_together(ranks, step)
        assert_close(theirs, ours, bound=0.0)
        for rank in ranks:
            assert torch.equal(rank[step]["norm"], theirs["norm"]), "every rank clips by the same norm"
            assert rank[step]["is fast norm near"]
            assert rank[step]["untouched"] == []
            assert rank[step]["traffic"] == rank[step]["expected"]
            for name, weight in rank[step]["visible"].items():
                assert torch.equal(weight, theirs[f"weight/{name}"]), name


@pytest.fixture(scope="module")
def ranks():
    """What ranks found, by (number of ranks, stage): processes take seconds to start, so they start once for all cases."""
    found = {}

    def of(num_ranks, stage):
        if (num_ranks, stage) not in found:
            cases, mutants = (list(CASES), MUTANTS if stage == 2 else ()) if num_ranks == 2 else (THREE, ())
            found[num_ranks, stage] = run_on_ranks(
                run_cases, num_ranks, cases, [stage], True, list(mutants), deadline_seconds=110.0
            )
        return found[num_ranks, stage]

    return of


@pytest.fixture(scope="module")
def references():
    """References by (case, replicas), each computed once."""
    found = {}

    def of(case, replicas):
        if (case, replicas) not in found:
            found[case, replicas] = run_reference(case, replicas)
        return found[case, replicas]

    return of


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_two_replicas_give_the_bits_of_one_process(case, stage, ranks, references):
    assert_equals_one_process(references(case, 2), [rank[f"{case} {stage}"] for rank in ranks(2, stage)])


@pytest.mark.soak
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", THREE)
def test_three_replicas_give_the_bits_of_one_process(case, stage, ranks, references):
    assert_equals_one_process(references(case, 3), [rank[f"{case} {stage}"] for rank in ranks(3, stage)])


def test_gloo_gives_the_same_bits_with_two_replicas(references):
    found = run_on_ranks(run_cases, 2, ["gpt", "lamb"], [2, 3], False, [])
    for stage in (2, 3):
        for case in ("gpt", "lamb"):
            assert_equals_one_process(references(case, 2), [rank[f"{case} {stage}"] for rank in found])


@pytest.mark.soak
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1, 1], [0, 1, 2]])
def test_hosts_give_the_bits_of_one_process(hosts, stage, references):
    """Gathers and reductions go on in the background there, and over two levels on two hosts of two."""
    # Four replicas have three samples each, which are no microbatches of two.
    cases = (
        list(CASES) if len(hosts) == 2 else [case for case in THREE if len(hosts) == 3 or "accumulating" not in case]
    )
    found = run_on_ranks(run_cases, len(hosts), cases, [stage], True, [], hosts, deadline_seconds=110.0)
    for case in cases:
        assert_equals_one_process(references(case, len(hosts)), [rank[f"{case} {stage}"] for rank in found])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_caught(mutant, ranks, references):
    case = "lamb" if mutant == "norm of one shard" else "gpt"
    broken = [rank[mutant] for rank in ranks(2, 2)]
    with pytest.raises(AssertionError):
        assert_equals_one_process(references(case, 2), broken)
    # By the comparison that should: the gradient is right where only weights or state are wrong.
    first = {name: tensor for name, tensor in references(case, 2)[0].items() if name.startswith("grad/")}
    ours = {name: tensor for name, tensor in put_together(broken, 0).items() if name.startswith("grad/")}
    assert compare(first, ours).is_bitwise == (mutant in ("stale weights", "norm of one shard"))
