"""Rows instead of whole gradients: the same bits on the server, fewer on the wire, and nothing wrong is taken for a gradient."""

import pytest
import torch

from shoal.optim.build import decide_groups
from shoal.optim.config import OptimConfig
from shoal.paramserver.records import PushId
from shoal.paramserver.server.gradients import WrongGradient
from shoal.paramserver.server.replica import Replica
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.sharding import TensorSpec, cut_model
from shoal.paramserver.sparse import MEASURED_PUSHES, RowPacker, unpack_rows

MODEL = {
    "bias": TensorSpec((7,), "float32"),
    "embed": TensorSpec((64, 16), "float32"),
    "linear": TensorSpec((16, 32), "float32"),
}
SHARDS = cut_model(MODEL, 2)


def gradient(seed, touched=(3, 4, 60)):
    """Flat, in the order of the shards; of the embedding only some rows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(spec.shape, generator=generator) for name, spec in MODEL.items()}
    kept = torch.zeros(64, dtype=torch.bool)
    kept[list(touched)] = True
    tensors["embed"][~kept] = 0.0
    pieces = [piece for shard in SHARDS.shards for piece in shard.pieces]
    return torch.cat([tensors[piece.name].reshape(-1)[piece.start : piece.stop] for piece in pieces])


def parts(flat):
    sizes = [shard.numel for shard in SHARDS.shards]
    return flat.split(sizes)


def a_replica(shard):
    module = torch.nn.Linear(2, 2)
    optim = OptimConfig(name="sgd")
    return Replica(ShardState(shard, model=MODEL, optim=optim, groups=decide_groups(optim, module)))


def stored(replica, identity):
    return replica.state._gradients[identity].gradient


def test_a_server_stores_the_bits_of_the_whole_gradient():
    packer = RowPacker(SHARDS, MODEL)
    for push in range(6):
        flat = gradient(push, touched=(0, 31, 32, 33, 63) if push != 4 else range(64))
        for shard, part in zip(SHARDS.shards, parts(flat), strict=True):
            index, payload = packer.pack(shard.number, part)
            replica, identity = a_replica(shard), PushId("a", push)
            replica.store(identity, memoryview(payload.contiguous().view(torch.uint8).numpy()), 0, index)
            assert torch.equal(stored(replica, identity).view(torch.int32), part.view(torch.int32))
            if push != 4:
                assert payload.nbytes < part.nbytes, "rows are shorter"
    assert packer.sparse_names() == {"embed"}, "the linear layer touches every row, and is looked at no more"


def test_what_touches_most_rows_is_left_alone_after_it_was_measured():
    packer = RowPacker(SHARDS, MODEL)
    for push in range(MEASURED_PUSHES):
        for shard, part in zip(SHARDS.shards, parts(gradient(push, touched=range(0, 64, 2))), strict=True):
            packer.pack(shard.number, part)
    assert packer.sparse_names() == frozenset()
    index, payload = packer.pack(0, parts(gradient(9))[0])
    assert index == () and torch.equal(payload, parts(gradient(9))[0])


def test_a_shard_that_is_hardly_anything_but_few_rows_is_cold():
    model = {"embed": TensorSpec((400, 16), "float32"), "out": TensorSpec((30, 100), "float32")}
    shard_map = cut_model(model, 3)
    packer = RowPacker(shard_map, model)
    held = [{piece.name for piece in shard.pieces} for shard in shard_map.shards]
    for push in range(MEASURED_PUSHES):
        assert packer.cold_shards() == frozenset()
        for shard in shard_map.shards:
            row = torch.zeros(shard.numel)
            for piece in shard.pieces:
                row[piece.offset : piece.offset + (piece.numel if piece.name == "out" else 16)] = 1.0 + push
            packer.pack(shard.number, row)
    only = [number for number, names in enumerate(held) if names == {"embed"}]
    assert packer.cold_shards() == set(only) != set(range(3)), held


def test_a_shard_of_which_no_row_is_touched_gets_an_empty_gradient():
    """Its worker was refused and ended: the payload is empty, and torch sees no tensor in nothing."""
    model = {"embed": TensorSpec((64, 16), "float32")}
    shard = cut_model(model, 1).shards[0]
    optim = OptimConfig(name="sgd")
    replica = Replica(ShardState(shard, model=model, optim=optim, groups=decide_groups(optim, torch.nn.Linear(2, 2))))
    index, payload = RowPacker(cut_model(model, 1), model).pack(0, torch.zeros(64 * 16))
    assert index == (("embed", 0),) and payload.nbytes == 0
    replica.store(PushId("a", 0), memoryview(payload.numpy()), 0, index)
    assert torch.equal(stored(replica, PushId("a", 0)), torch.zeros(64 * 16))


def test_a_row_of_negative_zeros_is_sent():
    flat = gradient(1)
    part = parts(flat)[0].clone()
    embed = next(piece for piece in SHARDS.shards[0].pieces if piece.name == "embed")
    part[embed.offset : embed.offset + 16] = -0.0
    (_, count), *_ = RowPacker(SHARDS, MODEL).pack(0, part)[0]
    assert count == 3


def test_a_copy_that_is_on_its_way_keeps_rows_until_it_is_here():
    shard, part = SHARDS.shards[0], parts(gradient(2))[0]
    index, payload = RowPacker(SHARDS, MODEL).pack(0, part)
    replica, identity = Replica(None), PushId("a", 0)
    replica.store(identity, memoryview(payload.numpy()), 0, index)
    replica.fill(a_replica(shard).state)
    assert torch.equal(stored(replica, identity), part)


@pytest.mark.parametrize(
    "index",
    [
        (("embed", 4),),
        (("embed", -1),),
        (("embed", 2), ("embed", 1)),
        (("nothing", 3),),
        (("embed", 1 << 60),),
    ],
)
def test_an_index_that_does_not_fit_the_payload_is_refused(index):
    shard = SHARDS.shards[0]
    _, payload = RowPacker(SHARDS, MODEL).pack(0, parts(gradient(3))[0])
    with pytest.raises(WrongGradient):
        unpack_rows(payload, index, shard, MODEL, torch.float32)
