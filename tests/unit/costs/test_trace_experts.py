"""Experts in a traced module: seen by what is computed with their weights, not by names."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.costs.layers import OpKind
from shoal.costs.trace import trace_module
from shoal.pipeline.stand_in import StandIns
from shoal.planner.hardware.software import SOFTWARE
from shoal.planner.pricing.job import expert_weights, weight_groups

WIDTH, INNER, EXPERTS, CHOSEN, LENGTH, LAYERS = 16, 24, 4, 2, 32, 6


class ChosenByExperts(nn.Module):
    """Each expert takes as many tokens as are its share: products in batches (Zhou et al. 2022, arXiv:2202.09368)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.reshape(-1, WIDTH)
        weights, taken = self.gate(x_TD).softmax(-1).t().topk(len(x_TD) * CHOSEN // EXPERTS, -1)
        y_ECD = x_TD[taken.flatten()].reshape(EXPERTS, -1, WIDTH)
        y_ECD = self.compute(y_ECD) * weights.unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, taken.flatten(), y_ECD.reshape(-1, WIDTH)).reshape(x_BLD.shape)

    def compute(self, y_ECD: Tensor) -> Tensor:
        return F.gelu(y_ECD @ self.up) @ self.down


class InGroups(ChosenByExperts):
    """The same as torch's grouped products."""

    def compute(self, y_ECD: Tensor) -> Tensor:
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * y_ECD.shape[1]
        y_TD = F.gelu(torch._grouped_mm(y_ECD.reshape(-1, WIDTH), self.up, offs=ends))
        return torch._grouped_mm(y_TD, self.down, offs=ends).reshape(y_ECD.shape)


class ByEinsum(ChosenByExperts):
    def compute(self, y_ECD: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("ecd,edf->ecf", y_ECD, self.up))
        return torch.einsum("ecf,efd->ecd", hidden, self.down)


class ByIndex(nn.Module):
    """A loop over experts that asks who chose each: its shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            at = torch.where(chosen == number)
            x = x.index_put(at, expert(x[at]))
        return x


class Heads(nn.Module):
    """A matrix for each head: a batch of products with one parameter, and nobody chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH // EXPERTS, WIDTH // EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.reshape(-1, EXPERTS, WIDTH // EXPERTS).transpose(0, 1)
        return (parts @ self.weight).transpose(0, 1).reshape(x.shape)


class BesideScores(Heads):
    """A softmax by hand picks the largest score, and asks nobody where it was."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2)
        scores = (scores - scores.max(-1, keepdim=True).values).exp()
        return super().forward(scores @ x)


class Twice(nn.Module):
    """Two sets of experts in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ChosenByExperts(), InGroups()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def trace(kind: type[nn.Module], num_layers: int = LAYERS):
    model = nn.Sequential(*(Block(kind()) for _ in range(num_layers)))
    return trace_module(model, (torch.randn(2, LENGTH, WIDTH),), name="traced")


@pytest.mark.parametrize("kind", [ChosenByExperts, InGroups, ByEinsum])
def test_experts_are_found_with_their_rows_weights_and_what_travels(kind):
    """They were dense layers, and ep was never tried; products in groups were not counted at all, and refused in float32."""
    chain = trace(kind)
    assert chain.experts == EXPERTS and chain.num_blocks == LAYERS
    rows = LENGTH * CHOSEN
    for layer in chain.layers:
        found = [(op.rows, op.inner, op.outer, op.count) for op in layer.ops if op.experts == EXPERTS]
        assert found == [(rows, WIDTH, INNER, 1), (rows, INNER, WIDTH, 1)]
        assert [op.outer for op in layer.ops if op.kind is OpKind.MATMUL and op.experts == 1] == [EXPERTS], "the router"
        assert layer.expert_weights == 2 * EXPERTS * WIDTH * INNER and layer.routed_bytes == rows * WIDTH * 4
    assert chain.weights == LAYERS * (2 * EXPERTS * WIDTH * INNER + EXPERTS * WIDTH + 2 * WIDTH)


def test_a_stage_of_experts_stands_in_for_itself_without_memory():
    """Mixtral in float32 was ranked with a pipeline, which then failed at the first dry run: torch has the shapes in bfloat16."""
    x = torch.randn(2, LENGTH, WIDTH)
    found = StandIns(None).of(0, InGroups(), (x,), {}, True)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)


def test_experts_that_tensor_parallelism_does_not_cut_are_whole_on_its_ranks():
    layer, software = trace(InGroups).layers[0], SOFTWARE["shoal"]
    for text, parts in (("tp=2", 1), ("dp=4 ep=4", 4), ("dp=4 tp=2 ep=2", 2)):
        plan = Plan.parse(text)
        assert expert_weights(layer, plan, weight_groups(plan, software)) == layer.expert_weights / parts


def test_two_sets_of_experts_travel_twice():
    (one,), (two,) = trace(ChosenByExperts, 1).layers, trace(Twice, 1).layers
    assert two.expert_weights == 2 * one.expert_weights and two.routed_bytes == 2 * one.routed_bytes > 0


@pytest.mark.parametrize("kind", [Heads, BesideScores])
def test_heads_with_matrices_of_their_own_are_no_experts(kind):
    chain = trace(kind)
    assert chain.experts == 1 and not any(layer.expert_weights or layer.routed_bytes for layer in chain.layers)


def test_experts_that_are_called_by_index_say_how_to_give_them_by_numbers():
    with pytest.raises(
        RequestError, match=r"nonzero.*planner\.shape.*chosen_experts and expert_ffn where it has experts"
    ):
        trace(ByIndex, 1)
