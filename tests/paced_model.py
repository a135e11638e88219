"""A tiny model whose every training pass takes a set time: a run lasts as long as a test needs, on any machine."""

import sys
import time
from pathlib import Path

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


class Rationed(Paced):
    """Its process may make so many training passes as a file says, and waits before the next one until the file says more.

    So a test holds a whole run where it wants it, without guessing how long anything takes. A file ``NAME`` beside it, of the
    process's own ``--name``, goes before: one worker can be held alone.
    """

    def __init__(self, vocab: int, seconds: float, ration: str) -> None:
        super().__init__(vocab, seconds)
        self.ration, self.num_passes = Path(ration), 0
        words = sys.argv
        self.name = words[words.index("--name") + 1] if "--name" in words else ""

    def forward(self, tokens):
        if self.training:
            while self.num_passes >= self.allowed():
                time.sleep(0.005)
            self.num_passes += 1
        return super().forward(tokens)

    def allowed(self):
        own = self.ration.with_name(self.name or self.ration.name)
        return int((own if own.exists() else self.ration).read_text())


def build_rationed(spec, seconds, ration):
    return Rationed(spec.vocab, seconds, ration)


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
