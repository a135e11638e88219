"""A decoder-only transformer: pre-norm, RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Written plainly, one linear layer per projection and no parallel code: what splits it over ranks finds its parts by running it
once.
"""

from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.models.config import GptConfig
from shoal.models.transformer import (
    Attention,
    FeedForward,
    Rotary,
    block_causal_mask,
    initialise,
    places_in_documents,
)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads, config.num_kv_heads)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.feed_forward_norm = nn.RMSNorm(config.hidden)
        self.feed_forward = FeedForward(config.hidden, config.ffn_size)
        self.feed_forward_dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BLD: Tensor, rotary: Rotary, mask: Tensor | None = None, places_BL: Tensor | None = None
    ) -> Tensor:
        """The stream after this layer; ``mask`` and ``places_BL`` are of packed documents."""
        attended_BLD = self.attention(
            self.attention_norm(x_BLD), rotary=rotary, causal=mask is None, mask=mask, places_BL=places_BL
        )
        x_BLD = x_BLD + self.attention_dropout(attended_BLD)
        output: Tensor = x_BLD + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x_BLD)))
        return output


class Gpt(nn.Module):
    """Tokens (B, L) in, logits (B, L, vocab) out; with the document of each position (B, L) where several are packed."""

    def __init__(self, config: GptConfig, *, vocab: int, sequence: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.embedding = nn.Embedding(vocab, config.hidden)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.rotary = Rotary(sequence, config.hidden // config.heads)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, vocab, bias=False)
        initialise(self, num_branches=2 * config.layers, is_tied=config.tied)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BL: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        """Logits of the token after each position, from what its document has up to it.

        Raises:
            RequestError: documents are packed and the sequence is cut over ranks, which attend to all of it.
        """
        x_BLD = self.embedding_dropout(self.embedding(tokens_BL))
        if documents_BL is None:
            for block in self.blocks:
                x_BLD = block(x_BLD, self.rotary)
        else:
            if self.rotary.positions is not None:
                raise RequestError(
                    "packed documents cannot be cut over cp: attention would cross them; use dp, tp or zero"
                )
            mask, places_BL = block_causal_mask(documents_BL), places_in_documents(documents_BL)
            for block in self.blocks:
                x_BLD = block(x_BLD, self.rotary, mask, places_BL)
        logits: Tensor = self.head(self.norm(x_BLD))
        return logits
