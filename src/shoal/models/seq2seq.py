"""An encoder-decoder transformer for pairs of sequences, pre-norm, of the same parts as gpt.

``nn.Transformer`` is not used: it has neither rotary positions nor RMSNorm, and its attention dropout is not a module of its own.
Token id 0 is padding in the source; padding in the target comes after every real token, where a causal decoder does not see it.
"""

from torch import Tensor, nn

from shoal.models.config import Seq2SeqConfig
from shoal.models.transformer import Attention, FeedForward, Rotary, initialise

PADDING = 0


class EncoderBlock(nn.Module):
    """Attention over the whole source, then feed-forward."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads, config.heads)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.feed_forward_norm = nn.RMSNorm(config.hidden)
        self.feed_forward = FeedForward(config.hidden, config.ffn_size)
        self.feed_forward_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BMD: Tensor, rotary: Rotary, seen: Tensor) -> Tensor:
        """The source's stream after this layer; ``seen`` is True where a source position is not padding."""
        attended = self.attention(self.attention_norm(x_BMD), rotary=rotary, mask=seen)
        x_BMD = x_BMD + self.attention_dropout(attended)
        output: Tensor = x_BMD + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x_BMD)))
        return output


class DecoderBlock(nn.Module):
    """Causal attention over the target, attention over the encoded source, then feed-forward."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads, config.heads)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.cross_norm = nn.RMSNorm(config.hidden)
        self.cross = Attention(config.hidden, config.heads, config.heads)
        self.cross_dropout = nn.Dropout(config.dropout)
        self.feed_forward_norm = nn.RMSNorm(config.hidden)
        self.feed_forward = FeedForward(config.hidden, config.ffn_size)
        self.feed_forward_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor, memory_BMD: Tensor, rotary: Rotary, seen: Tensor) -> Tensor:
        """The target's stream after this layer."""
        attended = self.attention(self.attention_norm(x_BLD), rotary=rotary, causal=True)
        x_BLD = x_BLD + self.attention_dropout(attended)
        crossed = self.cross(self.cross_norm(x_BLD), memory_BMD=memory_BMD, rotary=rotary, mask=seen)
        x_BLD = x_BLD + self.cross_dropout(crossed)
        output: Tensor = x_BLD + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x_BLD)))
        return output


class Seq2Seq(nn.Module):
    """Source tokens (B, M) and target tokens so far (B, L) in, logits (B, L, vocab) of the next target token out."""

    def __init__(self, config: Seq2SeqConfig, *, vocab: int, sequence: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.source_embedding = nn.Embedding(vocab, config.hidden)
        self.target_embedding = nn.Embedding(vocab, config.hidden)
        self.source_dropout = nn.Dropout(config.dropout)
        self.target_dropout = nn.Dropout(config.dropout)
        self.rotary = Rotary(sequence, config.hidden // config.heads)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        self.encoder_norm = nn.RMSNorm(config.hidden)
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, vocab, bias=False)
        initialise(self, num_branches=3 * config.layers)

    def forward(self, source_BM: Tensor, target_BL: Tensor) -> Tensor:
        """Logits of the target token after each position."""
        seen = (source_BM != PADDING)[:, None, None, :]  # (B, 1, 1, M)
        memory_BMD = self.source_dropout(self.source_embedding(source_BM))
        for block in self.encoder:
            memory_BMD = block(memory_BMD, self.rotary, seen)
        memory_BMD = self.encoder_norm(memory_BMD)
        x_BLD = self.target_dropout(self.target_embedding(target_BL))
        for block in self.decoder:
            x_BLD = block(x_BLD, memory_BMD, self.rotary, seen)
        logits: Tensor = self.head(self.norm(x_BLD))
        return logits
