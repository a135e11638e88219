"""Attention as people write it: fused, written out, scaled and masked; its heads are split where its forward pass allows."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig
from shoal.parallel.requirements import describe_facts

D, H, L, V = 16, 4, 6, 32


def find(model: nn.Module, *example: Tensor) -> ModuleAnalysis:
    return analyse_module(model, example or (torch.randn(2, L, D),), ParallelConfig())


def splits(analysis: ModuleAnalysis) -> dict[str, tuple[str, int]]:
    return {split.path: (split.kind.value, split.parts) for split in analysis.splits}


class Fused(nn.Module):
    """An attention of one fused layer; ``form`` says how its output is taken apart."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.n_head, self.width, self.n_embd = form, H, D // H, D
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, channels = x.shape
        qkv = self.qkv(x)
        if self.form == "parts outside":
            q, k, v = qkv.reshape(batch, length, 3, -1, self.width).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.form == "parts indexed":
            parts = qkv.view(batch, length, 3, self.n_head, self.width).permute(2, 0, 3, 1, 4)
            q, k, v = parts[0], parts[1], parts[2]
        elif self.form == "parts inside":
            q, k, v = qkv.view(batch, length, self.n_head, 3 * self.width).transpose(1, 2).chunk(3, dim=-1)
        elif self.form == "chunked":
            q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        else:  # As nanoGPT writes it: sizes of the whole input where those of a rank's share would be needed.
            q, k, v = qkv.split(self.n_embd, dim=2)
            q, k, v = (
                part.view(batch, length, self.n_head, channels // self.n_head).transpose(1, 2) for part in (q, k, v)
            )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        out = y.contiguous().view(batch, length, channels) if self.form == "nano" else y.flatten(2)
        return x + self.proj(out)


@pytest.mark.parametrize(
    ("form", "parts", "divided"),
    [
        ("parts outside", 3, {}),
        ("parts indexed", 3, {"n_head": H}),
        ("parts inside", 1, {"n_head": H}),
        ("chunked", 3, {}),
    ],
)
def test_fused_projections_are_cut_as_the_forward_pass_takes_them_apart(form, parts, divided):
    found = find(nn.Sequential(Fused(form), Fused(form)))
    assert splits(found) == {
        "0.qkv": ("column", parts),
        "0.proj": ("row", 1),
        "1.qkv": ("column", parts),
        "1.proj": ("row", 1),
    }
    assert [(heads.num_heads, heads.num_kv_heads, heads.divided) for heads in found.attentions] == [(H, H, divided)] * 2


def test_a_forward_pass_that_writes_whole_sizes_is_left_whole():
    found = find(nn.Sequential(Fused("nano"), Fused("nano")))
    assert found.splits == () and found.attentions == ()
    assert found.replicated["0.qkv"] == (
        "its forward pass writes a whole number of features or heads that no attribute holds"
    )


class Written(nn.Module):
    """Attention written out, heads as a batch dim of matrix products or as a letter of an einsum."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.heads = form, H
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        if self.form == "einsum":
            weights = self.drop(torch.einsum("blhe,bmhe->bhlm", q, k).softmax(dim=-1))
            mixed = torch.einsum("bhlm,bmhe->blhe", weights, v)
        else:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            weights = self.drop(torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D // H), dim=-1))
            mixed = (weights @ v).transpose(1, 2)
        return x + self.o(mixed.reshape(*x.shape[:2], -1))


@pytest.mark.parametrize("form", ["einsum", "matmul"])
def test_attention_that_is_written_out_is_split_by_heads_and_its_positions_are_not_cut(form):
    found = find(nn.Sequential(Written(form), Written(form)))
    assert splits(found)["0.q"] == ("column", 1) and splits(found)["0.o"] == ("row", 1)
    assert found.attentions[0].divided == {"heads": H} and found.attentions[0].num_heads == H
    assert found.split_dropouts == {"0.drop": -3, "1.drop": -3}
    assert not found.stacks[0].is_pointwise


class Scaled(nn.Module):
    """An attention that computes its scale from attributes, of which some would be shared out."""

    def __init__(self, scale) -> None:
        super().__init__()
        self.width, self.heads, self.scale = D, H, scale
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale(self))
        return x + self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("scale", [lambda m: (m.width // m.heads) ** -0.5, lambda m: 1 / math.sqrt(m.width / m.heads)])
def test_a_ratio_stays_the_same_when_both_of_its_numbers_are_shared_out(scale):
    (heads,) = find(Scaled(scale)).attentions
    assert heads.divided == {"heads": H, "width": D}


def test_a_scale_that_would_change_keeps_the_heads_together():
    assert find(Scaled(lambda m: m.heads**-0.5)).attentions == ()


class LearnedMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(L, L))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, attn_mask=self.bias, need_weights=False)[0]


def test_an_attention_whose_mask_is_learned_is_not_split():
    """Each rank would have its own heads' part of the mask's gradient."""
    assert find(LearnedMask()).attentions == ()


class NormedHeads(nn.Module):
    """Queries are normed by head, with a weight that all heads share: the heads stay whole, and it attends all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.RMSNorm(4)

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.norm(query), key, value)
        return x + self.output(mixed.transpose(1, 2).flatten(2))


def test_an_attention_that_cannot_be_split_still_counts_as_one_for_context_parallelism():
    model = nn.Sequential(nn.Embedding(32, 16), nn.Sequential(NormedHeads(), NormedHeads()), nn.Linear(16, 32))
    analysis = analyse_module(model, (torch.randint(32, (2, 8)),), ParallelConfig())
    assert analysis.attentions == () and analysis.attends == ("1.0", "1.1")
    assert describe_facts(analysis, model).has_attention
