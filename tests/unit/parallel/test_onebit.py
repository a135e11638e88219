"""1-bit LAMB that goes on from a checkpoint without trust ratios takes steps of the length of the first one's ratio."""

import pytest
import torch
from torch import nn

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import TrafficCounter
from shoal.compression.config import CompressionConfig
from shoal.compression.exchange import CompressedSum
from shoal.compression.layout import TensorPart
from shoal.core.compressrule import CompressRule
from shoal.engine.compression.saved import SavedSums
from shoal.engine.state import RankState
from shoal.optim.layerwise import Lamb
from shoal.parallel.onebit import MomentumSums

FROZEN_AT, STEPS = 3, 3


def make():
    """The one rank's sums of a weight, and its optimizer."""
    weight = nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4))
    channel = Channel("replicas", rank=0, size=1, transport=None, traffic=TrafficCounter())
    sums = CompressedSum(
        {"w": TensorPart((3, 4))},
        CompressRule.parse(f"onebit@{FROZEN_AT}"),
        CompressionConfig(min_elements=1),
        channel,
        seed=1,
        device=torch.device("cpu"),
    )
    groups = [{"params": [weight], "param_names": ["w"], "adapt": True}]
    optimizer = Lamb(groups, lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.0)
    optimizer.state[weight] = optimizer.create_state(weight)
    momenta = MomentumSums(sums, clip=None, allows_untouched=False)
    momenta.attach(optimizer, {"w": weight})
    return weight, optimizer, momenta


def step(number, weight, optimizer, momenta):
    generator = torch.Generator().manual_seed(number)
    weight.grad = torch.randn(3, 4, generator=generator)
    momenta.sums.begin_step(number)
    momenta.reduce_({"w": weight.grad})
    if momenta.is_compressed:
        momenta.update(optimizer)
    else:
        optimizer.step()
    momenta.sums.commit()


def state_of(weight, optimizer, momenta):
    """By name, copies of everything that a checkpoint has of the sums, and the rest of the run's state."""
    saved = SavedSums(sums=momenta.sums, saved_names={"w": "w"})
    return saved, saved.add_to(RankState(tensors={}, placements={}, all_weights=frozenset(), has_updates=True))


def resumed(keep):
    """Five steps past the freeze, of which the last three are of a run that goes on; its weights, and what it said."""
    before = make()
    for number in range(FROZEN_AT + 2):
        step(number, *before)
    _, kept = state_of(*before)
    names = {name for name in kept.tensors if keep(name)}
    weight, optimizer, momenta = after = make()
    weight.data.copy_(before[0].data)
    for name, tensor in before[1].state[before[0]].items():
        optimizer.state[weight][name].copy_(tensor)
    saved, own = state_of(*after)
    for name, target in saved.to_load(own, names).tensors.items():
        if name in names:
            target.copy_(kept.tensors[name])
    said = saved.loaded()
    start = weight.detach().clone()
    for number in range(FROZEN_AT + 2, FROZEN_AT + 2 + STEPS):
        step(number, *after)
    return (weight.detach() - start), said, momenta


@pytest.mark.filterwarnings("error")
def test_a_checkpoint_without_trust_ratios_takes_no_steps_of_zero_length():
    whole, said, _ = resumed(lambda name: True)
    assert said is None
    moved, said, momenta = resumed(lambda name: not name.startswith(("compression/ratio", "compression/factor")))
    assert "before 1-bit LAMB kept its coefficients: for 1 tensors" in said
    assert float(momenta.sums.numbers["ratio/w"]) > 0
    assert 0.3 < float(moved.norm() / whole.norm()) < 3.0, "of the length of the run's that has them"
