"""Iterable datasets of the tests of runs: rows of tokens by their number, with a state and without."""

import torch
from torch.utils.data import IterableDataset

SIZE, LENGTH, VOCAB = 22, 8, 17


def number_row(number):
    """The inputs and targets of a row."""
    row = torch.randint(VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(number))
    return row[:-1], row[1:]


def row_number(inputs):
    """Which row these inputs are."""
    return next(number for number in range(SIZE) if torch.equal(number_row(number)[0], inputs))


class Stateless(IterableDataset):
    vocab = VOCAB

    def __init__(self):
        self.place = 0

    def __iter__(self):
        self.place = 0
        yield from self.rows()

    def rows(self):
        while self.place < SIZE:
            self.place += 1
            yield number_row(self.place - 1)
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


class Dealt(Counted):
    """Shards itself: replica r reads the rows r, r + n, ...."""

    def __init__(self, first=0, every=1):
        super().__init__()
        self.first, self.every = first, every

    def shard(self, replica, num_replicas):
        return type(self)(replica, num_replicas)

    def rows(self):
        own = range(self.first, SIZE, self.every)
        while self.place < len(own):
            number = own[self.place]
            self.place += 1
            yield number_row(number)
        self.place = 0


class Redealt(Dealt):
    """One that can deal out anew what is left of an epoch: a state names the rows that are left."""

    def __init__(self, first=0, every=1):
        super().__init__(first, every)
        self.left = None

    def rows(self):
        if self.left is None:
            self.left = list(range(self.first, SIZE, self.every))
        while self.left:
            number = self.left.pop(0)
            yield number_row(number)
        self.left = None

    def state_dict(self):
        return {"left": list(self.left)}

    def load_state_dict(self, state):
        self.left = list(state["left"])

    def reshard(self, states, replica, num_replicas):
        left = sorted(number for state in states if state is not None for number in state["left"])
        return {"left": left[replica::num_replicas]}


def dealt():
    return Dealt()


def redealt():
    return Redealt()
