"""What an update makes of its pushes under every rule and every way of joining them, against formulas by hand."""

import pytest
import torch
from torch import nn

from shoal.core.updaterule import UpdateRule
from shoal.optim.build import decide_groups
from shoal.optim.config import OptimConfig
from shoal.paramserver.consistency import is_share_of_step
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.records import PushId, PushRecord, WorkUnit
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.sharding import TensorSpec, cut_model
from shoal.paramserver.worker.own_steps import LocalSettings, train_locally

LR = 0.5
SAMPLES = {"a": 3, "b": 5}


def start():
    return torch.arange(6.0) / 4 - 0.6


def own_mean(worker):
    """The mean gradient over a worker's own samples."""
    return torch.randn(6, generator=torch.Generator().manual_seed(ord(worker)))


def adasum_of(left, right):
    dot = left.double() @ right.double()
    return (
        (1 - dot / (2 * left.double().square().sum())) * left + (1 - dot / (2 * right.double().square().sum())) * right
    ).float()


def a_shard(aggregate):
    module = nn.Module()
    module.weight = nn.Parameter(start())
    model = {"weight": TensorSpec((6,), "float32")}
    optim = OptimConfig(name="sgd", lr=LR)
    (shard,) = cut_model(model, 1, whole_tensors=True).shards
    state = ShardState(
        shard,
        model=model,
        optim=optim,
        groups=decide_groups(optim, module),
        aggregation="adasum" if aggregate == "adasum" else "sum",
    )
    state.load_weights({"weight": module.weight})
    return state


def update_of(update, aggregate, versions):
    """What the weights move by when both workers push once; each has read the version that is said."""
    rule = UpdateRule.parse(update).resolve(2)
    update_log, state = UpdateLog(rule=rule, workers=2, steps=9, aggregate=aggregate), a_shard(aggregate)
    for index, worker in enumerate("ab"):
        update_log.join(worker, index, 0.0)
    # Updates that nothing happens in, so that a read can be late.
    for number in range(max(versions.values())):
        unit = update_log.take("a", 0.0)
        commit(update_log, state, "a", number, unit.number, number, torch.zeros(6))
    for record in update_log.log(state.version):
        state.apply(record, LR)
    before, number = state.weights.clone(), max(versions.values())
    units = {worker: update_log.take(worker, 0.0) for worker in "ab"}
    assert all(isinstance(unit, WorkUnit) for unit in units.values())
    for worker, unit in units.items():
        share = SAMPLES[worker] / 8 if is_share_of_step(rule, aggregate) else 1.0
        commit(update_log, state, worker, number, unit.number, versions[worker], own_mean(worker) * share)
    for record in update_log.log(state.version):
        state.apply(record, LR)
    return (before - state.weights) / LR


def commit(update_log, state, worker, number, unit, version, gradient, **more):
    state.store(PushId(worker, number), gradient, version)
    update_log.commit(
        PushRecord(
            worker=worker,
            number=number,
            units=(unit,),
            samples=SAMPLES[worker],
            weight=SAMPLES[worker],
            loss=1.0,
            version=version,
            **more,
        ),
        1.0,
    )


A, B = own_mean("a"), own_mean("b")
ON_TIME = {"a": 0, "b": 0}
CASES = [
    ("bsp", "average", ON_TIME, (3 * A + 5 * B) / 8),
    ("bsp", "accumulate", ON_TIME, A + B),
    ("bsp", "adasum", ON_TIME, adasum_of(A, B)),
    ("half:2,0", "average", ON_TIME, (3 * A + 5 * B) / 8),
    ("half:2,0", "accumulate", ON_TIME, A + B),
    ("half:2,0", "adasum", ON_TIME, adasum_of(A, B)),
    # Both apply by themselves, one after the other: nothing is joined.
    ("async", "average", ON_TIME, A + B),
    ("async", "accumulate", ON_TIME, A + B),
    ("async", "adasum", ON_TIME, A + B),
]


@pytest.mark.parametrize(("update", "aggregate", "versions", "expected"), CASES, ids=lambda value: str(value)[:12])
def test_an_update_is_what_the_formula_says(update, aggregate, versions, expected):
    torch.testing.assert_close(update_of(update, aggregate, versions), expected)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("average", (3 * A + 2.5 * B) / 5.5),
        ("accumulate", A + B / 2),
        ("adasum", adasum_of(A, B / 2)),
    ],
)
def test_one_that_is_an_update_late_counts_half(aggregate, expected):
    torch.testing.assert_close(late_update(aggregate), expected)


def late_update(aggregate):
    """An update of half, where b has read the version before."""
    rule = UpdateRule.parse("half:1,0").resolve(2)
    update_log, state = UpdateLog(rule=rule, workers=2, steps=9, aggregate=aggregate), a_shard(aggregate)
    for index, worker in enumerate("ab"):
        update_log.join(worker, index, 0.0)
    slow = update_log.take("b", 0.0)
    commit(update_log, state, "a", 0, update_log.take("a", 0.0).number, 0, torch.zeros(6))
    state.apply(update_log.log(0)[0], LR)
    # From here on an update waits for two.
    update_log.rule = UpdateRule.parse("half:2,0").resolve(2)
    commit(update_log, state, "a", 1, update_log.take("a", 0.0).number, 1, A)
    commit(update_log, state, "b", 0, slow.number, 0, B)
    before = state.weights.clone()
    state.apply(update_log.log(1)[0], LR)
    return (before - state.weights) / LR


CENTRES = {"a": torch.linspace(-2.0, 1.0, 6), "b": torch.linspace(3.0, 0.5, 6)}
LOCAL_STEPS = {"a": 1, "b": 8}


@pytest.mark.parametrize(("update", "rate"), [("bsp", 0.05), ("half:2,0", 0.05), ("async", 0.02)])
def test_fednova_reaches_the_best_place_of_unequal_workers(update, rate):
    """Each worker pulls to its own centre, weighted by its samples; one of them takes eight times as many steps."""
    update_log = UpdateLog(
        rule=UpdateRule.parse(update).resolve(2), workers=2, steps=150, aggregate="fednova", mean_steps=4.5
    )
    state = a_shard("fednova")
    for index, worker in enumerate("ab"):
        update_log.join(worker, index, 0.0)
    for number in range(150):
        units = {worker: update_log.take(worker, 0.0).number for worker in "ab"}
        begun, version = state.weights.clone(), state.version
        for worker, unit in units.items():
            # Under async the samples cannot tell who counts how much, so both pull alike there.
            pull = 1.0 if update == "async" else 0.5
            done = train_locally(
                begun,
                lambda weights, _step, worker=worker, pull=pull: pull * (weights - CENTRES[worker]),
                LocalSettings(steps=LOCAL_STEPS[worker], lr=0.001),
            )
            commit(update_log, state, worker, number, unit, version, done.direction, steps=done.steps)
        for record in update_log.log(state.version):
            state.apply(record, rate)
    shares = {"a": 0.5, "b": 0.5} if update == "async" else {"a": 3 / 8, "b": 5 / 8}
    best = sum(share * CENTRES[worker] for worker, share in shares.items())
    apart = torch.linalg.vector_norm(CENTRES["a"] - CENTRES["b"])
    assert torch.linalg.vector_norm(state.weights - best) < 0.05 * apart
