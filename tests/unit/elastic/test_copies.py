"""Snapshots in memory that outlives the process which wrote them."""

import os

import pytest
import torch

from shoal.core.errors import RunError
from shoal.core.placement import place_whole
from shoal.elastic.copies import Offer, offer_snapshots, open_snapshots


@pytest.fixture
def tensors():
    return {
        "weights/a": torch.arange(6.0).reshape(2, 3),
        "optimizer/a/step": torch.tensor(3.0),
        "b": torch.ones(5, dtype=torch.int64),
    }


@pytest.fixture
def offered(tensors):
    own, offer = offer_snapshots(tensors, {name: place_whole(one.shape) for name, one in tensors.items()})
    yield own, offer
    os.close(offer.descriptor)


def test_the_last_two_snapshots_are_in_the_peers_memory(tensors, offered):
    own, offer = offered
    peer = open_snapshots(Offer.parse(offer.to_json()))
    assert peer.steps() == []
    for step in (4, 5, 6):
        tensors["weights/a"] += 1
        own.write(step, tensors)
    assert peer.steps() == [5, 6]
    assert torch.equal(peer.read(6)["weights/a"], tensors["weights/a"])
    assert torch.equal(peer.read(5)["weights/a"], tensors["weights/a"] - 1)
    assert peer.read(6)["optimizer/a/step"].shape == () and peer.read(6)["b"].dtype == torch.int64
    assert peer.layout.forms["weights/a"].placement == place_whole((2, 3))


def test_a_snapshot_that_was_not_finished_does_not_count(tensors, offered):
    own, offer = offered
    own.write(1, tensors)
    with pytest.raises(KeyError):
        own.write(2, {"b": tensors["b"]})
    assert open_snapshots(Offer.parse(offer.to_json())).steps() == [1]


def test_memory_of_somebody_else_is_refused(offered):
    _, offer = offered
    with pytest.raises(RunError, match="does not hold the snapshots"):
        open_snapshots(Offer(pid=offer.pid, descriptor=offer.descriptor, token="0" * 16, layout=offer.layout))
