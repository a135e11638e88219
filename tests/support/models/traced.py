"""Modules of many kinds that are traced into chains, each with a maker of its inputs; built anew for every test."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.models.cnn import Cnn
from shoal.models.config import CnnConfig, GptConfig, MlpConfig, Seq2SeqConfig
from shoal.models.gpt import Gpt
from shoal.models.mlp import Mlp
from shoal.models.seq2seq import Seq2Seq

VOCAB, LENGTH, WIDTH = 97, 16, 32


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]

    def build_without_memory(self) -> nn.Module:
        with torch.device("meta"):
            return self.build()


def tokens(num_samples: int) -> tuple[Tensor, ...]:
    return (torch.randint(1, VOCAB, (num_samples, LENGTH)),)


def pairs(num_samples: int) -> tuple[Tensor, ...]:
    return *tokens(num_samples), *tokens(num_samples)


def images(num_samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(num_samples, 1, 8, 8),)


def streams(num_samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(num_samples, LENGTH, WIDTH),)


def gpt(**changes) -> Gpt:
    settings = {"layers": 3, "hidden": WIDTH, "heads": 4, "kv_heads": 2, "dropout": 0.1, **changes}
    return Gpt(GptConfig(name="gpt", **settings), vocab=VOCAB, sequence=LENGTH)


def cnn() -> Cnn:
    return Cnn(CnnConfig(name="cnn", dropout=0.1), image=(1, 8, 8), outputs=10)


def mlp(**changes) -> Mlp:
    settings = {"layers": 3, "hidden": 24, "dropout": 0.1, **changes}
    return Mlp(MlpConfig(name="mlp", **settings), features=(1, 8, 8), outputs=10)


def seq2seq() -> Seq2Seq:
    return Seq2Seq(Seq2SeqConfig(name="seq2seq", layers=6, hidden=WIDTH, heads=4), vocab=VOCAB, sequence=LENGTH)


class Learned(nn.Module):
    """Positions are a parameter that is added to the stream, heads are counted by hand, and a weight is read from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.unused = nn.Parameter(torch.zeros(7))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.positions
        for layer in self.layers:
            weights = (x @ x.transpose(1, 2)).softmax(-1)
            x = x + layer(weights @ x)
        return nn.functional.linear(x, self.table.weight)


def torch_encoder(**changes) -> nn.Module:
    settings = {"dim_feedforward": 48, "batch_first": True, **changes}
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, **settings), num_layers=6, enable_nested_tensor=False
    )


CASES = {
    "gpt": Case(gpt, tokens),
    "gpt, tied": Case(lambda: gpt(tied=True, kv_heads=4, layers=1), tokens),
    "gpt, deep": Case(lambda: gpt(layers=9), tokens),
    "seq2seq": Case(seq2seq, pairs),
    "cnn": Case(cnn, images),
    "mlp": Case(mlp, images),
    "mlp, batch norm": Case(lambda: mlp(batch_norm=True, layers=7), images),
    "learned": Case(Learned, tokens),
    "encoder": Case(torch_encoder, streams),
    "encoder, no dropout": Case(lambda: torch_encoder(dropout=0.0), streams),
    "sequence": Case(
        lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 3)), lambda n: (torch.randn(n, 8),)
    ),
    "convolutions": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.GELU(), nn.Conv2d(4, 4, 3, groups=4), nn.ConvTranspose2d(4, 2, 3)
        ),
        images,
    ),
}
