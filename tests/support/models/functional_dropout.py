"""A model whose dropout is all functional, and a forward pass of it with keyed draws."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.randomness.dropout import DropoutKey, apply_keyed_dropout

IDS = [5, 6, 7, 8]


class Attention(nn.Module):
    """Attention with dropout_p, twice, and F.dropout on the stream, in one module."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.p = p
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        mixed = F.scaled_dot_product_attention(mixed, key, value, dropout_p=p)
        return F.dropout(mixed.transpose(1, 2).flatten(2), self.p, self.training) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Attention()
        self.second = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.second(self.first(x)), 0.2, self.training)


def keyed(model: nn.Module) -> tuple[nn.Module, DropoutKey]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model, apply_keyed_dropout(model, 0)


def run(model: nn.Module, key: DropoutKey, x: Tensor, ids: list[int] = IDS, step: int = 1) -> Tensor:
    key.begin(step, ids)
    with key.drawing():
        output: Tensor = model(x)
    return output


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    model.zero_grad()
    output.square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
