"""Models, data and analyses for the parity of tensor and sequence parallelism, the analyses written out by hand."""

import torch
import torch.nn.functional as F
from torch import nn

from shoal.models.build import build_model
from shoal.models.config import GptConfig, MlpConfig, Seq2SeqConfig
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, Split, SplitKind, Stack

STEPS = 3
BATCH, LENGTH = 4, 8
COLUMN, ROW, VOCABULARY, LOGITS = SplitKind.COLUMN, SplitKind.ROW, SplitKind.VOCABULARY, SplitKind.LOGITS


class Shape:
    """What a model reads of the data."""

    def __init__(self, **values):
        self.vocab, self.sequence, self.features, self.kind, self.classes, self.outputs = (None,) * 6
        self.__dict__.update(values)


def attention_splits(path):
    return [Split(path=f"{path}.{name}", kind=COLUMN) for name in ("query", "key", "value")] + [
        Split(path=f"{path}.output", kind=ROW)
    ]


def feed_forward_splits(path):
    return [
        Split(path=f"{path}.gate", kind=COLUMN),
        Split(path=f"{path}.up", kind=COLUMN),
        Split(path=f"{path}.down", kind=ROW),
    ]


def heads_of(path, heads, kv_heads):
    return Heads(path=path, num_heads=heads, num_kv_heads=kv_heads, divided={"heads": heads, "kv_heads": kv_heads})


def gpt(vocab=64, kv_heads=4, tied=False, layers=2, dropout=0.0):
    config = GptConfig(layers=layers, hidden=32, heads=4, kv_heads=kv_heads, tied=tied, dropout=dropout)
    blocks = [f"blocks.{index}" for index in range(layers)]
    splits = [Split(path="embedding", kind=VOCABULARY), Split(path="head", kind=LOGITS)]
    for block in blocks:
        splits += attention_splits(f"{block}.attention") + feed_forward_splits(f"{block}.feed_forward")
    analysis = ModuleAnalysis(
        stacks=(Stack(blocks=tuple(blocks), sequence_dim=1),),
        splits=tuple(splits),
        attentions=tuple(heads_of(f"{block}.attention", 4, kv_heads) for block in blocks),
        tied=(("embedding.weight", "head.weight"),) if tied else (),
        tail_is_pointwise=True,
    )
    return build_model(config, Shape(vocab=vocab, sequence=LENGTH, kind="tokens")), analysis


def seq2seq(vocab=64):
    model = build_model(Seq2SeqConfig(layers=2, hidden=32, heads=4), Shape(vocab=vocab, sequence=LENGTH, kind="pairs"))
    splits = [Split(path=path, kind=VOCABULARY) for path in ("source_embedding", "target_embedding")]
    splits.append(Split(path="head", kind=LOGITS))
    attentions, stacks = [], []
    for side, kinds in (("encoder", ["attention"]), ("decoder", ["attention", "cross"])):
        blocks = [f"{side}.{index}" for index in range(2)]
        stacks.append(Stack(blocks=tuple(blocks), sequence_dim=1))
        for block in blocks:
            splits += feed_forward_splits(f"{block}.feed_forward")
            for kind in kinds:
                splits += attention_splits(f"{block}.{kind}")
                attentions.append(heads_of(f"{block}.{kind}", 4, 4))
    return model, ModuleAnalysis(stacks=tuple(stacks), splits=tuple(splits), attentions=tuple(attentions))


def mlp():
    config = MlpConfig(layers=2, hidden=32)
    model = build_model(config, Shape(features=(12,), kind="classes", outputs=10, classes=10))
    splits = (Split(path="layers.0.linear", kind=COLUMN), Split(path="layers.1.linear", kind=ROW))
    return model, ModuleAnalysis(splits=splits)


class Encoder(nn.Module):
    """torch's own encoder layers, with whole embeddings and an output layer with a bias."""

    def __init__(self, batch_first, norm_first):
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(
            32, 4, 48, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation=F.gelu
        )
        self.embedding = nn.Embedding(64, 32, padding_idx=0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.embedding(tokens)
        hidden = tokens == 0
        x = self.encoder(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=hidden)
        return self.head(x if self.batch_first else x.transpose(0, 1))


def encoder(batch_first=True, norm_first=False):
    blocks = [f"encoder.layers.{index}" for index in range(2)]
    splits = [Split(path="embedding", kind=VOCABULARY), Split(path="head", kind=LOGITS)]
    for block in blocks:
        splits += [Split(path=f"{block}.linear1", kind=COLUMN), Split(path=f"{block}.linear2", kind=ROW)]
    analysis = ModuleAnalysis(
        stacks=(Stack(blocks=tuple(blocks), sequence_dim=1 if batch_first else 0),),
        splits=tuple(splits),
        attentions=tuple(
            Heads(path=f"{block}.self_attn", num_heads=4, num_kv_heads=4, is_torch=True) for block in blocks
        ),
    )
    return Encoder(batch_first, norm_first), analysis


class Conv1D(nn.Module):
    """Looks like the layer of GPT-2 in transformers: the weight is (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


class FusedAttention(nn.Module):
    """Reads its input's shape before it projects, as attentions in the wild do."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj, self.split_size = Conv1D(96, 32), Conv1D(32, 32), 32

    def forward(self, hidden_states):
        shape = (*hidden_states.shape[:-1], -1, 8)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.c_attn(hidden_states).split(self.split_size, 2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))


class FusedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(32), FusedAttention(), nn.LayerNorm(32)
        self.c_fc, self.c_proj = Conv1D(128, 32), Conv1D(32, 128)

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attn(hidden_states=self.ln_1(hidden_states))
        return (hidden_states + self.c_proj(F.gelu(self.c_fc(self.ln_2(hidden_states)))),)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.h, self.ln_f = (
            nn.Embedding(67, 32),
            nn.ModuleList(FusedBlock() for _ in range(2)),
            nn.LayerNorm(32),
        )
        self.lm_head = nn.Linear(32, 67, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)[0]
        return self.lm_head(self.ln_f(x))


def fused():
    blocks = [f"h.{index}" for index in range(2)]
    splits = [Split(path="wte", kind=VOCABULARY), Split(path="lm_head", kind=LOGITS)]
    for block in blocks:
        splits += [
            Split(path=f"{block}.attn.c_attn", kind=COLUMN, parts=3),
            Split(path=f"{block}.attn.c_proj", kind=ROW),
            Split(path=f"{block}.c_fc", kind=COLUMN),
            Split(path=f"{block}.c_proj", kind=ROW),
        ]
    analysis = ModuleAnalysis(
        stacks=(Stack(blocks=tuple(blocks), sequence_dim=1),),
        splits=tuple(splits),
        attentions=tuple(
            Heads(path=f"{block}.attn", num_heads=4, num_kv_heads=4, divided={"split_size": 32}) for block in blocks
        ),
        tied=(("wte.weight", "lm_head.weight"),),
    )
    return Fused(), analysis


BUILDERS = {
    "gpt": gpt,
    "gpt gqa": lambda: gpt(kv_heads=2),
    "gpt tied": lambda: gpt(tied=True),
    "gpt 65": lambda: gpt(vocab=65),
    "gpt tied 67": lambda: gpt(vocab=67, tied=True),
    "gpt dropout": lambda: gpt(kv_heads=2, dropout=0.1),
    "seq2seq": seq2seq,
    "mlp": mlp,
    "encoder": encoder,
    "encoder (L, B)": lambda: encoder(batch_first=False, norm_first=True),
    "fused": fused,
}


def build(case, dtype):
    """The model and its analysis, the same on every rank."""
    torch.manual_seed(7)
    model, analysis = BUILDERS[case]()
    return model.to(dtype), analysis


def batch_of(case, step, dtype):
    """Inputs and targets of a step; some targets are ignored."""
    generator = torch.Generator().manual_seed(100 + step)
    if case == "mlp":
        return [torch.randn(BATCH, 12, generator=generator, dtype=dtype)], torch.randint(
            10, (BATCH,), generator=generator
        )
    vocab = {"gpt 65": 65, "gpt tied 67": 67, "fused": 67}.get(case, 64)
    tokens = torch.randint(1, vocab, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(vocab, (BATCH, LENGTH), generator=generator)
    # The last token is a target: with it the padded stretch of the vocabulary matters.
    targets[0, 0], targets[1, 2:5] = vocab - 1, -100
    if case == "seq2seq":
        source = torch.randint(1, vocab, (BATCH, 2 * LENGTH // 4), generator=generator)
        source[0, -1] = 0
        return [source, tokens], targets
    if case.startswith("encoder"):
        tokens[0, -2:] = 0
    return [tokens], targets
