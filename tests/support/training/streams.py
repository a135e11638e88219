"""Iterable datasets of the tests of runs: rows of tokens by their number, with a state and without."""

import torch
from torch.utils.data import IterableDataset

SIZE, LENGTH = 22, 8


class Stateless(IterableDataset):
    vocab = 17

    def __init__(self):
        self.place = 0

    def __iter__(self):
        self.place = 0
        yield from self.rows()

    def rows(self):
        while self.place < SIZE:
            generator = torch.Generator().manual_seed(self.place)
            self.place += 1
            row = torch.randint(self.vocab, (LENGTH + 1,), generator=generator)
            yield row[:-1], row[1:]
        self.place = 0


class Counted(Stateless):
    def __iter__(self):
        return self.rows()

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def counted():
    return Counted()


def stateless():
    return Stateless()
