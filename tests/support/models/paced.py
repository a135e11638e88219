"""A tiny model whose every training pass takes a set time: a run lasts as long as a test needs, on any machine."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from shoal.core.rundir import replace_text


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


class Ration(nn.Module):
    """Its process may make as many training passes as a file says, and waits before the next one until the file says more.

    So a test holds a whole run where it wants it, without guessing how long anything takes. A file of the process's own
    ``--name``, beside the other, goes before it: one worker can be held alone. Who waits says so in a file ``NAME.waits``.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.num_passes = Path(path), 0
        # Who has no name is no worker, and only looks at the model.
        self.own = self.path.with_name(sys.argv[sys.argv.index("--name") + 1]) if "--name" in sys.argv else None

    def forward(self, inputs):
        if self.training and self.own is not None:
            if self.num_passes >= self.allowed():
                self.own.with_name(f"{self.own.name}.waits").write_text(str(self.num_passes))
            while self.num_passes >= self.allowed():
                time.sleep(0.005)
            self.num_passes += 1
        return inputs

    def allowed(self):
        return int((self.own if self.own.exists() else self.path).read_text())


class Rationed(Paced):
    def __init__(self, vocab: int, seconds: float, ration: str) -> None:
        super().__init__(vocab, seconds)
        self.ration = Ration(ration)

    def forward(self, tokens):
        return super().forward(self.ration(tokens))


def build(spec, seconds, ration=""):
    return Rationed(spec.vocab, seconds, ration) if ration else Paced(spec.vocab, seconds)


def build_rationed_digits(spec, ration):
    """Logistic regression of digits."""
    return nn.Sequential(Ration(ration), nn.Flatten(), nn.Linear(64, spec.classes))


def allow(ration: Path, passes: int) -> None:
    """Let processes make so many passes altogether; in one piece, for they read it all the time."""
    replace_text(ration, str(passes))


class Pause(nn.Module):
    def __init__(self, seconds: float, ration: str = "") -> None:
        super().__init__()
        self.seconds = seconds
        self.ration = Ration(ration) if ration else nn.Identity()

    def forward(self, hidden):
        hidden = self.ration(hidden)
        if self.training:
            time.sleep(self.seconds)
        return hidden


def build_row(spec, seconds, ration=""):
    """One module after the other, so that it can be cut into stages; each half takes half of the time."""
    return nn.Sequential(
        nn.Embedding(spec.vocab, 24),
        Pause(seconds / 2, ration),
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


class PoisonedOnce(Paced):
    """One training pass of ``worker-1``, its third, gives NaN; a file remembers that it has, so a new process is well."""

    def __init__(self, vocab: int, seconds: float, mark: str) -> None:
        super().__init__(vocab, seconds)
        self.mark, self.num_passes = Path(mark), 0

    def forward(self, tokens):
        found = super().forward(tokens)
        if not self.training or "worker-1" not in sys.argv:
            return found
        self.num_passes += 1
        if self.num_passes < 3 or self.mark.exists():
            return found
        self.mark.touch()
        return found * float("nan")


def build_poisoned_once(spec, seconds, mark):
    return PoisonedOnce(spec.vocab, seconds, mark)


class HangingOnce(Paced):
    """``worker-1`` never comes back from its sixth training pass; a file remembers that it hung, so a new process does not."""

    def __init__(self, vocab: int, seconds: float, mark: str) -> None:
        super().__init__(vocab, seconds)
        self.mark, self.num_passes = Path(mark), 0

    def forward(self, tokens):
        if self.training and "worker-1" in sys.argv:
            self.num_passes += 1
            if self.num_passes == 6 and not self.mark.exists():
                self.mark.touch()
                self.never_return()
        return super().forward(tokens)

    def never_return(self):
        while True:
            time.sleep(1)


def build_hanging_once(spec, seconds, mark):
    return HangingOnce(spec.vocab, seconds, mark)


def build_slow_worker(spec, seconds):
    """``worker-1`` takes twice as long as the others."""
    return Paced(spec.vocab, seconds * (2.0 if "worker-1" in sys.argv else 1.0))
