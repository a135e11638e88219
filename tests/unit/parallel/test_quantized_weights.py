"""Weights that ZeRO gathers as codes: what passes read of each parameter, and which go as they are."""

import pytest
import torch
from torch import nn

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import TrafficCounter
from shoal.compression.blocks import BlockInt
from shoal.compression.config import CompressionConfig
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.zero.layout import lay_out
from shoal.parallel.zero.quantized import WeightCodec, block_for


@pytest.mark.parametrize(("row", "block"), [(64, 64), (200, 100), (4096, 128), (131, 1), (97, 97), (384, 128)])
def test_a_block_is_the_largest_part_of_a_row(row, block):
    assert block_for(row, 128) == block


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_passes_read_what_the_codec_leaves_of_each_parameter(kind, bits):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(200, 30), nn.Linear(131, 40), nn.Linear(30, 5))
    layout = lay_out(model, ModuleAnalysis(), 1)
    codec = WeightCodec(layout, CompressionConfig(weights=kind, min_elements=1000))
    channel = Channel("dp", rank=0, size=1, transport=None, traffic=TrafficCounter())
    named = dict(model.named_parameters())
    for index, unit in enumerate(layout.units):
        shard, whole = torch.zeros(unit.size), torch.zeros(unit.size)
        for slot in unit.slots:
            shard[slot.offset : slot.offset + slot.numel] = named[slot.name].detach().reshape(-1)
        codec.gather(index, shard, whole, channel)
        for slot in unit.slots:
            expected = named[slot.name].detach().reshape(-1)
            if slot.name == "0.weight":
                block = BlockInt(bits, 100)
                expected = block.decode(block.encode(expected), slot.numel)
            # 131 has no divisor of 16 or more, and the last layer is small.
            assert torch.equal(whole[slot.offset : slot.offset + slot.numel], expected), slot.name
