"""What context parallelism cuts and what it refuses, on one rank whose peers are pretended: nothing moves, shapes are real."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.comm.mesh import pretend_mesh
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.core.planrules import sequence_multiple
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, Stack
from shoal.parallel.context.alltoall import num_copies
from shoal.parallel.context.apply import apply_context_parallel
from shoal.parallel.context.positions import Positions, sequence_dim_of

LENGTH, HIDDEN = 8, 12


class Block(nn.Module):
    """Attention in one of several ways, most of them wrong on a part of a sequence."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.project = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("table", torch.ones(2 * LENGTH, HIDDEN))
        self.latents = nn.Parameter(torch.randn(3, HIDDEN))

    def forward(self, x, memory=None, mask=None):
        heads = self.project(x)[:, None]
        if self.way == "arange":
            x = x + torch.arange(x.shape[1])[:, None]
        elif self.way == "table":
            x = x + self.table[: x.shape[1]]
        elif self.way == "by hand":
            return x + ((heads @ heads.transpose(-2, -1)).softmax(-1) @ heads)[:, 0]
        elif self.way == "latents":
            query = self.latents.expand(len(x), 1, 3, HIDDEN)
            return x + F.scaled_dot_product_attention(query, heads, heads).mean(2)
        elif self.way == "none":
            return x + heads[:, 0]
        elif self.way == "local mask":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        keys = heads if memory is None else memory[:, None]
        dropout = 0.5 if self.way == "dropout" else 0.0
        return x + F.scaled_dot_product_attention(heads, keys, keys, attn_mask=mask, dropout_p=dropout)[:, 0]


class Model(nn.Module):
    def __init__(self, way="plain"):
        super().__init__()
        self.blocks = nn.ModuleList([Block(way), Block(way)])

    def forward(self, x, memory=None, mask=None):
        for block in self.blocks:
            x = block(x, memory, mask)
        return x


def apply(model, *, kind="ring", cp=2, rank=0, attends=False, **stack):
    heads = tuple(Heads(path=f"blocks.{n}", num_heads=1, num_kv_heads=1) for n in range(2)) if attends else ()
    stacks = (Stack(blocks=("blocks.0", "blocks.1"), sequence_dim=1, **stack),)
    analysis = ModuleAnalysis(stacks=stacks, attentions=heads, tail_is_pointwise=True)
    mesh = pretend_mesh(Plan(dp=1, cp=cp, cp_kind=kind), rank)
    return apply_context_parallel(model, analysis=analysis, mesh=mesh, kind=kind)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("arange", "torch.arange"),
        ("table", "first 4 of its table 'table'"),
        ("by hand", "softmax of a square"),
        ("latents", "from 3 to 4 positions"),
        ("local mask", "mask of shape"),
        ("dropout", "probability 0.5"),
    ],
)
def test_what_would_be_wrong_on_a_part_is_refused_with_both_lengths(way, words):
    model = Model(way)
    apply(model)
    with pytest.raises(RunError, match=f"cp=2: block 'blocks.0'.*{words}.*holds 4 of 8 positions; "):
        model(torch.randn(2, LENGTH, HIDDEN))


def test_a_block_whose_attention_is_not_seen_is_refused():
    model = Model("none")
    apply(model, attends=True)
    with pytest.raises(RunError, match=r"does not call F\.scaled_dot_product_attention"):
        model(torch.randn(2, LENGTH, HIDDEN))


def test_a_plain_block_runs_and_keeps_its_own_positions():
    model = Model()
    layout = apply(model, rank=1, attends=True)
    assert model(torch.randn(2, LENGTH, HIDDEN)).shape == (2, 4, HIDDEN)
    assert layout.positions(LENGTH).tolist() == [2, 3, 4, 5]
    assert layout.keeps_local
    assert layout.loss_factor == 1.0


def test_another_sequence_stays_whole_unless_it_cannot_be_told_apart():
    model, x = Model(), torch.randn(2, LENGTH, HIDDEN)
    apply(model)
    # Three keys, and a mask whose rows are those of the whole stream.
    mask = torch.rand(LENGTH, 3) > 0.2
    mask[:, 0] = True
    assert model(x, torch.randn(2, 3, HIDDEN), mask).shape == (2, 4, HIDDEN)
    with pytest.raises(RunError, match=r"'memory' of 4 positions, as many as this rank holds of the stream's 8"):
        model(x, torch.randn(2, 4, HIDDEN))


@pytest.mark.parametrize(
    ("kind", "length", "words"),
    [("ring", 10, "10 cannot be cut into 4 .* 8 or 12"), ("alltoall", 1, "1 cannot be cut into 2 .* of 2, or")],
)
def test_a_length_that_does_not_divide_is_refused_with_the_nearest(kind, length, words):
    model = Model()
    apply(model, kind=kind)
    with pytest.raises(RunError, match=words):
        model(torch.randn(2, length, HIDDEN))


def test_heads_that_do_not_divide_are_refused_with_both_numbers():
    with pytest.raises(RunError, match=r"6 heads out over cp=4.*cp of 2, 3, 6"):
        num_copies(6, 2, 4)


def test_a_model_without_a_sequence_and_blocks_that_mix_positions_are_refused():
    with pytest.raises(RequestError, match="cp=2 needs a stack"):
        mesh = pretend_mesh(Plan(dp=1, cp=2))
        apply_context_parallel(nn.Linear(2, 2), analysis=ModuleAnalysis(), mesh=mesh, kind="ring")
    with pytest.raises(RequestError, match="mix positions outside attention"):
        apply(Model(), is_pointwise=False)


@pytest.mark.parametrize("kind", ["ring", "alltoall"])
def test_one_rank_is_traced_on_meta_tensors_and_its_traffic_is_as_expected(kind):
    with torch.device("meta"):
        model = Gpt(GptConfig(layers=2, hidden=16, heads=4, kv_heads=2), vocab=11, sequence=16)
        tokens = torch.zeros(3, 16, dtype=torch.long)
    analysis = ModuleAnalysis(stacks=(Stack(blocks=("blocks.0", "blocks.1"), sequence_dim=1),), tail_is_pointwise=True)
    mesh = pretend_mesh(Plan(dp=1, cp=4, cp_kind=kind), 1)
    layout = apply_context_parallel(model, analysis=analysis, mesh=mesh, kind=kind)
    with mesh.traffic.counting() as counts:
        logits = model(tokens)
        logits.sum().backward()
    assert logits.shape == (3, 4, 11)
    assert counts == layout.forecast_traffic(recomputes=False)
    (traffic,) = counts.values()
    if kind == "ring":
        # Per block: keys and values 3 hops forward, 3 backward, their gradients 4; each 3 x 2 heads x 4 positions x (4 + 4).
        assert (traffic.calls, traffic.num_bytes) == (2 * 10, 2 * 10 * 3 * 2 * 4 * 8 * 4)
    else:
        # Per block: two trades forward, two backward; 2 key heads are sent as 4, so 4 x (4 queries, keys, values and outputs).
        assert (traffic.calls, traffic.num_bytes) == (2 * 4, 2 * 2 * 3 * 4 * 4 * (4 * 4) * 4)


def test_a_copy_of_a_model_runs_its_own_blocks():
    model = Model("none")
    apply(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = torch.randn(2, LENGTH, HIDDEN)
    # Projections of zero: the stream passes unchanged, but for what is cut.
    assert torch.equal(other(x), x[:, [0, 1, 6, 7]])
    assert not torch.equal(model(x), x[:, [0, 1, 6, 7]])


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "dim"),
    [
        ("attention_mask", (2, 1, 8, 8), torch.float32, None),
        ("seen", (2, 1, 1, 8), torch.bool, None),
        ("bias", (1, 4, 8, 8), torch.float32, None),
        ("src_key_padding_mask", (2, 8), torch.float32, None),
        ("position_ids", (1, 8), torch.int64, 1),
        ("cache_position", (8,), torch.int64, 0),
        ("cos", (1, 8, 4), torch.float32, 1),
        ("cos", (8, 4), torch.float32, 0),
        # A head as wide as the sequence is long: only the name tells it from a mask.
        ("position_embeddings", (1, 8, 8), torch.float32, 1),
        ("freqs", (8, 2), torch.complex64, 0),
        ("residual", (2, 8, 12), torch.float32, 1),
        ("memory", (2, 5, 12), torch.float32, None),
        ("condition", (2, 12), torch.float32, None),
        ("scale", (), torch.float32, None),
    ],
)
def test_what_is_cut_and_what_stays_whole(name, shape, dtype, dim):
    stream = torch.empty(2, 8, 12)
    assert sequence_dim_of(name, torch.empty(shape, dtype=dtype), whole=8, stream=stream, stream_dim=1) == dim


def test_sequence_first_tensors_are_cut_along_their_first_dim():
    stream, tensor = torch.empty(8, 2, 12), torch.empty(8, 2, 12)
    assert sequence_dim_of("residual", tensor, whole=8, stream=stream, stream_dim=0) == 0


@pytest.mark.parametrize(("kind", "cp"), [("ring", 2), ("ring", 3), ("alltoall", 4)])
def test_the_rule_that_refuses_a_plan_is_the_one_that_cuts(kind, cp):
    assert sequence_multiple(Plan(cp=cp, cp_kind=kind)) == Positions(kind=kind, rank=0, degree=cp).num_chunks
