"""Small modules and the ways to cut them, for the tests of chains."""

import torch

from shoal.data.spec import DataSpec
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.units import find_units

D = 6


def units_of(model, example):
    return find_units(model, example, analyse_module(model, example, ParallelConfig()))


def cut_at(model, example, *paths):
    """A chain whose second, third, ... stages begin at these units."""
    units = units_of(model, example)
    places = [unit.path for unit in units]
    chain = StagedModule(model, units, [0, *(places.index(path) for path in paths)])
    chain.settle(example)
    return chain


def run_through(chain, inputs):
    """All stages, with what passes between them as the runtime hands it on: leaves that want a gradient."""
    received = ()
    for stage in range(chain.num_stages):
        received = chain.run(stage, inputs, received)
        if stage < chain.num_stages - 1:
            received = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in received]
    return received


def gpt():
    torch.manual_seed(0)
    config = GptConfig(layers=2, hidden=16, heads=2, tied=True)
    return build_model(config, DataSpec(kind="tokens", vocab=33, sequence=8))


def tokens(seed):
    return (torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(seed)),)
