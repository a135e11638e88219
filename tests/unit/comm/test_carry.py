"""Sums that go on from round to round."""

import torch

from shoal.comm.carry import NOTHING, CarriedSum, sum_rounds
from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import TrafficCounter


def alone():
    return Channel("dp", rank=0, size=1, transport=None, traffic=TrafficCounter())


def bits(tensor):
    return tensor.view(torch.int32).tolist()


def test_a_sum_over_rounds_is_the_sum_from_the_left():
    rounds = [torch.tensor([0.1]), torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([0.3])]
    expected = ((rounds[0] + rounds[1]) + rounds[2]) + rounds[3]
    assert bits(sum_rounds([one.clone() for one in rounds], alone())) == bits(expected)
    assert bits(expected) != bits(rounds[0] + (rounds[1] + rounds[2]) + rounds[3]), "the order shows"


def test_nothing_changes_no_number():
    numbers = torch.tensor([-0.0, 0.0, 1.5, float("inf"), -1e-45])
    total = CarriedSum(alone())
    total.add_(numbers.clone())
    assert bits(total.add_(torch.full_like(numbers, NOTHING))) == bits(numbers)


def test_the_last_round_may_be_scattered():
    total, own = CarriedSum(alone()), torch.empty(2)
    total.add_(torch.tensor([1.0, 2.0]))
    total.scatter(torch.tensor([10.0, 20.0]), own, [2])
    assert own.tolist() == [11.0, 22.0]
