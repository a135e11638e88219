"""The chain of calls that is found in modules of every shape, written out by hand."""

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig
from shoal.pipeline.units import find_units
from support.pipeline.stages_on_ranks import batch, build


def units(model, *example):
    return find_units(model, example, analyse_module(model, example, ParallelConfig()))


def paths(model, *example):
    return [unit.path for unit in units(model, *example)]


class Block(nn.Module):
    """Two layers that belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Blocks(nn.Module):
    """A list of blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(3))})
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.body["layers"]:
            x = block(x)
        return self.last(x)


def test_a_sequence_is_opened():
    assert paths(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(2, 4)) == ["0", "1", "2"]


def test_sequences_in_sequences_are_opened_to_the_bottom():
    inner = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    model = nn.Sequential(nn.Linear(4, 6), inner, nn.Linear(6, 3))
    assert paths(model, torch.randn(2, 4)) == ["0", "1.0", "1.1.0", "1.1.1", "2"]


def test_blocks_of_a_stack_are_units_and_are_not_opened():
    """Though a sequence is in each of them."""
    found = paths(Blocks(), torch.randn(2, 3))
    assert found == ["first", "body.layers.0", "body.layers.1", "body.layers.2", "last"]


def test_blocks_in_a_sequence_are_not_opened():
    model = nn.Sequential(nn.Linear(3, 4), *(Block() for _ in range(3)), nn.Linear(4, 2))
    assert paths(model, torch.randn(2, 3)) == ["0", "1", "2", "3", "4"]


def test_a_module_that_is_no_sequence_and_has_no_stack_is_a_unit_as_it_stands():
    model = nn.Sequential(Block(), nn.Linear(4, 3))
    assert paths(model, torch.randn(2, 4)) == ["0", "1"]


def test_the_layers_of_the_cnn_in_the_order_of_its_forward_pass():
    found = paths(build("cnn"), *batch("cnn", 0)[0])
    assert found == ["conv1", "norm1", "conv2", "norm2", "dropout1", "linear1", "dropout2", "linear2"]


def test_the_gpt():
    found = paths(build("gpt"), *batch("gpt", 0)[0])
    assert found == ["embedding", "embedding_dropout", *(f"blocks.{n}" for n in range(4)), "norm", "head"]


def test_a_module_that_is_called_twice_is_no_place_to_begin():
    relu = nn.ReLU()
    found = units(nn.Sequential(nn.Linear(4, 6), relu, nn.Linear(6, 6), relu), torch.randn(2, 4))
    assert [(unit.path, unit.is_once) for unit in found] == [("0", True), ("1", False), ("2", True), ("1", False)]


def test_what_is_never_called_is_no_unit():
    model = Blocks()
    model.spare = nn.Linear(4, 4)
    assert "spare" not in paths(model, torch.randn(2, 3))


def test_looking_changes_nothing():
    model = build("cnn").train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random = torch.get_rng_state()
    found = paths(model, *batch("cnn", 0)[0])
    assert found and all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_block_that_cannot_take_what_the_one_before_puts_out_is_named():
    blocks = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Sequential(nn.LayerNorm(5))]
    with pytest.raises(RequestError) as refused:
        find_units(nn.Sequential(*blocks), (torch.zeros(2, 4),), ModuleAnalysis())
    message = str(refused.value)
    assert "'2.0' (LayerNorm) raised RuntimeError" in message and "model(sample)" in message
