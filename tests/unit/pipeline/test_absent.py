"""What stands in the place of a unit of another rank."""

import torch
from torch import nn

from shoal.comm.channel import Channel
from shoal.comm.ledger import Ledger
from shoal.pipeline.absent import Absent
from shoal.pipeline.reduction import sum_gradients_


def test_who_restores_modes_one_by_one_restores_the_unit_behind_too():
    """An evaluation does: a unit left in evaluation would be asked for other shapes and count no dropout."""
    unit = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model = nn.ModuleList([Absent(unit)])
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    assert not unit.training and not unit[1].training
    for module, was_training in modes:
        module.training = was_training
    assert unit.training and unit[1].training


class Adding:
    """Two replicas, of which the other has ones everywhere."""

    def __init__(self):
        self.sizes = []

    def sum_(self, tensor):
        self.sizes.append(tensor.numel())
        tensor += 1


def test_a_gradient_that_is_missing_here_is_summed_as_zeros():
    """Another replica may have one, and messages of different sizes would stop both."""
    parameters = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(2))}
    parameters["a"].grad = torch.full((3,), 5.0)
    transport = Adding()
    sum_gradients_(parameters, Channel("dp", rank=0, size=2, transport=transport, ledger=Ledger()))
    assert transport.sizes == [5]
    assert parameters["a"].grad.tolist() == [6.0] * 3 and parameters["b"].grad.tolist() == [1.0] * 2
