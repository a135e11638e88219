"""A step's sums in the order of a pipeline: by direction, by turn, and by the stage that uses a tied weight."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from shoal.core.errors import RequestError
from shoal.data.order import own_microbatches
from shoal.verify.proof import Prover
from shoal.verify.reference.case import Tree
from shoal.verify.reference.model import build_reference, cut_batch
from shoal.verify.reference.train import tree_gradients
from shoal.verify.reference.weight_uses import split_uses
from support.training.replay_cases import GPT, case_of

TIED = {**GPT, "tied": True}
TWO = {
    "users": {"embedding.weight": [0, 1]},
    "uses": {"embedding.weight": [["embedding.weight"], ["head.weight"]]},
    "places": ["blocks.0"],
    "units": ["embedding", "blocks.0", "head"],
}
"""Two stages, with the embedding in the first and the head in the second."""


@pytest.mark.parametrize("num_samples", [1, 2, 5, 6, 7, 13])
def test_a_batch_is_cut_as_the_loader_cuts_it(num_samples):
    ids = np.arange(num_samples) * 3
    cuts = cut_batch(ids, Tree(replicas=2, microbatches=3))
    assert [len(own) for own in cuts] == [3, 3]
    for replica, own in enumerate(cuts):
        loaded = own_microbatches(ids, replica, 2, 3)
        assert [cut.tolist() for cut in own if len(cut)] == [cut.tolist() for cut in loaded]


def test_directions_decide_the_bits_and_not_the_value():
    one, two = (
        tree_gradients(
            build_reference(case_of()), 0, np.arange(8), Tree(replicas=2, microbatches=4, directions=ways), 1.0
        )
        for ways in (1, 2)
    )
    assert any(not torch.equal(one[1][name], two[1][name]) for name in one[1])
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    for name in one[1]:
        torch.testing.assert_close(one[1][name], two[1][name], rtol=1e-5, atol=1e-6)


def use_gradients(parts, cuts, total):
    """Sums over some microbatches with the embedding and the head as two weights."""
    weights = {name: value.detach().clone().requires_grad_() for name, value in parts.named}
    weights["head.weight"] = weights["embedding.weight"].detach().clone().requires_grad_()
    for cut in cuts:
        items = parts.train.collate(cut)
        parts.dropout.begin(0, cut)
        output = functional_call(parts.model, weights, items.inputs, tie_weights=False)
        (parts.loss(output, items.targets) * (items.weight / total)).backward()
    return {name: value.grad for name, value in weights.items()}


def test_a_tied_weight_is_the_fold_of_its_directions_and_stages():
    """Three microbatches: two go down and one goes up."""
    parts, ids = build_reference(case_of(model=TIED)), np.arange(12)
    _, found = tree_gradients(parts, 0, ids, Tree(replicas=2, microbatches=3, directions=2, **TWO), 1.0)
    total, cuts = float(parts.train.collate(ids).weight), ids.reshape(6, 2)
    replicas = []
    for first in (0, 3):
        down, up = (
            use_gradients(parts, cuts[first : first + 2], total),
            use_gradients(parts, cuts[first + 2 :][:1], total),
        )
        own = {name: down[name] + up[name] for name in down}
        own["embedding.weight"] = (
            down["embedding.weight"] + down["head.weight"] + up["embedding.weight"] + up["head.weight"]
        )
        replicas.append(own)
    for name in found:
        assert torch.equal(found[name], replicas[0][name] + replicas[1][name]), name
    _, plain = tree_gradients(parts, 0, ids, Tree(replicas=1, microbatches=1), 1.0)
    torch.testing.assert_close(found["embedding.weight"], plain["embedding.weight"], rtol=1e-5, atol=1e-6)


def test_a_stage_of_several_ranks_has_a_sum_for_each_in_turn():
    """Five microbatches on two ranks: 0, 2, 4 and 1, 3. The tied weight is used by one rank at its other end."""
    parts, ids = build_reference(case_of(model=TIED)), np.arange(10)
    down = "blocks.0.feed_forward.down.weight"
    turned = {"embedding.weight": [2, 1], down: [2]}
    assert set(turned) <= dict(parts.named).keys()
    loss, found = tree_gradients(parts, 0, ids, Tree(replicas=1, microbatches=5, **TWO, turns=turned), 1.0)
    total, cuts = float(parts.train.collate(ids).weight), ids.reshape(5, 2)
    even, odd, every = (use_gradients(parts, own, total) for own in (cuts[::2], cuts[1::2], cuts))
    expected = dict(every)
    expected[down] = even[down] + odd[down]
    expected["embedding.weight"] = even["embedding.weight"] + every["head.weight"] + odd["embedding.weight"]
    for name in found:
        assert torch.equal(found[name], expected[name]), name
    plain_loss, plain = tree_gradients(parts, 0, ids, Tree(replicas=1, microbatches=5, **TWO), 1.0)
    assert loss == plain_loss
    assert not torch.equal(found["embedding.weight"], plain["embedding.weight"]), "other bits, or this compares nothing"
    torch.testing.assert_close(found["embedding.weight"], plain["embedding.weight"], rtol=1e-5, atol=1e-6)


def test_a_rank_without_a_microbatch_adds_nothing():
    parts = build_reference(case_of())
    turned = {name: [2] for name, _ in parts.named}
    loss, found = tree_gradients(parts, 0, np.arange(1), Tree(replicas=1, microbatches=4, turns=turned), 1.0)
    plain_loss, plain = tree_gradients(parts, 0, np.arange(1), Tree(replicas=1, microbatches=1), 1.0)
    assert loss == plain_loss and all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_step_leaves_tied_weights_tied():
    parts = build_reference(case_of(model=TIED))
    weight = parts.model.embedding.weight
    tree_gradients(parts, 0, np.arange(4), Tree(replicas=1, microbatches=2, **TWO), 1.0)
    assert parts.model.embedding.weight is weight and parts.model.head.weight is weight
    with pytest.raises(ZeroDivisionError), split_uses(parts.model, Tree(replicas=1, microbatches=2, **TWO)):
        assert parts.model.head.weight is not parts.model.embedding.weight
        raise ZeroDivisionError
    assert parts.model.head.weight is weight


def test_a_short_batch_leaves_a_direction_without_samples():
    parts = build_reference(case_of(model=TIED))
    tree = Tree(replicas=1, microbatches=4, directions=2, **TWO)
    loss, found = tree_gradients(parts, 0, np.arange(2), tree, 1.0)
    plain_loss, plain = tree_gradients(parts, 0, np.arange(2), Tree(replicas=1, microbatches=2, **TWO), 1.0)
    assert loss == plain_loss
    assert all(torch.equal(found[name], plain[name]) for name in plain)


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))

    def forward(self, x, table):
        return torch.tanh(x * self.weight) @ table


class Shared(nn.Module):
    """Two units, a stage each, and a weight that both stages read; the twin has another one for the second stage."""

    def __init__(self, twin=False):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two, self.table = Adds(), Adds(), nn.Parameter(torch.randn(5, 5))
        self.other = nn.Parameter(self.table.detach().clone()) if twin else None

    @property
    def late(self):
        return self.table if self.other is None else self.other


class ReadTwice(Shared):
    """As a head that is tied by hand."""

    def forward(self, x):
        return self.two(self.one(x, self.table), torch.eye(5)) @ self.late


class Handed(Shared):
    """Read once, outside of every unit, and given to units of both stages, as DeBERTa's relative positions are."""

    def forward(self, x):
        table = torch.sin(self.table)
        late = table if self.other is None else torch.sin(self.other)
        return self.two(self.one(x, table), late)


class Mixed(Shared):
    """What the first stage made of it meets what a unit of the second put out, outside of every unit."""

    def forward(self, x):
        table = torch.sin(self.table)
        return self.two(self.one(x, table), torch.eye(5)) @ table


STAGES = Tree(
    replicas=1, microbatches=3, users={"table": [0, 1]}, uses={"table": [[], []]}, places=["two"], units=["one", "two"]
)


@pytest.mark.parametrize("build", [ReadTwice, Handed])
def test_every_stage_that_reads_a_weight_outside_of_units_has_a_gradient_of_its_own(build):
    """One of them was an assertion that failed, the other gave all gradients to the first stage, a rounding apart."""
    model, twin = build(), build(twin=True)
    batches = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    with split_uses(model, STAGES) as split:
        for batch in batches:
            split.backward(model(batch).square().sum())
            twin(batch).square().sum().backward()
    first, second = split.leaves["table"]
    assert torch.equal(first.grad, twin.table.grad) and torch.equal(second.grad, twin.other.grad)
    assert not torch.equal(first.grad, second.grad) and torch.equal(model.two.weight.grad, twin.two.weight.grad)
    assert model.table.grad is None and isinstance(model.table, nn.Parameter)


class Held(nn.Module):
    """Made of a weight outside of every unit, of which the units have a use of their own too."""

    def __init__(self, twin=False):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two, self.table = Adds(), Adds(), nn.Parameter(torch.randn(5))
        self.one.weight = self.table
        self.two.weight = nn.Parameter(self.table.detach().clone()) if twin else self.table

    def forward(self, x):
        table = torch.diag(torch.sin(self.table))
        late = table if self.two.weight is self.table else torch.diag(torch.sin(self.two.weight))
        return self.two(self.one(x, table), late)


def test_what_a_stage_uses_inside_and_outside_of_units_is_one_sum_for_each_microbatch():
    """They were added to the sum over microbatches one after the other, a rounding away from the stage's own pass."""
    model, twin = Held(), Held(twin=True)
    names = [["table", "one.weight"], ["two.weight"]]
    tree = Tree(
        replicas=1,
        microbatches=8,
        users={"table": [0, 1]},
        uses={"table": names},
        places=["two"],
        units=["one", "two"],
    )
    with split_uses(model, tree) as split:
        for batch in torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(1)):
            split.backward(model(batch).square().sum())
            twin(batch).square().sum().backward()
    first, second = split.leaves["table"]
    assert torch.equal(first.grad, twin.table.grad) and torch.equal(second.grad, twin.two.weight.grad)


class ReadOnTheWay(nn.Module):
    """The last of three stages is given something that was made of a weight in the time of both stages before it."""

    def __init__(self, twin=False):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two, self.three, self.table = Adds(), Adds(), Adds(), nn.Parameter(torch.randn(5, 5))
        self.others = nn.ParameterList([self.table.detach().clone() for _ in range(2)] if twin else [])

    def forward(self, x):
        early, middle, late = (self.table, *self.others) if len(self.others) else (self.table,) * 3
        x = self.two(self.one(x, torch.sin(early)), torch.sin(middle))
        return self.three(x, torch.sin(late) + torch.cos(late))


class ReadOnce(ReadOnTheWay):
    def forward(self, x):
        table = torch.sin(self.table)
        x = self.two(self.one(x, table), table)
        return self.three(x, table + torch.cos(self.table))


def test_a_stage_gets_the_gradients_of_all_that_earlier_ones_read_for_it():
    """Of two leaves that had none yet the second took the first one's place, and a gradient was lost."""
    model, twin = ReadOnce(), ReadOnTheWay(twin=True)
    tree = Tree(
        replicas=1,
        microbatches=2,
        users={"table": [0, 1, 2]},
        uses={"table": [[], [], []]},
        places=["two", "three"],
        units=["one", "two", "three"],
    )
    with split_uses(model, tree) as split:
        for batch in torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1)):
            split.backward(model(batch).square().sum())
            twin(batch).square().sum().backward()
    expected = [twin.table.grad, *(other.grad for other in twin.others)]
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(split.leaves["table"], expected, strict=True))


def test_uses_that_cannot_be_told_apart_are_refused():
    model = Mixed()
    with (
        pytest.raises(RequestError, match=r"2 stages use parameter 'table', .* cannot tell"),
        split_uses(model, STAGES),
    ):
        model(torch.randn(4, 5))


def test_a_module_that_two_stages_call_has_a_gradient_for_each():
    torch.manual_seed(2)
    layer, between = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
    model = nn.Sequential(layer, between, layer)
    names = [["0.weight", "2.weight"], ["0.weight", "2.weight"]]
    tree = Tree(
        replicas=1, microbatches=1, users={"0.weight": [0, 1]}, uses={"0.weight": names}, places=["1"], units=["0", "1"]
    )
    x, other = torch.randn(2, 3), layer.weight.detach().clone().requires_grad_()
    with split_uses(model, tree) as split:
        model(x).sum().backward()
    (nn.functional.linear(between(layer(x)), other)).sum().backward()
    first, second = split.leaves["0.weight"]
    assert torch.equal(first.grad, layer.weight.grad) and torch.equal(second.grad, other.grad)


def test_every_part_of_a_tree_goes_to_the_reference(monkeypatch):
    """Two trees that differ in one field have two references; the same tree, read back from JSON, has one."""
    jobs = []
    monkeypatch.setattr("shoal.launch.pool.Pool.run", lambda pool, job, **options: jobs.append(job))
    fields = {
        "directions": 2,
        **TWO,
        "turns": {"norm.weight": [2]},
        "delay": "pipedream",
        "stages": (("a",), ("b",)),
    }
    trees = [Tree(replicas=1, microbatches=2, **{name: value}) for name, value in fields.items()]
    with Prover(steps=1) as prover:
        for tree in [*trees, *(Tree(**json.loads(json.dumps(asdict(tree)))) for tree in trees)]:
            prover._reference(case_of(), tree)
    assert len(jobs) == len(trees)
    for job, (name, value) in zip(jobs, fields.items(), strict=True):
        assert job["tree"][name] == value
