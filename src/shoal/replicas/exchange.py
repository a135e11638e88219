"""Sums over islands, in the order of islands whatever carries the bytes.

An island's rank exchanges with the ranks of equal coordinates in the other islands only, so each of them sums its own part of
the model and nothing is gathered.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.ordered import sum_in_order_

BUCKET_ELEMENTS = 4 * 2**20
"""Elements that are packed into one message: large enough for any link, small beside a model."""


def mean_over_islands_(tensors: Sequence[Tensor], channel: Channel) -> None:
    """Replace tensors by their mean over islands: the sum in the order of islands, divided by their number."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sum_in_order_(flat, channel)
        flat.div_(channel.size)
        for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def sum_over_islands_(tensors: Sequence[Tensor], channel: Channel) -> None:
    """Replace tensors by their sum over islands, in the order of islands."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sum_in_order_(flat, channel)
        for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type that follow each other, in messages of about ``BUCKET_ELEMENTS``."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
