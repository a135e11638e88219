"""A channel in silence: nothing moves, nothing is counted, and what would have come is what this rank has."""

import torch

from shoal.comm.channel import Channel, is_silent, silent
from shoal.comm.trafficcounter import TrafficCounter


class Loud:
    """A transport that must not be used."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was called in silence")


def test_every_operation_does_as_if_all_ranks_had_what_this_one_has():
    channel = Channel("tp", rank=1, size=2, transport=Loud(), traffic=TrafficCounter())
    own = torch.tensor([1.0, 2.0])
    with channel.traffic.counting() as counts, silent():
        assert is_silent() and not channel.is_counting
        for operation in (channel.all_reduce_, channel.all_reduce_max_, channel.broadcast_):
            assert operation(own.clone()).tolist() == [1.0, 2.0]
        assert channel.all_gather(own, torch.empty(4), [2, 2]).tolist() == [1.0, 2.0, 1.0, 2.0]
        # Another rank's part of another size has no element that is known: the first stands for all.
        assert channel.all_gather(own, torch.empty(5), [3, 2]).tolist() == [1.0, 1.0, 1.0, 1.0, 2.0]
        assert channel.reduce_scatter(torch.arange(4.0), torch.empty(3), [1, 3]).tolist() == [1.0, 2.0, 3.0]
        received = [torch.empty(2), torch.empty(3)]
        channel.all_to_all([own, own], received)
        assert [part.tolist() for part in received] == [[1.0, 2.0], [1.0, 1.0, 1.0]]
        channel.ring_shift(own, received[0])
        assert received[0].tolist() == [1.0, 2.0]
    assert counts == {} and not is_silent()
