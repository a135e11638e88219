"""Which link a group of ranks gets: nodes that groups straddle, pipelines that leave a node, clusters of other sizes."""

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.planner.hardware.devices import DeviceConfig
from shoal.planner.hardware.presets import build_cluster
from shoal.planner.pricing.collectives import Group, all_to_all_wire, wire_of
from shoal.planner.pricing.cost import price_parts, wires_of
from shoal.planner.tables.cells import find_device, read_cluster
from support.planner.jobs import ROUND, job_of

NVLINK, NETWORK = 300e9 * ROUND.link, 25e9 * ROUND.network
OWN = DeviceConfig(peak_tflops={"bfloat16": 100.0}, memory_gib=24.0, memory_gb_per_s=900.0, link_gb_per_s=20.0)


@pytest.mark.parametrize(
    ("cluster", "plan", "bandwidth"),
    [
        ("a100:2x8", Plan(dp=2, tp=2, pp=4), NETWORK),
        ("a100:2x8", Plan(tp=1, pp=16), NETWORK),
        ("a100:2x8", Plan(dp=4, tp=2, pp=2), NETWORK),
        ("a100:1x8", Plan(tp=2, pp=4), NVLINK),
    ],
)
def test_a_pipeline_goes_at_the_pace_of_the_places_between_which_it_leaves_a_node(cluster, plan, bandwidth):
    """With four ranks to a place and nodes of eight, every second transfer crosses; all were priced inside a node."""
    found = wires_of(plan, job_of(cluster=cluster)).pipeline
    assert found.bandwidth == pytest.approx(bandwidth) and found.size == 2


def test_a_pipeline_that_leaves_its_node_takes_longer_for_its_transfers():
    near, far = (
        price_parts(job_of(cluster=cluster), Plan(dp=2, tp=2, pp=2, microbatches=8)).transfer
        for cluster in ("a100:1x8", "a100:2x4")
    )
    assert far > 5 * near > 0


@pytest.mark.parametrize("wire", [wire_of, all_to_all_wire])
def test_a_group_that_fits_a_node_and_does_not_divide_it_straddles_two(wire):
    """Three ranks on nodes of four: the second group has one in the first node and two in the second."""
    cluster = build_cluster("a100:3x4")
    assert wire(Group(3, 1), cluster, ROUND).bandwidth <= 2 * NETWORK
    assert wire(Group(4, 1), cluster, ROUND).bandwidth == wire(Group(2, 2), cluster, ROUND).bandwidth == NVLINK
    assert wire(Group(3, 1), build_cluster("a100:1x3"), ROUND).bandwidth == NVLINK


def test_a_ring_leaves_by_the_links_of_the_node_that_has_fewest_of_its_ranks():
    """Four of every six: a group has two ranks in each of two nodes."""
    cluster = build_cluster("a100:4x6")
    assert wire_of(Group(4, 1), cluster, ROUND).bandwidth == pytest.approx(2 * NETWORK)
    assert wire_of(Group(12, 1), cluster, ROUND).bandwidth == pytest.approx(6 * NETWORK)


@pytest.mark.parametrize(("text", "own"), [("h100:1x8", None), ("h100:8", None), ("mine:1x8", {"mine": OWN})])
def test_one_node_made_larger_is_many_nodes(text, own):
    """It became one NVLink domain of ten thousand devices."""
    cluster = build_cluster(text, own)
    assert len(cluster.tiers) == 1
    large = cluster.resized(10_000)
    assert [tier.devices for tier in large.tiers] == [8, 10_000]
    assert large.tiers[1].bandwidth == build_cluster(f"{cluster.device.name}:2x8", own).tiers[1].bandwidth
    again = large.resized(4)
    assert [tier.devices for tier in again.tiers] == [4] and [t.devices for t in again.resized(64).tiers] == [4, 64]


def test_a_node_of_more_devices_than_its_link_joins_is_refused_with_the_nodes_that_it_takes():
    with pytest.raises(RequestError, match=r"has 128 devices in a node, and nvlink3 joins 8 .*; write a100-80gb:16x8"):
        build_cluster("a100-80gb:128")
    assert build_cluster("gb200:72").num_devices == 72


@pytest.mark.parametrize(
    ("gpu", "num_devices", "tiers"),
    [
        ("GB200", 256, [64, 256]),
        ("GB200", 64, [64]),
        ("A100-80GB", 12, [6, 12]),
        ("A100-80GB", 64, [8, 64]),
        ("A100-80GB", 11, [6, 12]),
    ],
)
def test_a_run_that_does_not_fill_its_nodes_takes_as_many_of_each(gpu, num_devices, tiers):
    found = read_cluster(find_device(gpu), num_devices, "")
    assert [tier.devices for tier in found.tiers] == tiers
