"""``--cluster``: a link of one's own choice between nodes."""

import pytest

from shoal.core.errors import RequestError
from shoal.planner.hardware.clusters import read_cluster
from shoal.planner.hardware.devices import DeviceConfig
from shoal.planner.hardware.presets import LINKS

OWN = DeviceConfig(peak_tflops={"bfloat16": 100.0}, memory_gib=24, memory_gb_per_s=500.0, link_gb_per_s=20.0)


@pytest.mark.parametrize(
    "text", ["a100-80gb:16x8@ethernet-100g", " a100:16x8 @ Ethernet-100G ", "mine:16x8@ethernet-100g"]
)
def test_nodes_are_joined_by_the_link_that_is_named(text):
    """Before, slow links were there and nobody could choose them."""
    cluster = read_cluster(text, {"mine": OWN})
    inner, outer = cluster.tiers
    link = LINKS["ethernet-100g"]
    assert (outer.name, outer.bandwidth, outer.latency) == ("ethernet-100g", link.bandwidth, link.latency)
    assert (inner.devices, outer.devices, cluster.num_devices) == (8, 128, 128) and inner.bandwidth > outer.bandwidth


def test_the_usual_link_needs_no_name():
    assert read_cluster("a100:16x8") == read_cluster("a100:16x8@infiniband-hdr")


def test_one_node_remembers_the_link_for_when_there_are_more():
    assert read_cluster("a100:8@ethernet-10g").resized(16).tiers[-1].bandwidth == LINKS["ethernet-10g"].bandwidth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a100:16x8@ethernet-100", "there is no link 'ethernet-100'; did you mean 'ethernet-10"),
        ("a100:16x8@ethernet", "did you mean 'ethernet-1g', 'ethernet-10g' or 'ethernet-100m'\\? there are nvlink2"),
        ("a100:16x8@", "'a100:16x8@' names no link after @; leave @ out for the usual one, or give one of nvlink2, "),
        ("a100@ ", "'a100@ ' names no link after @"),
        ("a10:16x8@ethernet-10g", "there is no device 'a10'; did you mean 'a100'"),
        ("a100@ethernet-10g", "is not NAME:NODESxDEVICES"),
    ],
)
def test_what_is_no_link_gets_the_nearest_name(text, message):
    with pytest.raises(RequestError, match=message):
        read_cluster(text)
