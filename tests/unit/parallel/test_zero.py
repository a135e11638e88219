"""The behaviour of ZeRO in one process: what modules see, when weights are there, and what is refused.

With one replica nothing crosses, but every hook, buffer and view is used as with many; the bits against many ranks are in
``tests/parity/test_zero.py``.
"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.mesh import pretend_mesh
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.parallel.analysis.structure import ModuleAnalysis, Stack
from shoal.parallel.zero.apply import apply_zero


class Block(nn.Module):
    """Gives a tuple and a dict, as models of other people do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.inner(x))), {"extra": x}


class Net(nn.Module):
    """Tied ends, blocks that can be called twice or be recomputed, and a parameter of the root's own."""

    def __init__(self, times=1, recompute=None):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.times = times
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            for _ in range(self.times):
                if self.recompute is None:
                    x, _ = block(x)
                else:
                    x, _ = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


class Sharing(Net):
    """Blocks that all read what the first one made beside its stream, and put it out again, as those of T5 do with a bias."""

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        bias = x
        for block in self.blocks:
            # By way of the block's own call: its outputs are the new stream and what it was given.
            x, beside = block(x + 0.1 * bias)
            bias = beside["extra"]
        return self.head(x)


ANALYSIS = ModuleAnalysis(stacks=(Stack(blocks=("blocks.0", "blocks.1", "blocks.2")),))
TOKENS = torch.arange(22).reshape(2, 11) % 11


def build(**how):
    torch.manual_seed(2)
    return Net(**how)


def shard(model, stage, *, dp=1, num_microbatches=1, rank=0):
    mesh = pretend_mesh(Plan(dp=dp), rank)
    how = {"stage": stage, "num_microbatches": num_microbatches, "placements": {}}
    return apply_zero(model, analysis=ANALYSIS, mesh=mesh, **how)


def step(model, reduction, num_microbatches=1):
    reduction.begin_step()
    for index in range(num_microbatches):
        with reduction.microbatch(is_last=index == num_microbatches - 1):
            model(TOKENS + 0 * index).square().mean().backward()
    reduction.finish()
    return {name: piece.grad for name, piece in reduction.updated.items()}


def plain_gradients(model, num_microbatches=1):
    for _ in range(num_microbatches):
        model(TOKENS).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "how",
    [{}, {"times": 2}, {"recompute": "yes"}, {"recompute": "yes", "times": 2}, {"recompute": "reentrant"}],
    ids=str,
)
def test_gradients_are_those_of_the_plain_model(stage, num_microbatches, how):
    plain = plain_gradients(build(**how), num_microbatches)
    model = build(**how)
    reduction = shard(model, stage, num_microbatches=num_microbatches)
    for _ in range(2):
        found = step(model, reduction, num_microbatches)
        reduction.publish()
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain)
        assert reduction.untouched() == []
        assert all(parameter.grad is None for parameter in model.parameters())


def test_at_stage_3_weights_are_there_only_while_they_are_used():
    model = build()
    reduction = shard(model, 3)
    seen = []
    model.blocks[1].inner.register_forward_hook(
        lambda *_: seen.append([bool(block.inner.weight.isnan().any()) for block in model.blocks])
    )
    with torch.no_grad():
        output = model(TOKENS)
    assert seen == [[True, False, True]]
    assert torch.equal(output, build()(TOKENS))
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [
        tuple(p.shape) for p in build().parameters()
    ]
    assert reduction.stage == 3


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_block_that_puts_out_what_it_was_given_is_not_gathered_again(num_microbatches):
    """The gradient of that comes when the backward pass of the block is over."""
    model = Sharing()
    mesh = pretend_mesh(Plan(dp=2))
    how = {"stage": 3, "num_microbatches": num_microbatches, "placements": {}}
    reduction = apply_zero(model, analysis=ANALYSIS, mesh=mesh, **how)
    for _ in range(2):
        with mesh.traffic.counting() as counted:
            step(model, reduction, num_microbatches)
        assert dict(counted) == reduction.forecast_traffic(num_microbatches)
        reduction.publish()


def test_a_forward_pass_that_fails_leaves_nothing_behind():
    model = build()
    reduction = shard(model, 3)
    reduction.begin_step()
    with pytest.raises(IndexError), reduction.microbatch(is_last=True):
        model(torch.tensor([[99]]))
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
    plain = plain_gradients(build())
    assert all(torch.equal(gradient, plain[name]) for name, gradient in step(model, reduction).items())


def test_updated_weights_are_what_the_next_pass_reads():
    for stage in (1, 2, 3):
        model, plain = build(), build()
        reduction = shard(model, stage)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.mul_(0.5)
                reduction.updated[name].mul_(0.5)
        reduction.publish()
        assert torch.equal(model(TOKENS), plain(TOKENS))
        if reduction.store is not None:
            reduction.store.end_microbatch()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_without_a_gradient_is_named_and_counts_as_zero(stage):
    model = build()
    model.blocks[1].register_parameter("spare", nn.Parameter(torch.ones(5)))
    reduction = shard(model, stage)
    found = step(model, reduction)
    assert reduction.untouched() == ["blocks.1.spare"]
    assert not found["blocks.1.spare"].any()
    plain = plain_gradients(build())
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_local_gradients_are_seen_by_hooks_and_take_no_memory(stage):
    """A rank that holds a shard of the model must not hold all of it while the origin of a NaN is looked for."""
    model = build()
    reduction = shard(model, stage)
    step(model, reduction)
    before = (reduction.gradients.num_pool_bytes, reduction.store.num_pool_bytes if reduction.store is not None else 0)
    seen = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.update({name: gradient.clone()}))
    for _ in range(2):
        with reduction.local():
            model(TOKENS).square().mean().backward()
    plain = plain_gradients(build())
    assert all(torch.equal(seen[name], plain[name]) for name in plain)
    assert all(parameter.grad is None for parameter in model.parameters())
    after = (reduction.gradients.num_pool_bytes, reduction.store.num_pool_bytes if reduction.store is not None else 0)
    assert after == before


def test_an_activation_changed_in_place_is_refused_as_torch_does():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            y = self.inner(x).exp()
            out = y * y
            y += 1
            return out

    model = nn.Sequential(Wrong())
    reduction = apply_zero(
        model,
        analysis=ModuleAnalysis(stacks=(Stack(blocks=("0",)),)),
        mesh=pretend_mesh(Plan(dp=1)),
        stage=3,
        num_microbatches=1,
        placements={},
    )
    reduction.begin_step()
    with pytest.raises(RunError, match="changed in place"), reduction.microbatch(is_last=True):
        model(torch.ones(1, 8)).sum().backward()


def test_a_second_backward_pass_is_refused():
    model = build()
    reduction = shard(model, 2)
    step(model, reduction)
    with pytest.raises(RunError, match="one backward pass per microbatch"):
        model(TOKENS).sum().backward()


def test_weights_of_two_types_are_refused_with_both_names():
    model = build()
    model.blocks[0].inner.weight.data = model.blocks[0].inner.weight.data.double()
    with pytest.raises(RequestError, match=r"'scale' is torch\.float32.*'blocks\.0\.inner\.weight' is torch\.float64"):
        shard(model, 1)
    with pytest.raises(RequestError, match="no trainable parameter"):
        apply_zero(
            nn.ReLU(),
            analysis=ModuleAnalysis(),
            mesh=pretend_mesh(Plan(dp=2)),
            stage=1,
            num_microbatches=1,
            placements={},
        )


def test_buffers_are_made_once():
    model = copy.deepcopy(build())
    reduction = shard(model, 3)
    step(model, reduction)
    before = reduction.store.num_pool_bytes, reduction.gradients.num_pool_bytes
    for _ in range(3):
        step(model, reduction)
    assert (reduction.store.num_pool_bytes, reduction.gradients.num_pool_bytes) == before


@pytest.mark.parametrize("recompute", [None, "yes"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_that_nobody_uses_any_more_goes_away(stage, recompute):
    """At stage 3 it stayed, with gloo's groups and their threads: a process that tried 67 plans had 40 groups left of them."""
    model = build(recompute=recompute)
    reduction = shard(model, stage)
    step(model, reduction)
    reduction.publish()
    watched = weakref.ref(reduction), weakref.ref(model)
    del model, reduction
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
