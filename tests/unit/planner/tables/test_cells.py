"""Words of tables: which software a text names, which device a cell means, and what is said of one that nobody knows."""

import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.planner.hardware.devices import DeviceConfig
from shoal.planner.tables.cells import find_device, likely_software, read_cluster, read_recompute, read_software


@pytest.mark.parametrize(
    ("text", "software"),
    [
        ("vTrain [...] Megatron-DeepSpeed; recompute from config", "megatron-deepspeed"),
        ("tune-up [bigscience experiments/tr3m-1B3.md] DeepSpeed PipelineEngine", "bigscience"),
        ("SimuMax real runs; Megatron-LM 23e00ed, TE 2.11", "megatron-core"),
        ("torchtitan H100; FSDP2", "torchtitan"),
        ("a table of FSDP runs", "fsdp"),
        ("MT-NLG 530B", "megatron-deepspeed"),
        ("Korthikanti et al. 2022 Table 5", "megatron"),
        # A source's name alone says nothing, and who ran their own software is not taken for somebody else.
        ("vTrain", None),
        ("SimuMax", None),
        ("Llama 3 405B, FSDP with ZeRO-2 semantics", None),
        ("DeepSeek-V3 technical report", None),
    ],
)
def test_the_software_that_a_text_names(text, software):
    assert read_software(text) == software


def test_a_pipeline_with_sharded_weights_is_not_taken_for_plain_sharding():
    assert likely_software("h100-80gb", 3, has_stages=False) == "fsdp"
    assert likely_software("h100-80gb", 3, has_stages=True) == "megatron-core"
    assert likely_software("a100-80gb", 1, has_stages=True) == "megatron"


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("op-level AC", "selective"), ("selective (2)", "selective"), ("SAC", "selective"), ("full AC", "full"),
        ("AC", "full"), ("none", "none"), ("unknown (see recipe)", "unknown"), ("", "unknown"),
    ],
)  # fmt: skip
def test_words_for_recompute(text, mode):
    assert read_recompute(text) == mode


def test_an_unknown_device_of_a_table_gets_the_nearest_name():
    with pytest.raises(
        RequestError, match=r"there is no device 'A10O-80GB'; did you mean 'a100-80gb'.*a table does not"
    ):
        find_device("A10O-80GB")
    with pytest.raises(RequestError, match="there is no device 'TPU v4'; there are v100-16gb"):
        find_device("TPU v4")


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ({"bf16": 400.0}, "there is no compute type 'bf16'; did you mean 'bfloat16'"),
        ({"float-8": 800.0}, "there is no compute type 'float-8'; did you mean 'float8'"),
        ({}, "peak_tflops"),
    ],
)
def test_a_peak_of_an_unknown_type_is_refused_at_once(peaks, said):
    """``bf16 = 400`` was taken, and failed when the first product was priced."""
    numbers = {"memory_gib": 24.0, "memory_gb_per_s": 900.0, "link_gb_per_s": 20.0}
    with pytest.raises(RequestError, match=said):
        validate(DeviceConfig, {"peak_tflops": peaks, **numbers}, origin="[planner.devices.mine]")


@pytest.mark.parametrize(
    ("text", "cell", "gb_per_s"),
    [
        ("800 Gb/s inter-node in the config", "", 12.5), ("1600 Gbps node-node interconnect", "", 25.0),
        ("1,600 Gb/s per node", "", 25.0), ("8x 400 Gb/s InfiniBand", "", 50.0), ("12.5 Gb/s Ethernet", "", 12.5 / 64),
        ("", "H100 (Grand Teton, 400Gb/s/GPU)", 50.0), ("400 Gb/s InfiniBand per GPU", "", 50.0),
        # Bytes, and rates of nothing that is known.
        ("25 GB/s InfiniBand", "", 50.0), ("600 GB/s NVLink", "", 50.0), ("100 Gb/s of something", "", 50.0),
    ],
)  # fmt: skip
def test_a_networks_rate_is_a_devices_or_a_nodes(text, cell, gb_per_s):
    cluster = read_cluster(find_device("H100"), 16, text, device_cell=cell)
    assert cluster.tiers[1].bandwidth == pytest.approx(gb_per_s * 1e9)


def test_a_number_of_devices_in_their_cell_is_no_node():
    assert read_cluster(find_device("16xH100"), 16, "", device_cell="16xH100").devices_per_node == 8
