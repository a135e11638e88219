"""Asynchronous training in one process, beside loops that were written out by hand."""

import copy
import math

import numpy as np
import pytest
import torch

from shoal.optim.build import set_rate
from shoal.optim.config import OptimConfig
from shoal.optim.rates import rate
from shoal.verify.oracle.delayed import DelayedTraining, run_delayed
from shoal.verify.proof import Prover
from shoal.verify.reference.case import Tree
from shoal.verify.reference.model import build_reference, global_batches
from shoal.verify.reference.recording import Recording, model_tensors
from shoal.verify.reference.train import tree_gradients
from support.training.replay_cases import GPT, REVERSE, SEQ2SEQ, case_of, run_here

COSINE = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "schedule": "cosine", "warmup": 3}


def names_of(case):
    return [name for name, _ in build_reference(case).named]


def halves_of(case):
    names = names_of(case)
    return [names[: len(names) // 2], names[len(names) // 2 :]]


def steps_of(folder):
    recording = Recording.open(folder, "reference")
    return [recording.step(index) for index in range(len(recording))]


@pytest.mark.parametrize("delay", ["pipedream", "pipedream-vsync"])
def test_one_stage_is_plain_training_with_a_step_per_microbatch(tmp_path, delay):
    """Dropout is on, the rate falls with every microbatch, and every bit is the same."""
    case = case_of(optim=COSINE)
    run_here(run_delayed, case, Tree(replicas=1, microbatches=4, delay=delay, stages=[names_of(case)]), tmp_path)
    parts, ticks = build_reference(case), 0
    for found, ids in zip(steps_of(tmp_path), list(global_batches(parts)), strict=True):
        losses = []
        for own in ids.reshape(4, 2):
            items = parts.train.collate(own)
            parts.dropout.begin(ticks // 4, own)
            parts.optimizer.zero_grad()
            loss = parts.loss(parts.model(*items.inputs), items.targets)
            loss.backward()
            set_rate(parts.optimizer, rate(OptimConfig(**COSINE), ticks, 8 * 4))
            parts.optimizer.step()
            losses.append(loss.item())
            ticks += 1
        expected = model_tensors(parts.named, parts.optimizer, {})
        expected |= {f"grad/{name}": parameter.grad for name, parameter in parts.named}
        assert found.tensors.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(found.tensors[key], expected[key])] == []
        assert found.loss == pytest.approx(sum(losses) / 4, rel=1e-6)
        assert found.norm == pytest.approx(
            math.sqrt(sum(float(parameter.grad.double().square().sum()) for _, parameter in parts.named))
        )


def test_two_stages_of_two_replicas_by_hand(tmp_path):
    """Stage 0 is one update behind. Samples weigh differently, and each stage is clipped by its own norm."""
    limit, clipped = 1.4, set()
    optim = {"name": "momentum", "lr": 0.05, "clip": limit}
    case = case_of(model=SEQ2SEQ, data=REVERSE, optim=optim, global_batch=12)
    stages = halves_of(case)
    run_here(run_delayed, case, Tree(replicas=2, microbatches=3, delay="pipedream", stages=stages), tmp_path)
    parts = build_reference(case)
    scratch, named = copy.deepcopy(parts.model).requires_grad_(), dict(parts.named)
    optimizers = [
        torch.optim.SGD([named[name] for name in names], lr=0.05, momentum=0.9, fused=True) for names in stages
    ]
    history = []
    for found, ids in zip(steps_of(tmp_path), list(global_batches(parts)), strict=True):
        cuts, losses = ids.reshape(2, 3, 2), []
        for place in range(3):
            history.append({name: value.detach().clone() for name, value in named.items()})
            met = {name: history[max(0, len(history) - 2)][name] for name in stages[0]}
            met |= {name: history[-1][name] for name in stages[1]}
            scratch.load_state_dict(met, strict=False)
            items = [parts.train.collate(cuts[replica, place]) for replica in (0, 1)]
            weight, sums = sum(one.weight for one in items), None
            for one in items:
                scratch.zero_grad()
                loss = parts.loss(scratch(*one.inputs), one.targets)
                (loss * (one.weight / weight)).backward()
                own = {name: value.grad.clone() for name, value in scratch.named_parameters()}
                sums = own if sums is None else {name: sums[name] + own[name] for name in sums}
                losses.append((loss.item(), one.weight))
            norms = []
            for names, optimizer in zip(stages, optimizers, strict=True):
                norms.append(math.sqrt(sum(float(sums[name].double().square().sum()) for name in names)))
                for name in names:
                    named[name].grad = sums[name] * min(1.0, limit / norms[-1])
                optimizer.step()
            clipped |= {norm > limit for norm in norms}
        assert [name for name in named if not torch.equal(found.tensors[f"grad/{name}"], sums[name])] == []
        for name, value in named.items():
            torch.testing.assert_close(found.tensors[f"weight/{name}"], value.detach(), rtol=1e-6, atol=1e-7)
        assert found.norm == pytest.approx(math.hypot(*norms))
        total = sum(weight for _, weight in losses)
        assert found.loss == pytest.approx(sum(loss * weight for loss, weight in losses) / total, rel=1e-6)
        assert len({weight for _, weight in losses}) > 1
    assert clipped == {True, False}


def test_double_buffering_meets_the_first_weights_twice(tmp_path):
    """The first two updates are of the initial weights, in the tree of a synchronous step."""
    case = case_of()
    tree = Tree(replicas=2, microbatches=2, delay="pipedream-2bw", stages=halves_of(case))
    run_here(run_delayed, case, tree, tmp_path)
    parts = build_reference(case)
    for step, (found, ids) in enumerate(zip(steps_of(tmp_path), list(global_batches(parts)), strict=True)):
        loss, gradients = tree_gradients(parts, step, ids, Tree(replicas=2, microbatches=2), 1.0)
        assert found.loss == loss
        assert [name for name in gradients if not torch.equal(found.tensors[f"grad/{name}"], gradients[name])] == []
        assert float(found.tensors["optimizer/head.weight/step"]) == step + 1


def test_a_microbatch_that_nobody_has_is_an_update_by_nothing():
    """Two samples on two replicas of three microbatches: replica 0 has two of them, and nobody has a third one."""
    case = case_of()
    training = DelayedTraining(
        build_reference(case), Tree(replicas=2, microbatches=3, delay="pipedream", stages=[names_of(case)])
    )
    loss = training.step(0, np.arange(2))
    assert math.isfinite(loss) and training.norms == [0.0]
    tensors = training.tensors()
    assert not tensors["grad/head.weight"].any()
    assert float(tensors["optimizer/head.weight/step"]) == 3
    assert tensors["optimizer/head.weight/exp_avg"].any()


def test_it_runs_alone_in_a_process_of_its_own():
    """Where a case comes as JSON, and nothing of what is judged may be imported."""
    case = case_of(model={**GPT, "tied": True}, steps=1)
    tree = Tree(replicas=1, microbatches=2, delay="pipedream-vsync", stages=[names_of(case)])
    with Prover(steps=1, deadline_seconds=120.0) as prover:
        folder, _ = prover._reference(case, tree)
        (found,) = steps_of(folder)
        assert float(found.tensors["optimizer/embedding.weight/step"]) == 2
