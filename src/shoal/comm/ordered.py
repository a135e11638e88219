"""Sums over the ranks of a channel in the order of ranks, whatever carries the bytes.

A sum of floats has other bits in another order, and codecs turn one other bit into another code: what is compared with one
process to the bit is summed here.
"""

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import Traffic, TrafficCounts


def has_rank_order(channel: Channel) -> bool:
    """True where the channel adds in the order of ranks by itself: on the CPU it does, and of two ranks no order differs."""
    return channel.transport is None or channel.transport.is_ordered or channel.size <= 2


def sum_in_order_(flat: Tensor, channel: Channel) -> None:
    """Add a flat tensor over the ranks of a channel, first rank first.

    On the CPU a channel adds in this order by itself, and of two ranks the order makes no difference. nccl adds as its algorithm
    likes: there every rank adds up one slice and gives it to the others, which moves the bytes of a ring.
    """
    if has_rank_order(channel):
        channel.all_reduce_(flat)
        return
    counts = [len(part) for part in torch.tensor_split(flat, channel.size)]
    slices = list(torch.split(flat, counts))
    received = [torch.empty_like(slices[channel.rank]) for _ in slices]
    channel.all_to_all(slices, received)
    total = received[0]
    for other in received[1:]:
        total.add_(other)
    channel.all_gather(total, flat, counts)


def ordered_traffic(axis: str, num_bytes: int, *, has_order: bool, num_ranks: int) -> TrafficCounts:
    """What ``sum_in_order_`` counts for a tensor of so many bytes."""
    if num_ranks == 1 or not num_bytes:
        return {}
    moved = Traffic(calls=1, num_bytes=num_bytes)
    if has_order:
        return {(axis, "all_reduce"): moved}
    return {(axis, "all_to_all"): moved, (axis, "all_gather"): moved}
