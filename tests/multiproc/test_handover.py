"""How a state reaches a rank that joins: real ranks, from one peer, point to point."""

import json

import torch

from shoal.comm.channel import PeerLost
from shoal.core.placement import Patch, Placement, place_whole
from shoal.elastic.commit import Resumption, Shard
from shoal.engine.state import RankState
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.elastic import handover
from shoal.trainer.elastic.recovery import MemberState, fetch_state
from shoal.trainer.samedata import gather_texts

MEMBERS = ("a", "b", "c")
HASH_BYTES = 8


def _state(tensors, placements=None):
    given = placements or {name: place_whole(tensor.shape) for name, tensor in tensors.items()}
    return RankState(tensors=tensors, placements=given, all_weights=frozenset(), has_updates=True)


def _rows(low, high, whole):
    """The shard of rows of a matrix, and where it lies."""
    patch = Patch(local_start=(0, 0), whole_start=(low, 0), shape=(high - low, whole.shape[1]))
    placement = Placement(whole_shape=tuple(whole.shape), local_shape=patch.shape, patches=(patch,))
    step = torch.tensor(9.0)
    return _state({"w": whole[low:high].clone(), "step": step}, {"w": placement, "step": place_whole(())})


def _count_sent(sent, spoil=False):
    real = torch.distributed.isend

    def counted(buffer, *, dst, group):
        sent.append(buffer.numel() - HASH_BYTES)
        if spoil:
            buffer[buffer.numel() // 2] ^= 1
        return real(buffer, dst=dst, group=group)

    handover.dist.isend = counted
    return lambda: setattr(handover.dist, "isend", real)


def _join_whole(world):
    """Two replicas hold everything, a third comes."""
    large = torch.arange(5_000_000, dtype=torch.float32)  # more than one message
    odd = torch.tensor([-0.0, float("nan"), 1e-45], dtype=torch.float64)
    tensors = {"large": large, "odd": odd, "flag": torch.tensor([True, False]), "step": torch.tensor(7.0)}
    shard = Shard(step=7, index=0, num_shards=1)
    own = {shard: _state(tensors)} if world.rank < 2 else {}
    target = _state({name: torch.ones_like(tensor) for name, tensor in tensors.items()})
    chosen = Resumption(step=7, num_shards=1, holders=(("a", "b"),))
    sent = []
    undo = _count_sent(sent)
    held = MemberState(member=MEMBERS[world.rank], own=own)
    source = fetch_state(held, chosen, target, world=world, own=shard)
    undo()
    same = all(
        torch.equal(target.tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for name, tensor in tensors.items()
    )
    return [source, same, sum(sent)]


def _cut_anew(world):
    """Rows of two ranks are dealt to three; the first has a copy of the second's, and need not ask."""
    whole = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    old = {index: Shard(step=9, index=index, num_shards=2) for index in range(2)}
    halves = {old[0]: _rows(0, 4, whole), old[1]: _rows(4, 8, whole)}
    own = {old[world.rank]: halves[old[world.rank]]} if world.rank < 2 else {}
    copies = {old[1]: halves[old[1]]} if world.rank == 0 else {}
    bounds = [(0, 2), (2, 5), (5, 8)] if world.size == 3 else []
    low, high = bounds[world.rank]
    target = _rows(low, high, torch.full_like(whole, -1.0))
    target.tensors["step"].zero_()
    chosen = Resumption(step=9, num_shards=2, holders=(("a",), ("b",)))
    sent = []
    undo = _count_sent(sent)
    held = MemberState(member=MEMBERS[world.rank], own=own, copies=copies)
    own_shard = Shard(step=9, index=world.rank, num_shards=3)
    source = fetch_state(held, chosen, target, world=world, own=own_shard)
    undo()
    same = torch.equal(target.tensors["w"], whole[low:high]) and float(target.tensors["step"]) == 9
    return [source, same, sum(sent)]


def _spoilt(world):
    undo = _count_sent([], spoil=True)
    try:
        _join_with_one_bit_wrong(world)
    except PeerLost as error:
        if world.rank == 2:  # The others compare what they gave with what it got.
            gather_texts(world, json.dumps({"got": "something else", "gave": {}}))
        return f"{error}"
    finally:
        undo()
    return ""


def _join_with_one_bit_wrong(world):
    shard = Shard(step=1, index=0, num_shards=1)
    state = _state({"w": torch.ones(1000)})
    held = MemberState(member=MEMBERS[world.rank], own={} if world.rank == 2 else {shard: state})
    chosen = Resumption(step=1, num_shards=1, holders=(("a", "b"),))
    return fetch_state(held, chosen, _state({"w": torch.zeros(1000)}), world=world, own=shard)


def handed_over(world):
    return [_join_whole(world), _cut_anew(world), _spoilt(world)]


def test_who_joins_gets_what_lacks_from_one_peer_and_nobody_else_sends_anything():
    joined, anew, spoilt = zip(*run_on_ranks(handed_over, 3), strict=True)
    state_bytes = 5_000_000 * 4 + 3 * 8 + 2 + 4
    assert [source for source, _, _ in joined] == ["a peer"] * 3 and all(same for _, same, _ in joined)
    assert sorted(sent for _, _, sent in joined) == [0, 0, state_bytes]
    assert all(same for _, same, _ in anew), "every rank has its rows"
    # The second asks the first for two rows; the third asks the second for three, and the first for how often was stepped.
    row = 4 * 4
    assert [sent for _, _, sent in anew] == [2 * row + 4, 3 * row, 0], anew
    assert spoilt[2] == "rank 0 sent a part of the state that arrived as something else"
    assert spoilt[0] == spoilt[1] == "c got another state of step 1 than its holders have"
