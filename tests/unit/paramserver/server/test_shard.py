"""A shard's replica: same bits as an optimizer over whole tensors, idempotent pushes, and nothing wrong is ever stored."""

import json
from itertools import product

import pytest
import torch
from torch import nn

from shoal.core.errors import RequestError, RunError
from shoal.optim.build import build_optimizer, decide_groups, initialise_state, set_rate
from shoal.optim.config import OptimConfig
from shoal.paramserver.log.queue import GONE_KEPT
from shoal.paramserver.records import PushId
from shoal.paramserver.server.gradients import NotFinite, Rows, WorkerGone, WrongGradient
from shoal.paramserver.server.shard import ShardState, adasum, compensate_delay
from shoal.paramserver.sharding import TensorSpec, cut_model
from support.paramserver.updates import make_update

TORCHS = [f"torch.optim.{name}" for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop")]
"""Their kernels are cut without a trace in the types that weights are trained in, and not in bfloat16."""
OPTIMIZERS = ["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "lars", "lamb"]


def small_model(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 24), nn.Linear(24, 33), nn.LayerNorm(33), nn.Linear(33, 7)).to(dtype)


def specs(model: nn.Module) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()
    }


def shards_of(model: nn.Module, num_shards: int, optim: OptimConfig, **settings) -> list[ShardState]:
    whole = settings.get("aggregation") == "adasum"
    shard_map = cut_model(specs(model), num_shards, optimizer=optim.name, whole_tensors=whole)
    states = [
        ShardState(shard, model=specs(model), optim=optim, groups=decide_groups(optim, model), **settings)
        for shard in shard_map.shards
    ]
    for state in states:
        state.load_weights(dict(model.named_parameters()))
    return states


def flat_part(state: ShardState, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[piece.name].reshape(-1)[piece.start : piece.stop] for piece in state.shard.pieces])


def draw(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*product(OPTIMIZERS, (torch.float32, torch.bfloat16)), *product(TORCHS, (torch.float32, torch.float64))],
)
def test_shards_have_the_bits_of_the_optimizer_over_whole_tensors(name, dtype):
    model = small_model(dtype)
    optim = OptimConfig(name=name, lr=0.05, weight_decay=0.01)
    states = shards_of(model, 3, optim)
    assert any(piece.start for state in states for piece in state.shard.pieces) is (name not in ("lars", "lamb"))
    optimizer = build_optimizer(optim, model)
    initialise_state(optimizer)
    for step in range(3):
        parts = [draw(model, 10 * step + worker) for worker in range(2)]
        for state in states:
            for worker, part in enumerate(parts):
                assert state.store(PushId("ab"[worker], step), flat_part(state, part), step)
            state.apply(make_update(step, ("a", step, 1.0), ("b", step, 0.3)), 0.05 / (step + 1))
        for parameter_name, parameter in model.named_parameters():
            parameter.grad = parts[0][parameter_name] + parts[1][parameter_name] * 0.3
        set_rate(optimizer, 0.05 / (step + 1))
        optimizer.step()
        for state in states:
            assert torch.equal(state.weights, flat_part(state, dict(model.named_parameters())))
            assert state.version == step + 1 and state.num_waiting == 0


def test_a_push_that_is_sent_again_changes_nothing_before_and_after_its_update():
    model, optim = small_model(), OptimConfig(name="sgd")
    (state,) = shards_of(model, 1, optim)
    gradient = flat_part(state, draw(model, 0))
    pushed = gradient.clone()
    assert state.store(PushId("a", 0), pushed, 0)
    pushed.zero_()
    assert not state.store(PushId("a", 0), pushed, 0)
    before = state.weights.clone()
    state.apply(make_update(0, ("a", 0, 1.0)), 1.0)
    assert torch.allclose(state.weights, before - gradient), "a copy was kept, not the sender's memory"
    assert not state.store(PushId("a", 0), gradient, 0)
    assert state.num_waiting == 0


def test_an_update_out_of_order_or_without_its_gradients_is_refused_and_touches_nothing():
    model, optim = small_model(), OptimConfig(name="adamw")
    (state,) = shards_of(model, 1, optim)
    before = state.weights.clone()
    state.store(PushId("a", 0), flat_part(state, draw(model, 0)), 0)
    record = make_update(0, ("a", 0, 1.0), ("b", 7, 1.0))
    assert state.missing(record) == (PushId("b", 7),)
    with pytest.raises(RunError, match="1 of the 2 gradients of update 0; the first it lacks is number 7 of worker b"):
        state.apply(record, 0.1)
    with pytest.raises(RunError, match="version 0 and cannot apply update 1"):
        state.apply(make_update(1, ("a", 0, 1.0)), 0.1)
    assert torch.equal(state.weights, before) and state.version == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_by_name(bad):
    model, optim = small_model(), OptimConfig(name="sgd")
    (state,) = shards_of(model, 1, optim)
    tensors = draw(model, 0)
    tensors["1.weight"][3, 4] = bad
    with pytest.raises(NotFinite, match=r"push 5 of worker a .* gradient of '1.weight' \(1 of"):
        state.store(PushId("a", 5), flat_part(state, tensors), 0)
    assert state.num_waiting == 0
    assert state.store(PushId("a", 5), flat_part(state, draw(model, 0)), 0), "the right one may come later"


def test_a_gradient_whose_sum_overflows_is_finite_all_the_same():
    model, optim = small_model(), OptimConfig(name="sgd")
    (state,) = shards_of(model, 1, optim)
    assert state.store(PushId("a", 0), torch.full((state.shard.numel,), 3e38), 0)


def test_a_gradient_of_another_size_or_dtype_is_refused():
    model, optim = small_model(), OptimConfig(name="sgd")
    (state,) = shards_of(model, 1, optim)
    numel = state.shard.numel
    for wrong in (torch.zeros(numel + 1), torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, 1)):
        with pytest.raises(WrongGradient, match=rf"shard 0 .* must be torch.float32 \({numel},\)"):
            state.store(PushId("a", 0), wrong, 0)


def test_rows_alone_give_what_the_dense_gradient_gives():
    model, optim = small_model(), OptimConfig(name="adagrad")
    for num_shards in (1, 2):
        dense, sparse = shards_of(model, num_shards, optim), shards_of(model, num_shards, optim)
        tensors = draw(model, 0)
        used = torch.tensor([0, 3, 9])
        mask = torch.zeros(11, 1).index_fill_(0, used, 1.0)
        tensors["0.weight"] *= mask
        for left, right in zip(dense, sparse, strict=True):
            left.store(PushId("a", 0), flat_part(left, tensors), 0)
            held = {piece.name: piece for piece in right.shard.pieces}
            rest = [tensors[name].reshape(-1)[one.start : one.stop] for name, one in held.items() if name != "0.weight"]
            rows = {}
            if "0.weight" in held:
                first, last = held["0.weight"].start // 24, held["0.weight"].stop // 24
                own = used[(used >= first) & (used < last)]
                rows = {"0.weight": Rows(indices=own, values=tensors["0.weight"][own])}
            right.store(PushId("a", 0), torch.cat(rest) if rest else torch.empty(0), 0, rows)
            for state in (left, right):
                state.apply(make_update(0, ("a", 0, 1.0)), 0.1)
            assert torch.equal(left.weights, right.weights)


@pytest.mark.parametrize(
    ("name", "indices", "values", "words"),
    [
        ("0.weight", [3, 3], (2, 24), "must increase"),
        ("0.weight", [9, 3], (2, 24), "must increase"),
        ("0.weight", [11], (1, 24), "within 0 to 10"),
        ("0.weight", [-1], (1, 24), "within 0 to 10"),
        ("0.weight", [1], (1, 23), r"\(1, 23\), and must be torch.float32 \(1, 24\)"),
        ("nobody", [1], (1, 24), "does not hold it"),
    ],
)
def test_wrong_rows_are_refused(name, indices, values, words):
    model = nn.Sequential(nn.Embedding(11, 24))
    (state,) = shards_of(model, 1, OptimConfig(name="sgd"))
    with pytest.raises(WrongGradient, match=words):
        state.store(
            PushId("a", 0), torch.empty(0), 0, {name: Rows(indices=torch.tensor(indices), values=torch.zeros(values))}
        )


def test_what_a_dead_worker_never_committed_is_dropped_and_stays_out():
    model, optim = small_model(), OptimConfig(name="sgd")
    (state,) = shards_of(model, 1, optim)
    for worker, number in (("a", 0), ("a", 1), ("b", 0)):
        state.store(PushId(worker, number), flat_part(state, draw(model, number)), 0)
    assert state.discard("a", keep={0}) == 1
    assert state.num_waiting == 2
    assert not state.store(PushId("a", 1), flat_part(state, draw(model, 1)), 0)
    with pytest.raises(WorkerGone, match="worker a has left, and its push 2"):
        state.store(PushId("a", 2), flat_part(state, draw(model, 1)), 0)
    state.apply(make_update(0, ("a", 0, 1.0), dropped=(PushId("b", 0),)), 0.1)
    assert state.num_waiting == 0


def test_departed_workers_are_remembered_up_to_a_number():
    """Every one was kept for ever, and copied into every new backup."""
    model = small_model()
    (state,) = shards_of(model, 1, OptimConfig(name="sgd"))
    for number in range(GONE_KEPT + 10):
        state.discard(f"worker-{number}", keep={3})
        # What the log leader still tells of; it must not go for that.
        state.discard(f"worker-{max(0, number - 200)}", keep={3})
    gone = dict(state.export()[1]["gone"])
    assert len(gone) == GONE_KEPT and f"worker-{GONE_KEPT + 9}" in gone and "worker-0" not in gone
    with pytest.raises(WorkerGone):
        state.store(PushId("worker-600", 0), flat_part(state, draw(model, 0)), 0)


@pytest.mark.parametrize("name", ["momentum", "adamw", "adagrad", "torch.optim.NAdam"])
def test_a_restored_replica_goes_on_with_the_same_bits(name):
    model, optim = small_model(), OptimConfig(name=name, weight_decay=0.1)
    settings = {"compensation": 0.04, "history": 2}
    first, second = (shards_of(model, 2, optim, **settings)[1] for _ in range(2))
    for number in range(3):
        first.store(PushId("a", number), flat_part(first, draw(model, number)), max(0, number - 1))
        if number < 2:
            first.apply(make_update(number, ("a", number, 1.0)), 0.1)
    first.discard("z", keep={4})
    tensors, values = first.export()
    second.restore(tensors, json.loads(json.dumps(values)))
    assert not second.store(PushId("a", 0), tensors["weights"], 0)
    for state in (first, second):
        state.apply(make_update(2, ("a", 2, 1.0)), 0.1)
    assert torch.equal(first.weights, second.weights) and second.version == 3
    assert all(torch.equal(one, second.optimizer_state()[name]) for name, one in first.optimizer_state().items())
    assert second.export()[1] == first.export()[1]
    other = shards_of(model, 2, optim)[0]
    with pytest.raises(RunError, match="snapshot of shard 1 does not fit shard 0"):
        other.restore(tensors, values)
    with pytest.raises(RunError, match="is missing"):
        second.restore({key: one for key, one in tensors.items() if key != "weights"}, values)


def test_parts_and_their_places_make_up_the_whole_model():
    model, optim = small_model(), OptimConfig(name="adamw")
    whole = {name: torch.full_like(parameter, float("nan")) for name, parameter in model.named_parameters()}
    for state in shards_of(model, 4, optim):
        placements, parts, moments = state.placements(), state.parameters(), state.optimizer_state()
        assert {f"{name}/{key}" for name in parts for key in ("step", "exp_avg", "exp_avg_sq")} == set(moments)
        for name, part in parts.items():
            (patch,) = placements[name].patches
            first = patch.whole_start[0]
            whole[name][first : first + patch.shape[0]] = part
            assert part.shape == moments[f"{name}/exp_avg"].shape == placements[name].local_shape
    assert all(torch.equal(whole[name], parameter) for name, parameter in model.named_parameters())


def test_delay_compensation_moves_a_late_gradient_from_what_it_read():
    model, optim = small_model(), OptimConfig(name="sgd")
    (state,) = shards_of(model, 1, optim, compensation=0.5, history=2)
    gradients = [flat_part(state, draw(model, number)) for number in range(4)]
    versions = [state.weights.clone()]
    # The last one read version 0, which is forgotten; version 1 is the oldest that is kept.
    for number, (read, counted) in enumerate([(0, 0), (0, 0), (2, 2), (0, 1)]):
        state.store(PushId("a", number), gradients[number], read)
        state.apply(make_update(number, ("a", number, 1.0)), 0.1)
        moved = compensate_delay(gradients[number], versions[-1], versions[counted], 0.5)
        moved = gradients[number] if read == number else moved
        versions.append(versions[-1] - 0.1 * moved)
        assert torch.allclose(state.weights, versions[-1], rtol=0, atol=1e-6)


def test_adasum_is_by_tensor_and_needs_whole_ones():
    model, optim = small_model(), OptimConfig(name="sgd")
    states = shards_of(model, 2, optim, aggregation="adasum")
    first, second = draw(model, 0), draw(model, 1)
    for state in states:
        before = state.weights.clone()
        state.store(PushId("a", 0), flat_part(state, first), 0)
        state.store(PushId("b", 0), flat_part(state, second), 0)
        state.apply(make_update(0, ("a", 0, 1.0), ("b", 0, 1.0)), 1.0)
        joined = {name: adasum([first[name], second[name]]) for name in first}
        assert torch.allclose(state.weights, before - flat_part(state, joined), atol=1e-6)
    cut = cut_model(specs(model), 2).shards[0]
    with pytest.raises(RequestError, match="adasum needs whole tensors, and shard 0 has a part of"):
        ShardState(cut, model=specs(model), optim=optim, groups=decide_groups(optim, model), aggregation="adasum")
    lars = OptimConfig(name="lars")
    with pytest.raises(RequestError, match="lars needs whole tensors"):
        ShardState(cut, model=specs(model), optim=lars, groups=decide_groups(lars, model))


def test_whoever_looks_on_sees_every_update_with_what_made_it():
    """The gradients are those that were added up, not what an optimizer may have made of their memory."""
    model = small_model()
    (state,) = shards_of(model, 1, OptimConfig(name="adam", lr=0.1, weight_decay=0.5))
    gradients, seen = draw(model, 1), []
    state.on_update = lambda record, found: seen.append((record.number, state.version, found))
    state.store(PushId("w", 0), flat_part(state, gradients), 0)
    state.store(PushId("v", 0), flat_part(state, gradients), 0)
    state.apply(make_update(0, ("w", 0, 1.0), ("v", 0, 0.5)), 0.1)
    ((number, version, found),) = seen
    assert (number, version) == (0, 1) and found.keys() == gradients.keys()
    assert all(torch.equal(found[name], gradients[name] + gradients[name] * 0.5) for name in gradients)
