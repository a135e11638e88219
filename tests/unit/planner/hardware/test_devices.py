"""Devices, clusters and stacks: names, nearest names, numbers of one's own, and constants with their provenance."""

import math
import re
from dataclasses import fields, replace

import pytest

from shoal.core.errors import RequestError
from shoal.planner.hardware.devices import Device, DeviceConfig, parse_cluster
from shoal.planner.hardware.presets import LINKS, PRESETS, build_cluster, find_preset
from shoal.planner.hardware.software import SOFTWARE, Constants, _stored, find_stack

OWN = DeviceConfig(peak_tflops={"bfloat16": 100.0}, memory_gib=24.0, memory_gb_per_s=900.0, link_gb_per_s=20.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_sources_and_a_cluster(name):
    preset = PRESETS[name]
    assert preset.device.source and LINKS[preset.inside].source and LINKS[preset.between].source
    cluster = build_cluster(f"{name}:3x2")
    assert cluster.num_devices == 6 and cluster.devices_per_node == 2 and len(cluster.tiers) == 2
    peaks = preset.device.peak_flops
    assert peaks["float32"] <= preset.device.flops("bfloat16") and preset.device.memory_bytes >= 16 * 2**30


def test_processors_have_the_peaks_that_their_cores_add_up_to_and_no_drivers_context():
    """Of 32 and 72 cores they had half and a third, and 2 GiB of a CUDA context."""
    x86, arm = (PRESETS[name].device for name in ("x86-server", "arm-server"))
    assert x86.flops("float32") == pytest.approx(5.94e12, rel=1e-3) and arm.flops("float32") == pytest.approx(
        7.14e12, rel=1e-3
    )
    assert x86.flops("bfloat16") == 2 * x86.flops("float32") and arm.flops("bfloat16") == 4 * arm.flops("float32")
    for device in (x86, arm):
        assert (
            device.free_bytes == pytest.approx(255.7 * 2**30) and PRESETS["h100-80gb"].device.free_bytes == 78 * 2**30
        )


def test_an_mi250x_is_what_torch_has_as_a_device():
    """It was a module of two dies, eight in a node: twice what real nodes have."""
    preset = PRESETS["mi250x"]
    die, tier = preset.device, build_cluster("mi250x:2x8").tiers[-1]
    assert (die.flops("bfloat16"), die.flops("float32"), die.memory_bytes) == (191.5e12, 47.85e12, 64 * 2**30)
    assert die.memory_bandwidth == pytest.approx(1.64e12, rel=1e-3) and preset.devices_per_node == 8
    assert die.watts == 280 and die.sustained_flops("bfloat16") < die.flops("bfloat16")
    # Four ports of 200 Gb/s for eight dies.
    assert 8 * tier.bandwidth == pytest.approx(4 * 200e9 / 8)


def test_the_devices_that_were_asked_for_are_there():
    wanted = "v100 a100 a100-40gb a100-80gb-pcie h100 h200 b200 gb200 gb300 mi250x mi300x x86 arm"
    assert all(find_preset(name).device for name in wanted.split())


def test_names_in_any_case_and_one_node():
    assert build_cluster("A100-80GB:8").num_devices == 8 and build_cluster(" h100:1x4 ").devices_per_node == 4


def test_a_wider_type_stands_in_for_one_that_a_device_lacks():
    assert find_preset("a100").device.flops("float8") == 312e12
    assert find_preset("v100").device.flops("bfloat16") == 15.7e12
    with pytest.raises(RequestError, match="h100-80gb has no peak for float64 or anything wider, but for float32"):
        find_preset("h100").device.flops("float64")


@pytest.mark.parametrize("text", ["", "a100", "a100:", ":8", "a100:8x", "a100:x8", "a100:-1", "a100:8x8x8", "a100:1.5"])
def test_what_is_no_cluster_says_how_one_is_written(text):
    with pytest.raises(RequestError, match="is not NAME:NODESxDEVICES; write for example a100-80gb:16x8"):
        parse_cluster(text)


@pytest.mark.parametrize("text", ["a100:0", "a100:0x8", "a100:8x0", "a100:999999x999999"])
def test_too_few_and_too_many_devices(text):
    with pytest.raises(RequestError, match=r"has \d+ x \d+ devices; give 1 to 1,000,000 in all"):
        parse_cluster(text)


def test_more_devices_than_numbers_are_read_for_are_too_many():
    """A number of ten digits was said to be no NAME:NODESxDEVICES."""
    with pytest.raises(RequestError, match=r"0x8' has too many devices; give 1 to 1,000,000 in all"):
        parse_cluster("h100:100000000000000000000x8")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gb20", "did you mean 'gb200', 'b200' or 'gh200'? there are v100-16gb"),
        ("a100-80", "did you mean 'a100-80gb', 'h100-80gb' or 'a800-80gb'? there"),
        ("mi300", "did you mean 'mi300x', "),
        ("l40", "did you mean 'l40s' or 'l40s-48gb'? there"),
        ("tpu", "there are v100-16gb"),
    ],
)
def test_an_unknown_device_gets_the_nearest_names(name, near):
    with pytest.raises(RequestError, match=re.escape(f"there is no device '{name}'; {near}")):
        find_preset(name)


def test_a_device_of_ones_own_is_among_the_nearest_names():
    with pytest.raises(RequestError, match=r"did you mean 'lab-gpu'\? there are lab-gpu, v100-16gb"):
        build_cluster("lab-gpus:4x2", {"Lab-GPU": OWN})


def test_a_device_by_ones_own_numbers():
    cluster = build_cluster("Mine:4x2", {"mine": OWN})
    assert cluster.device.flops("bfloat16") == 1e14 and cluster.device.memory_bytes == 24 * 2**30
    assert [tier.bandwidth for tier in cluster.tiers] == [20e9, 12.5e9]
    assert cluster.tiers[0].latency == pytest.approx(10e-6)
    assert len(build_cluster("mine:8", {"mine": OWN}).tiers) == 1


def test_a_cluster_of_another_size_keeps_its_tiers():
    cluster = build_cluster("a100:16x8")
    assert [tier.devices for tier in cluster.resized(256).tiers] == [8, 256]
    assert [tier.devices for tier in cluster.resized(4).tiers] == [4]
    assert cluster.resized(256).devices_per_node == 8


def test_constants_are_fitted_in_at_most_six_places_and_say_on_what():
    stored = _stored()
    assert stored["made_by"] == "benchmarks/planner/fit.py"
    for software, free in stored["free"].items():
        assert software in SOFTWARE and len(free) <= 6 and set(free) <= {field.name for field in fields(Constants)}
    for name, entry in stored["stacks"].items():
        assert entry["fitted_on"] and entry["error"] < 0.5
        software, _, device = name.partition("/")
        assert (software == "*" or software in SOFTWARE) and (device == "*" or device in PRESETS)
        untouched = set(Constants().as_dict()) - set(stored["free"].get(software, stored["free"]["fsdp"])) - {"narrow"}
        assert all(entry["constants"][key] == Constants().as_dict()[key] for key in untouched)


def test_a_stack_that_nobody_measured_says_so():
    assert find_stack(SOFTWARE["fsdp"], "a100-80gb").is_fitted
    for software, device in (("fsdp", "mi300x"), ("shoal", "h100-80gb")):
        found = find_stack(SOFTWARE[software], device)
        assert not found.is_fitted and found.software.name == software and found.fitted_on


def test_a_device_with_a_known_chip_has_the_constants_of_that_chip():
    for device, relative in (("h800-80gb", "h100-80gb"), ("h200-141gb", "h100-80gb")):
        found = find_stack(SOFTWARE["megatron-core"], device)
        assert found.constants == find_stack(SOFTWARE["megatron-core"], relative).constants and not found.is_fitted
    assert (
        find_stack(SOFTWARE["megatron-core"], "mi300x").constants
        != find_stack(SOFTWARE["megatron-core"], "h100-80gb").constants
    )


def test_power_holds_a_device_back_in_every_precision_alike():
    hot, cool, unknown = (
        Device(
            name="mine", peak_flops={"bfloat16": 2e15, "float8": 4e15}, memory_bytes=1.0, memory_bandwidth=1.0, source="",
            watts=watts,
        )
        for watts in (1000.0, 5000.0, None)
    )  # fmt: skip
    # 1.4e15 by its power and 2e15 by its clock, like the sides of a right angle.
    assert hot.sustained_flops("bfloat16") == pytest.approx(1 / math.hypot(1 / 1.4e15, 1 / 2e15))
    assert hot.flops("bfloat16") == 2e15
    assert hot.sustained_flops("float8") == pytest.approx(2 * hot.sustained_flops("bfloat16"))
    assert hot.sustained_flops("float8") < cool.sustained_flops("float8") < unknown.sustained_flops("float8") == 4e15


def test_a_device_of_more_power_sustains_more_of_the_same_peak():
    small, large = (PRESETS[name].device for name in ("gb200-186gb", "gb300-279gb"))
    assert small.flops("float8") == large.flops("float8") and small.watts < large.watts
    assert small.watts / large.watts < small.sustained_flops("float8") / large.sustained_flops("float8") < 1


def test_exponentials_are_the_data_sheets_or_what_hopper_has_for_its_peak():
    assert PRESETS["h100-80gb"].device.softmax_rate == pytest.approx(3.87e12)
    assert PRESETS["gb300-279gb"].device.softmax_rate == 2 * PRESETS["gb200-186gb"].device.softmax_rate
    unknown = replace(PRESETS["h100-80gb"].device, exponentials=None)
    assert unknown.softmax_rate == pytest.approx(3.87e12, rel=0.01)


def test_devices_without_a_switch_have_between_them_their_share_of_the_links():
    mesh, switched = (build_cluster(f"{name}:8").tiers[0] for name in ("mi300x", "h100"))
    assert mesh.is_mesh and mesh.bandwidth_among(2) == pytest.approx(mesh.bandwidth / 7)
    assert mesh.bandwidth_among(8) == mesh.bandwidth
    assert not switched.is_mesh and switched.bandwidth_among(2) == switched.bandwidth


def test_a_release_or_a_relative_has_the_constants_of_the_software_that_it_is_fitted_as():
    for device in ("gb300-279gb", "mi300x"):
        own, relative = (find_stack(SOFTWARE[name], device) for name in ("megatron-core-graphs", "megatron-core"))
        assert own.constants == relative.constants and own.is_fitted == relative.is_fitted
        assert own.software.replays and not relative.software.replays
    titan, fsdp = (find_stack(SOFTWARE[name], "h100-80gb").constants for name in ("torchtitan", "fsdp"))
    assert titan.matmul == fsdp.matmul and (titan.attention, titan.narrow) == (Constants.attention, 1.0)
