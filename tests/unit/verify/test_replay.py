"""The log of parameter servers, replayed in one process: beside the plain reference, and beside a loop written out by hand."""

import itertools
from dataclasses import replace

import pytest
import torch

from shoal.optim.build import set_rate
from shoal.optim.config import OptimConfig
from shoal.optim.rates import rate
from shoal.verify.oracle.replay import run_replay
from shoal.verify.reference.case import Tree, UpdateLog
from shoal.verify.reference.model import build_reference, global_batches
from shoal.verify.reference.recording import Recording, model_tensors
from shoal.verify.reference.train import run_reference
from support.training.replay_cases import REVERSE, SEQ2SEQ, case_of, run_here

LINEAR = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "schedule": "linear"}


def steps_of(folder):
    recording = Recording.open(folder, "reference")
    return [recording.step(index) for index in range(len(recording))]


_NUMBERS = itertools.count()
"""Of pushes, in the order in which they are written down."""


def part_of(unit, read, factor, *, worker="w", more=()):
    works = [{"unit": unit, "read": read}, *({"unit": other, "read": None} for other in more)]
    return {"worker": worker, "index": 0, "works": works, "factor": factor, "number": next(_NUMBERS)}


def log_of(updates, **others):
    values = {"adds_to_steps": True, "total_updates": 8, "pieces": [], **others}
    own = {"takes_own_steps": False, "own_rates": (), "tree": Tree(replicas=2, microbatches=1)}
    written = [{"parts": [part_of(*one) for one in parts]} for parts in updates]
    return UpdateLog(updates=written, **{**own, **values})


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_new_reads_of_every_share_are_the_plain_reference(tmp_path):
    """bsp written as a log: dropout, decay and a falling rate, and samples that weigh differently."""
    case = case_of(model=SEQ2SEQ, data=REVERSE, optim=LINEAR, global_batch=12)
    log = log_of(
        [[(2 * step, (step,), 1.0), (2 * step + 1, (step,), 1.0)] for step in range(case.steps)],
        tree=Tree(replicas=2, microbatches=3),
    )
    (tmp_path / "log").mkdir()
    run_here(run_replay, case, log, tmp_path / "log")
    run_here(run_reference, case, Tree(replicas=2, microbatches=3), tmp_path)
    for found, expected in zip(steps_of(tmp_path / "log"), steps_of(tmp_path), strict=True):
        assert_same(found.tensors, expected.tensors)
        assert found.norm == expected.norm and found.loss == pytest.approx(expected.loss, rel=1e-6)


def test_late_reads_of_two_shards_by_hand(tmp_path):
    """Each gradient is the mean over its own samples; the second update has an old one, whose shards are of two versions."""
    case = case_of(optim=LINEAR)
    names = [name for name, _ in build_reference(case).named]
    half = len(names) // 2
    numel = {name: value.numel() for name, value in build_reference(case).named}
    # One tensor lies on both shards.
    cut = names[half]
    pieces = [(name, 0, numel[name], int(names.index(name) > half)) for name in names if name != cut]
    pieces += [(cut, 0, 16, 0), (cut, 16, numel[cut], 1)]
    updates = [[(0, (0, 0), 1.0)], [(1, (1, 0), 0.25), (2, (1, 1), 0.75)], [(3, (1, 2), 0.5)]]
    log = log_of(updates, adds_to_steps=False, total_updates=16, pieces=pieces)
    run_here(run_replay, case, log, tmp_path)

    parts, versions = build_reference(case), []
    batches = list(global_batches(parts))
    for number, (found, own) in enumerate(zip(steps_of(tmp_path), updates, strict=True)):
        versions.append({name: value.detach().clone() for name, value in parts.named})
        total = None
        for unit, (first, second), factor in own:
            with torch.no_grad():
                for name, value in parts.named:
                    shard = int(names.index(name) > half)
                    value.copy_(versions[second if shard else first][name])
                    if name == cut:
                        value.view(-1)[16:] = versions[second][name].view(-1)[16:]
            ids = batches[unit // 2].reshape(2, -1)[unit % 2]
            items = parts.train.collate(ids)
            parts.dropout.begin(unit // 2, ids)
            parts.optimizer.zero_grad()
            parts.loss(parts.model(*items.inputs), items.targets).backward()
            grads = [value.grad * factor for _, value in parts.named]
            total = grads if total is None else [one + other for one, other in zip(total, grads, strict=True)]
        with torch.no_grad():
            for name, value in parts.named:
                value.copy_(versions[number][name])
        for (_, value), grad in zip(parts.named, total, strict=True):
            value.grad = grad
        set_rate(parts.optimizer, rate(OptimConfig(**LINEAR), number, 16))
        expected = {f"grad/{name}": value.grad.clone() for name, value in parts.named}
        parts.optimizer.step()
        assert_same(found.tensors, expected | model_tensors(parts.named, parts.optimizer, {}))


@pytest.mark.parametrize("rates", [(), (0.5,)])
def test_own_steps_between_reads_by_hand(tmp_path, rates):
    """Two workers: each reads once and goes on by itself, one of them pushes two gradients together."""
    case = case_of(optim=LINEAR)
    numel = {name: value.numel() for name, value in build_reference(case).named}
    pieces = [(name, 0, count, 0) for name, count in numel.items()]
    log = log_of([], adds_to_steps=False, total_updates=6, pieces=pieces, takes_own_steps=True, own_rates=rates)
    parts = [
        part_of(0, [0], 1.0, worker="a"),
        part_of(1, [1], 1.0, worker="b"),
        {**part_of(2, None, 1.0, worker="a"), "works": [{"unit": 2, "read": None}, {"unit": 3, "read": None}]},
    ]
    log = replace(log, updates=[{"parts": [one]} for one in parts])
    run_here(run_replay, case, log, tmp_path)

    plain = build_reference(case)
    batches = list(global_batches(plain))
    server = {name: value.detach().clone() for name, value in plain.named}
    own = {"a": server}

    def gradient(unit, weights):
        with torch.no_grad():
            for name, value in plain.named:
                value.copy_(weights[name])
        ids = batches[unit // 2].reshape(2, -1)[unit % 2]
        items = plain.train.collate(ids)
        plain.dropout.begin(unit // 2, ids)
        plain.optimizer.zero_grad()
        plain.loss(plain.model(*items.inputs), items.targets).backward()
        found = {name: value.grad.clone() for name, value in plain.named}
        lr = rates[0] if rates else rate(OptimConfig(**LINEAR), unit // 2, 8)
        return found, {name: value - lr * found[name] for name, value in weights.items()}

    for number, (found, (worker, units)) in enumerate(
        zip(steps_of(tmp_path), [("a", [0]), ("b", [1]), ("a", [2, 3])], strict=True)
    ):
        weights, total = server if number < 2 else own[worker], None
        for unit in units:
            grads, weights = gradient(unit, weights)
            total = grads if total is None else {name: total[name] + grads[name] for name in grads}
        own[worker] = weights
        for name, value in plain.named:
            torch.testing.assert_close(found.tensors[f"grad/{name}"], total[name], rtol=1e-4, atol=1e-6)
            value.grad = total[name]
        with torch.no_grad():
            for name, value in plain.named:
                value.copy_(server[name])
        set_rate(plain.optimizer, rate(OptimConfig(**LINEAR), number, 6))
        plain.optimizer.step()
        server = {name: value.detach().clone() for name, value in plain.named}
        if number < 2:
            assert_same({name: found.tensors[f"weight/{name}"] for name in server}, server)
