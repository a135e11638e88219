"""The parts of a transformer against plain formulas."""

import math

import pytest
import torch
from torch import nn

from shoal.models.transformer import Attention, FeedForward, Rotary, initialise

torch.set_num_threads(1)


def test_rotary_scores_depend_on_distance_only() -> None:
    rotary = Rotary(16, 8)
    query, key = torch.randn(8), torch.randn(8)
    turned_query = rotary(query.expand(1, 1, 16, 8))[0, 0]
    turned_key = rotary(key.expand(1, 1, 16, 8))[0, 0]
    scores = turned_query @ turned_key.T
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scores.diagonal(0)[:1], scores.diagonal(5)[:1])


def test_rotary_tables_are_in_no_checkpoint() -> None:
    assert not Rotary(4, 4).state_dict()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_the_formula(kv_heads: int, causal: bool) -> None:
    torch.manual_seed(0)
    attention = Attention(16, 4, kv_heads).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = torch.zeros(2, 5, 16, dtype=torch.float64)
    for head in range(4):
        shared = head // (4 // kv_heads)
        query = x @ attention.query.weight[head * 4 : head * 4 + 4].T
        key = x @ attention.key.weight[shared * 4 : shared * 4 + 4].T
        value = x @ attention.value.weight[shared * 4 : shared * 4 + 4].T
        scores = query @ key.transpose(1, 2) / math.sqrt(4)
        if causal:
            scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        expected += scores.softmax(-1) @ value @ attention.output.weight[:, head * 4 : head * 4 + 4].T
    torch.testing.assert_close(attention(x, causal=causal), expected)


def test_feed_forward_is_the_formula() -> None:
    torch.manual_seed(0)
    part = FeedForward(6, 10)
    x = torch.randn(3, 6)
    gate = x @ part.gate.weight.T
    expected = (gate * gate.sigmoid() * (x @ part.up.weight.T)) @ part.down.weight.T
    torch.testing.assert_close(part(x), expected)


def test_branches_are_initialised_smaller_the_more_there_are() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": Attention(256, 4, 4), "feed_forward": FeedForward(256, 512)})
    initialise(model, num_branches=16)
    attention, feed_forward = model["attention"], model["feed_forward"]
    assert attention.query.weight.std().item() == pytest.approx(1 / 16, rel=0.02)
    assert attention.output.weight.std().item() == pytest.approx(1 / 64, rel=0.02)
    assert feed_forward.down.weight.std().item() == pytest.approx(1 / math.sqrt(512) / 4, rel=0.02)
