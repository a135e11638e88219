"""Gradients of a stage over its replicas, where some have none."""

import pytest
import torch
from torch import nn

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import TrafficCounter
from shoal.pipeline.reduction import sum_gradients_


class Adding:
    """Two replicas, of which the other has ones everywhere."""

    def __init__(self):
        self.sizes = []

    def all_reduce_(self, tensor):
        self.sizes.append(tensor.numel())
        tensor += 1


def test_a_gradient_that_is_missing_here_is_summed_as_zeros():
    """Another replica may have one, and messages of different sizes would stop both."""
    parameters = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(2))}
    parameters["a"].grad = torch.full((3,), 5.0)
    transport = Adding()
    sum_gradients_(parameters, Channel("dp", rank=0, size=2, transport=transport, traffic=TrafficCounter()))
    assert transport.sizes == [5]
    assert parameters["a"].grad.tolist() == [6.0] * 3 and parameters["b"].grad.tolist() == [1.0] * 2


class AddingTo(Adding):
    """Two replicas, of which the other sends these numbers."""

    def __init__(self, *other):
        super().__init__()
        self.other = torch.tensor(other)

    def all_reduce_(self, tensor):
        self.sizes.append(tensor.numel())
        tensor += self.other


@pytest.mark.parametrize(
    ("other_has", "total"), [((1.0, 0.0), ([6.0] * 3, None)), ((1.0, 1.0), ([6.0] * 3, [1.0] * 2))]
)
def test_a_gradient_that_no_replica_has_stays_none_where_that_is_allowed(other_has, total):
    """As in one process, whose optimizer then leaves the weight alone; a zero of another replica is a gradient."""
    parameters = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(2))}
    parameters["a"].grad = torch.full((3,), 5.0)
    transport = AddingTo(1.0, 1.0, 1.0, 1.0, 1.0, *other_has)
    channel = Channel("dp", rank=0, size=2, transport=transport, traffic=TrafficCounter())
    sum_gradients_(parameters, channel, allows_untouched=True)
    assert transport.sizes == [7], "one message, with a number for each"
    grads = tuple(None if value.grad is None else value.grad.tolist() for value in parameters.values())
    assert grads == total
