"""Ranks that are threads of this process, with channels between them: for tests of a sum and not of its transport."""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import TrafficCounter


class ThreadTransport:
    """Collectives between threads of this process: everyone puts down what it has, and reads what the others put down."""

    is_ordered = True

    def __init__(self, rank: int, table: list, barrier: threading.Barrier) -> None:
        self.rank, self.table, self.barrier = rank, table, barrier

    def _share(self, own: object) -> list:
        self.table[self.rank] = own
        self.barrier.wait(30)
        seen = list(self.table)
        self.barrier.wait(30)
        return seen

    def all_reduce_(self, tensor: Tensor) -> None:
        total, *others = self._share(tensor.clone())
        total = total.clone()
        for other in others:
            total += other
        tensor.copy_(total)

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        for part, other in zip(torch.split(whole, list(counts)), self._share(own.clone()), strict=True):
            part.copy_(other)

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        for part, other in zip(received, self._share([one.clone() for one in sent]), strict=True):
            part.copy_(other[self.rank])


def on_ranks(size: int, work: Callable[[Channel], object]) -> list:
    """What each of several ranks returns."""
    table, barrier, found = [None] * size, threading.Barrier(size), [None] * size
    errors = []

    def play(rank: int) -> None:
        channel = Channel(
            "dp", rank=rank, size=size, transport=ThreadTransport(rank, table, barrier), traffic=TrafficCounter()
        )
        try:
            found[rank] = work(channel)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
