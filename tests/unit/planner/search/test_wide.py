"""Computing in float32: what devices do without TF32, what is kept of a weight, and devices that have float16 alone."""

import math
from dataclasses import replace

import pytest

from shoal.core.plan import Plan
from shoal.planner.hardware.devices import DeviceConfig
from shoal.planner.hardware.presets import PRESETS, build_cluster, find_preset
from shoal.planner.hardware.software import SOFTWARE
from shoal.planner.pricing.cost import price_parts
from shoal.planner.pricing.job import weight_bytes_of
from shoal.planner.pricing.memory import price_memory
from shoal.planner.tables.cells import read_precision
from support.planner.jobs import job_of


@pytest.mark.parametrize(
    ("name", "plain", "rounded"),
    [
        ("v100", 15.7, 15.7), ("a100", 19.5, 156.0), ("h100", 66.9, 494.7), ("h20", 44.0, 74.0), ("l40s", 91.6, 183.0),
        ("b200", 600 / 8, 1125.0), ("b300", 600 / 8, 1125.0), ("gb200", 5760 / 72, 1250.0), ("gb300", 80.0, 1250.0),
        ("mi300x", 163.4, 653.7),
    ],
)  # fmt: skip
def test_float32_is_not_tf32(name, plain, rounded):
    """torch rounds to TF32 only where it is told to, and nothing here tells it: a plan in float32 was eight times too fast."""
    device = find_preset(name).device
    assert device.flops("float32") == plain * 1e12 and device.flops("tf32") == rounded * 1e12


def test_no_device_is_said_to_do_float32_at_a_quarter_of_its_half_precision_unless_it_is_a_processor():
    for preset in PRESETS.values():
        device = preset.device
        if not device.name.endswith("server"):
            assert device.flops("float32") <= 0.3 * device.flops(device.half_type), device.name


def test_tables_may_say_tf32():
    assert [read_precision(text) for text in ("TF32", "fp32", "bf16 (fp32 grad accum)")] == [
        "tf32",
        "float32",
        "bfloat16",
    ]


def test_a_device_with_float16_alone_is_priced():
    """Its exponentials were asked for by the peak of bfloat16, which it has not."""
    own = DeviceConfig(peak_tflops={"float16": 100.0}, memory_gib=24.0, memory_gb_per_s=900.0, link_gb_per_s=20.0)
    device = build_cluster("mine:8", {"mine": own}).device
    assert device.half_type == "float16" and device.softmax_rate == pytest.approx(1e14 / 256)
    job = job_of(precision="float16")
    own_job = replace(job, cluster=build_cluster("mine:2x8", {"mine": own}))
    assert price_parts(own_job, Plan(dp=16, microbatches=1)).stages[0].forward > 0


def test_power_holds_a_v100_back_in_the_16_bits_that_it_has():
    device = PRESETS["v100-32gb"].device
    assert device.sustained_flops("float16") == pytest.approx(1 / math.hypot(1 / 125e12, 1 / (300 * 1.4e12)))


def test_sharded_weights_are_float32_alone_and_cast_when_they_are_gathered():
    """Sixteen bytes for a weight in bfloat16 too: there is no second copy of it."""
    for software in ("fsdp", "torchtitan"):
        kept = weight_bytes_of(SOFTWARE[software], "bfloat16")
        job = job_of(software=software, weight_bytes=kept)
        assert (kept, job.gathered_bytes, job.gradient_bytes, job.optimizer_bytes) == (4.0, 2.0, 4.0, 8.0)
        assert replace(job, precision="float32").gathered_bytes == 4.0


@pytest.mark.parametrize("software", [name for name, found in SOFTWARE.items() if not found.keeps_wide])
def test_what_is_computed_in_float32_has_weights_of_four_bytes_and_two_moments(software):
    """Sixteen bytes for a weight: itself, its gradient, two moments; no copy in another type."""
    wide, half = (weight_bytes_of(SOFTWARE[software], precision) for precision in ("float32", "bfloat16"))
    assert (wide, half) == (4.0, 2.0)
    job = job_of(software=software, precision="float32", weight_bytes=wide)
    found = price_memory(job, Plan(dp=1, microbatches=1))[0]
    size = job.chain.weights
    assert (found.weights, found.gradients, found.optimizer) == pytest.approx((4 * size, 4 * size, 8 * size))
    assert job.reduced_bytes == 4.0


def test_ours_keeps_weights_in_float32_whatever_it_computes_in():
    ours = SOFTWARE["shoal"]
    assert [weight_bytes_of(ours, name) for name in ("bfloat16", "float32", "float64")] == [4.0, 4.0, 8.0]
