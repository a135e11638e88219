"""A tiny model whose every training pass takes a set time: a run lasts as long as a test needs, on any machine."""

import time

import torch
from torch import nn


class Paced(nn.Module):
    def __init__(self, vocab: int, seconds: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 24)
        self.hidden = nn.Linear(24, 48)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(48, vocab)
        self.seconds = seconds

    def forward(self, tokens):
        if self.training:
            time.sleep(self.seconds)
        return self.out(self.dropout(self.hidden(self.embedding(tokens)).tanh()))


def build(spec, seconds):
    return Paced(spec.vocab, seconds)


class Pause(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, hidden):
        if self.training:
            time.sleep(self.seconds)
        return hidden


def build_row(spec, seconds):
    """One module after the other, so that it can be cut into stages; each half takes half of the time."""
    return nn.Sequential(
        nn.Embedding(spec.vocab, 24),
        Pause(seconds / 2),
        nn.Linear(24, 48),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(48, 48),
        Pause(seconds / 2),
        nn.Linear(48, spec.vocab),
    )


class Poisoned(Paced):
    """Its gradient is not finite from the second update on, in every process: one that is started again has no better luck."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.initial = self.out.bias.detach().clone()

    def forward(self, tokens):
        found = super().forward(tokens)
        return found if torch.equal(self.out.bias, self.initial) or not self.training else found * float("nan")


def build_poisoned(spec, seconds):
    return Poisoned(spec.vocab, seconds)
