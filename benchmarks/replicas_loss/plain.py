"""A GPT as it was before rotary positions: learned positions, layer norms, GELU, torch's own initial weights.

The promises were made of a model of this kind, which learns more slowly than the shipped one: after 300 steps it is where that
one is after 100, and four replicas are worth half as much over one.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention, then feed-forward, each behind a norm and added to the stream."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """The stream after this layer."""
        batch, length, hidden = x_BLD.shape
        split = self.qkv(self.attention_norm(x_BLD)).view(batch, length, 3, self.heads, hidden // self.heads)
        q_BHLE, k_BHLE, v_BHLE = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q_BHLE, k_BHLE, v_BHLE, is_causal=True)
        x_BLD = x_BLD + self.output(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x_BLD + self.down(F.gelu(self.up(self.feed_forward_norm(x_BLD))))


class PlainGpt(nn.Module):
    """Tokens (B, L) in, logits (B, L, vocab) out."""

    def __init__(self, *, vocab: int, sequence: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Logits of the token after each position."""
        x_BLD = self.embedding(tokens_BL) + self.positions(torch.arange(tokens_BL.shape[1], device=tokens_BL.device))
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))


def build(spec, hidden: int = 96, heads: int = 4, layers: int = 3) -> PlainGpt:
    """The model of 0.39 million parameters, for the recipe's data."""
    return PlainGpt(vocab=spec.vocab, sequence=spec.sequence, hidden=hidden, heads=heads, layers=layers)
