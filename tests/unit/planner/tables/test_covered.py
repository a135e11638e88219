"""How far constants reach: rows beyond what was fitted on are said to be so; what a row leaves open is one for every metric."""

from dataclasses import replace

import pytest

from shoal.planner.hardware.presets import GIB
from shoal.planner.hardware.software import SOFTWARE, Covered, find_stack
from shoal.planner.tables.predict import (
    beyond,
    cover,
    fits,
    fullest,
    held_memory,
    job_of,
    needed_recompute,
    numbers_of,
    predict_run,
)
from shoal.planner.tables.table import read_table
from support.planner.run_tables import write_table


def read(tmp_path, *changes):
    return read_table(write_table(tmp_path / "runs.csv", *changes))


def test_what_some_rows_cover(tmp_path):
    one, two = read(tmp_path, {}, {"seq_len": 4096, "precision": "bf16"})
    found = cover([one, two])
    assert found["numbers"]["sequence"] == [2048, 4096] and found["numbers"]["tp"] == [1, 1]
    assert found["precisions"] == ["bfloat16", "float16"]


def test_a_row_beyond_what_was_fitted_on_says_in_what(tmp_path):
    """Only the software and the device were looked at: 65,536 tokens on 16,384 devices were in the calibrated range."""
    (run,) = read(tmp_path, {})
    numbers = {name: (value, value) for name, value in numbers_of(run).items()}
    covered = Covered(numbers=numbers, precisions=("float16",))
    assert beyond(run, covered) == [] and beyond(run, None) == []
    far = replace(run, shape=replace(run.shape, sequence=65536), precision="float8")
    assert beyond(far, covered) == [
        "sequence 65536 is outside the 2048 to 2048 that were calibrated on",
        "float8 was not calibrated on, but float16",
    ]


@pytest.mark.parametrize(
    "change", [{"seq_len": 65536}, {"tp": 16, "dp": 2}, {"n_gpus": 16384, "dp": 16384, "global_batch": 2**18}]
)
def test_a_prediction_beyond_the_fitted_rows_is_out_of_range_and_has_a_wider_interval(tmp_path, change):
    near, far = (predict_run(run) for run in read(tmp_path, {}, change))
    assert near.in_range and not far.in_range and "that were calibrated on" in far.why_not
    assert far.interval[1] / far.predicted > near.interval[1] / near.predicted


def test_every_fitted_stack_says_what_it_covers():
    for software, device in (("fsdp", "a100-80gb"), ("megatron", "a100-80gb"), ("bigscience", "v100-32gb")):
        covered = find_stack(SOFTWARE[software], device).covered
        assert covered is not None and covered.precisions and covered.numbers["devices"][0] >= 1


def test_memory_has_as_much_recompute_as_time_where_a_row_does_not_say(tmp_path):
    """Time was that of a run tuned to fit; its memory was that of a run without recompute, which did not."""
    large = {
        "recompute": "unknown (see recipe)", "layers": 48, "hidden": 6144, "heads": 64, "kv_heads": 64, "ffn_hidden": 24576,
        "tp": 8, "dp": 4, "zero": 1, "micro_batch": 8, "measured_metric": "peak_mem_gib",
    }  # fmt: skip
    (run,) = read(tmp_path, large)
    job = job_of(run)
    share = needed_recompute(job, run.plan)
    assert 0 < share < 1 and not fits(job, run.plan)
    least, most = (fullest(job, replace(run.plan, recompute=mode)).allocated for mode in ("none", "full"))
    found = predict_run(run).predicted
    assert found * GIB == pytest.approx((1 - share) * least + share * most)
    assert found * GIB <= job.cluster.device.memory_bytes
    small = replace(run, recompute="none")
    assert held_memory(small, job, run.plan) == fullest(job, run.plan)
