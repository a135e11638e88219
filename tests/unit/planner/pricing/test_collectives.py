"""Collectives: closed forms by hand, monotone, free for one; and which tier a group runs on."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.hardware.presets import build_cluster
from shoal.planner.hardware.software import Constants
from shoal.planner.pricing.collectives import (
    Group,
    Wire,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_wire,
    send,
    wire_of,
)

ALL = (all_reduce, all_gather, all_to_all)
WIRE = Wire(4, 1e9, 1e-5)
CONSTANTS = Constants(link=0.5, network=0.25)


def test_large_buffers_go_round_a_ring():
    """2 (n-1) hops and 2 (n-1)/n of the buffer; half of both for a gather, whose hops are doubled."""
    assert all_reduce(1e9, WIRE) == pytest.approx(6e-5 + 1.5)
    assert all_gather(1e9, WIRE) == all_to_all(1e9, WIRE) == pytest.approx(2e-5 + 0.75)
    assert send(1e9, WIRE) == pytest.approx(1e-5 + 1.0)


def test_small_buffers_go_by_a_tree():
    wire = Wire(64, 1e9, 1e-5)
    assert all_reduce(8, wire) == pytest.approx(12e-5 + 1.6e-8)
    assert all_reduce(1e9, wire) == pytest.approx(min(126e-5 + 2 * 63 / 64, 12e-5 + 2.0))


@given(
    size=st.integers(2, 4096),
    low=st.floats(1, 1e10),
    factor=st.floats(1.001, 1e3),
    bandwidth=st.floats(1e6, 1e12),
    latency=st.floats(1e-7, 1e-1),
)
def test_more_bytes_take_longer_and_one_rank_takes_nothing(size, low, factor, bandwidth, latency):
    wire, alone = Wire(size, bandwidth, latency), Wire(1, math.inf, 0.0)
    for collective in ALL:
        assert 0 < collective(low, wire) < collective(low * factor, wire)
        assert collective(low, alone) == collective(0, wire) == 0
        assert collective(low, Wire(size, bandwidth * 2, latency)) < collective(low, wire)
    # A sum that all get is a scatter and a gather; a ring's hops are one by one.
    assert all_reduce(low, wire) >= 2 * (size - 1) / size * low / bandwidth


@pytest.mark.parametrize(
    ("group", "bandwidth", "latency"),
    [
        (Group(8, 1), 300e9 * 0.5, 6e-6),  # inside a node
        (Group(2, 4), 300e9 * 0.5, 6e-6),
        (Group(2, 8), 25e9 * 0.25, 12e-6),  # one in each node
        (Group(16, 8), 25e9 * 0.25, 12e-6),
        (Group(8, 4), 2 * 25e9 * 0.25, 12e-6),  # two in each node: the links of both
        (Group(32, 1), 8 * 25e9 * 0.25, 12e-6),
        (Group(2, 64), 25e9 * 0.25, 12e-6),
    ],
)
def test_a_group_runs_on_the_tier_that_it_spans_with_the_links_of_its_ranks(group, bandwidth, latency):
    found = wire_of(group, build_cluster("a100-80gb:16x8"), CONSTANTS)
    assert found == Wire(group.size, pytest.approx(bandwidth), latency)


def test_links_of_many_ranks_are_not_faster_than_those_inside():
    cluster = build_cluster("a100-80gb-pcie:16x8")
    found = wire_of(Group(128, 1), cluster, Constants(link=0.1, network=1.0))
    assert found.bandwidth == pytest.approx(32e9 * 0.1)


def test_a_group_of_one_needs_no_wire():
    assert wire_of(Group(1, 8), build_cluster("a100:16x8"), CONSTANTS).size == 1


def test_an_exchange_leaves_a_node_through_each_ranks_own_link():
    """Of 32 ranks, 24 are in other nodes: a rank's bytes for them go through its own card, at 25 GB/s x 0.25."""
    cluster = build_cluster("a100-80gb:16x8")
    found = all_to_all(32e9, all_to_all_wire(Group(32, 1), cluster, CONSTANTS))
    assert found == pytest.approx(24e9 / (25e9 * 0.25) + 5 * 12e-6)
    inside = Group(8, 1)
    assert all_to_all_wire(inside, cluster, CONSTANTS) == wire_of(inside, cluster, CONSTANTS)
    assert all_to_all_wire(Group(1, 8), cluster, CONSTANTS).size == 1


def test_an_exchange_is_no_faster_than_the_links_inside_a_node():
    """Two nodes of 8 behind slow links inside: 7 of 16 parts go through those, 8 through the network."""
    found = all_to_all(
        16e9, all_to_all_wire(Group(16, 1), build_cluster("a100-80gb:16x8"), Constants(link=0.01, network=1.0))
    )
    assert found == pytest.approx(7e9 / (300e9 * 0.01) + 4 * 12e-6)


def test_a_token_that_goes_to_many_ranks_of_a_node_travels_there_once():
    """Eight copies over two nodes: all but one token in 256 go to the other node, once in place of four times."""
    cluster = build_cluster("a100-80gb:2x8")
    each, once = (
        all_to_all(16e9, all_to_all_wire(Group(16, 1), cluster, Constants(link=1.0, network=0.1), copies=copies))
        for copies in (1, 8)
    )
    assert each == pytest.approx(8e9 / 2.5e9 + 4 * 12e-6)
    assert once == pytest.approx(8e9 / 2.5e9 * (1 - 1 / 256) / 4 + 4 * 12e-6)
