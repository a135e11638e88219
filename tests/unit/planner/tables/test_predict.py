"""Tables of runs: how cells are read, what each metric is, and that no row is dropped."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.planner.tables.cells import find_device
from shoal.planner.tables.predict import fits, job_of, model_flops, predict_run, step_seconds
from shoal.planner.tables.score import score
from shoal.planner.tables.table import COLUMNS, Run, Unread, read_table
from support.planner.run_tables import ROW, write_table


def read(tmp_path, *changes):
    return read_table(write_table(tmp_path / "runs.csv", *changes))


def predict(tmp_path, *changes):
    return [predict_run(run) for run in read(tmp_path, *changes)]


def test_a_row_is_a_job_and_a_plan(tmp_path):
    changes = {
        "dp": 2, "tp": 4, "pp": 4, "zero": "1 (assumed)", "schedule_or_interleave": "interleaved-1F1B v=3",
        "seq_parallel": 1, "recompute": "selective", "micro_batch": 1,
    }  # fmt: skip
    (run,) = read(tmp_path, changes)
    assert isinstance(run, Run) and run.row == 0 and run.assumed == ()
    assert str(run.plan) == (
        "dp=2 tp=4 sp=true pp=4 schedule=interleaved chunks=3 microbatches=256 zero=1 recompute=selective"
    )
    assert run.cluster.num_devices == 32 and run.device == "a100-80gb" and run.precision == "float16"


def test_every_metric_says_the_same_step(tmp_path):
    metrics = [
        "iter_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu_hw", "tflops_per_gpu_model", "mfu",
        "iter_time_ms", "samples_per_s", "samples_per_s_per_gpu",
    ]  # fmt: skip
    rows = predict(tmp_path, *({"measured_metric": metric, "measured_value": 0.5} for metric in metrics))
    found = dict(zip(metrics, (row.predicted for row in rows), strict=True))
    seconds, tokens = found["iter_time_s"], 512 * 2048
    assert {row.seconds for row in rows} == {seconds}
    assert found["tokens_per_s"] == pytest.approx(tokens / seconds)
    assert found["tokens_per_s_per_gpu"] == pytest.approx(tokens / seconds / 32)
    flops = 96 * tokens * 24 * 2304**2 * (1 + 2048 / (6 * 2304) + 51200 / (16 * 24 * 2304))
    assert found["tflops_per_gpu_hw"] == pytest.approx(flops / seconds / 32 / 1e12)
    assert found["tflops_per_gpu_model"] == pytest.approx(found["tflops_per_gpu_hw"] * 3 / 4)
    assert found["mfu"] == pytest.approx(found["tflops_per_gpu_model"] / 312)
    assert found["iter_time_ms"] == pytest.approx(seconds * 1e3)
    assert found["samples_per_s"] == pytest.approx(512 / seconds) == pytest.approx(32 * found["samples_per_s_per_gpu"])
    (percent,) = predict(tmp_path, {"measured_metric": "mfu_percent", "measured_value": 0.5})
    assert percent.predicted == pytest.approx(100 * found["mfu"])


@pytest.mark.parametrize("metric", ["mfu", "mfu_percent", "iter_time_s", "peak_mem_gib", "oom", "tokens_per_s_per_gpu"])
def test_what_was_measured_does_not_change_what_is_predicted(tmp_path, metric):
    rows = predict(tmp_path, *({"measured_metric": metric, "measured_value": value} for value in ("", 0.4, 1, 43.5)))
    assert len({row.predicted for row in rows}) == 1 and rows[0].predicted is not None


def test_a_share_above_one_is_said(tmp_path):
    """45 under ``mfu`` was scored as an error of 99%, and nothing said why."""
    share, percent = predict(
        tmp_path, *({"measured_metric": metric, "measured_value": 45} for metric in ("mfu", "mfu_percent"))
    )
    assert (
        share.odd == "measured_value is '45', and mfu is a share, 1 at most; give 0.45, or measured_metric mfu_percent"
    )
    assert not share.in_range and share.predicted is not None and not percent.odd


def test_out_of_memory_may_be_a_word(tmp_path):
    said = ("1", "yes", "True", "0", "no", "FALSE", "", "7", "maybe")
    rows = predict(tmp_path, *({"measured_metric": "oom", "measured_value": value} for value in said))
    assert [row.measured for row in rows] == [1, 1, 1, 0, 0, 0, None, 7, None]
    assert len({row.predicted for row in rows[:8]}) == 1 and not any(row.odd for row in rows[:7])
    assert "oom is 0 or 1, no or yes" in rows[7].odd
    assert rows[8].predicted is None and "measured_value is 'maybe'" in rows[8].why_not and "yes" in rows[8].why_not


@pytest.mark.parametrize(
    ("release", "precision", "experts", "software"),
    [
        ("26.06", "MXFP8", True, "megatron-core-graphs"),
        ("26.08.01", "FP8-MX", True, "megatron-core-graphs"),
        ("26.04.01", "MXFP8", True, "megatron-core"),
        ("26.06", "NVFP4", True, "megatron-core"),
        ("26.06", "MXFP8", False, "megatron-core"),
    ],
)
def test_a_release_that_captures_steps_is_told_from_those_before(tmp_path, release, precision, experts, software):
    (run,) = read(
        tmp_path,
        {
            "source": f"Megatron-Bridge, {release} NeMo Container{'; MoE: 128 experts top-8' if experts else ''}",
            "gpu": "GB300", "precision": precision,
        },
    )  # fmt: skip
    assert isinstance(run, Run) and run.software.name == software


def test_groups_that_do_not_divide_the_ranks_are_said_and_left_out(tmp_path):
    words = ("3 (FSDP)", "3 (FSDP group 8)", "3 (FSDP group 7)")
    plain, groups, odd = predict(
        tmp_path,
        *({"zero": zero, "dp": "64", "tp": "1", "pp": "1", "n_gpus": "64", "global_batch": "1024"} for zero in words),
    )
    assert groups.predicted != plain.predicted == odd.predicted
    assert "a group of 7 does not divide" in odd.why_not and "64 ranks" in odd.why_not and not odd.in_range


def test_memory_metrics_are_in_order(tmp_path):
    metrics = ("peak_mem_gib", "peak_reserved_gib", "mem_gb_nvidia_smi_max")
    allocated, reserved, device = (
        row.predicted for row in predict(tmp_path, *({"measured_metric": metric} for metric in metrics))
    )
    assert 0 < allocated < reserved < device and reserved == pytest.approx(allocated * 1.05)
    assert device == pytest.approx(reserved + 2)


def test_running_out_of_memory_is_told(tmp_path):
    small, large = {"measured_metric": "oom", "measured_value": 0}, {"gpu": "V100-16GB", "recompute": "none"}
    fine, full = predict(tmp_path, small, {**small, **large, "measured_value": 1})
    assert (fine.predicted, full.predicted) == (0.0, 1.0) and (fine.runs_out, full.runs_out) == (False, True)


def test_unknown_recompute_is_as_much_as_memory_asks_for(tmp_path):
    none, full, unknown, small = read(
        tmp_path, {"recompute": "none"}, {}, {"recompute": "unknown (see recipe)"}, {"recompute": "", "micro_batch": 1}
    )
    seconds = [predict_run(run).seconds for run in (none, full, unknown)]
    assert not fits(job_of(none), none.plan) and seconds[0] < seconds[2] <= seconds[1]
    assert fits(job_of(small), small.plan) and predict_run(small).seconds == step_seconds(job_of(small), small.plan)
    assert "as much recompute as memory asks for" in predict_run(unknown).why_not


def test_what_is_assumed_puts_a_row_out_of_range(tmp_path):
    inside, *outside = predict(
        tmp_path, {}, {"heads": "", "kv_heads": ""}, {"micro_batch": ""}, {"vocab": ""}, {"gpu": "MI300X"}
    )
    assert inside.in_range and inside.why_not == ""
    assert not any(row.in_range for row in outside) and all(row.predicted > 0 and row.why_not for row in outside)
    low, high = inside.interval
    wide = outside[0].interval
    assert low < inside.predicted < high and wide[1] / wide[0] > high / low


BAD = {
    "layers": ["", "many", "-3", "0", "nan", "inf", "1e9"],
    "hidden": ["", "0"],
    "seq_len": ["", "x"],
    "n_gpus": ["0", "nan", "64", "8.5", "32 or so"],
    "global_batch": ["-1", "1e300", "512.5"],
    "dp": ["0", "-2", "two"],
    "tp": ["-2", "0.5", "1.5"],
    "pp": ["0"],
    "micro_batch": ["0", "-1", "64"],
    "heads": ["0", "-5", "24.5"],
    "kv_heads": ["0"],
    "ffn_hidden": ["-7"],
    "vocab": ["0"],
    "zero": ["9", "4 (assumed)", "12", "1.5", "-1", "ZeRO-7"],
    "precision": ["bf17", "fp15 with fp33", "int9"],
    "schedule_or_interleave": ["interleaved v=99999999999999999999999"],
    "measured_metric": ["", "joules"],
    "gpu": ["", "abacus", "H900"],
    "measured_value": ["fast", "0", "-1", "nan"],
}


@pytest.mark.parametrize(("column", "cell"), [(column, cell) for column, cells in BAD.items() for cell in cells])
def test_a_cell_that_cannot_be_read_is_said_and_its_row_stays(tmp_path, column, cell):
    before, broken, after = predict(tmp_path, {}, {column: cell}, {})
    assert [row.row for row in (before, broken, after)] == [0, 1, 2]
    assert broken.predicted is None and not broken.in_range and broken.interval is None
    assert column in broken.why_not or (column == "gpu" and "there is no device" in broken.why_not)
    assert cell in broken.why_not
    note = broken.as_dict()["note"]
    assert broken.line == 3 and isinstance(note, str) and note.startswith("line 3: ")
    assert before.predicted == after.predicted is not None


ODD = {
    "micro_batch": ["sixteen"],
    "heads": ["eight"],
    "kv_heads": ["abc"],
    "ffn_hidden": ["4h"],
    "vocab": ["51,200", "128K"],
    "zero": ["wibble"],
    "precision": ["wibble", "mxfp6", "int8"],
    "recompute": ["fulll", "moe_act", "7", "0.5", "1.5"],
    "seq_parallel": ["maybe", "8"],
}


@pytest.mark.parametrize(("column", "cell"), [(column, cell) for column, cells in ODD.items() for cell in cells])
def test_a_word_that_is_not_understood_is_said_and_its_row_predicted_out_of_range(tmp_path, column, cell):
    before, odd = predict(tmp_path, {}, {column: cell})
    assert odd.predicted is not None and not odd.in_range and odd.odd in odd.why_not
    assert f"{column} is {cell!r}" in odd.odd
    assert before.in_range and not before.odd


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        ("zero", ["", "0", "3 (FSDP group 64)", "1 (Megatron distributed optimizer, assumed)", "ZeRO-3", "FSDP", "HSDP", "none",
                  "unknown", "not stated", "2.0"]),
        ("precision", ["", "bf16 (fp32 grad accum)", "amp_bf16", "FP8-MX", "half", "unknown", "not in table"]),
        ("recompute", ["", "unknown (see recipe)", "selective (2)", "op-level AC", "full, 2 of 4 layers", "partial", "n/a", "?"]),
        ("seq_parallel", ["", "assumed 1", "yes", "0.0", "unknown"]),
        ("schedule_or_interleave", ["", "none", "unknown (pre-interleaving code)", "1F1B (DeepSpeed PipelineEngine)", "VPP=2",
                                    "interleaved-1F1B v=3", "DualPipe", "?"]),
        ("heads", ["", "n/a", "unknown", "32 (assumed)", "24.0"]),
        ("kv_heads", ["", "8 (GQA)"]),
        ("micro_batch", ["", "0.5", "n/a", "16.0", "32.1"]),
        ("params_b", ["", "1.7", "unknown"]),
    ],
)  # fmt: skip
def test_what_a_row_says_in_words_or_does_not_know_is_no_wrong_cell(tmp_path, column, cells):
    changes = [{"dp": 16, "pp": 2, "micro_batch": 4, column: cell} for cell in cells]
    path = write_table(tmp_path / "runs.csv", *changes, columns=(*COLUMNS, "params_b"))
    for row in map(predict_run, read_table(path)):
        assert row.predicted is not None and not row.odd, row.why_not


def test_the_nearest_word_and_the_share_of_a_replica_are_said(tmp_path):
    two = {"dp": 16, "pp": 2}
    changes = (
        {"precision": "bf17"},
        {"micro_batch": 64},
        {"zero": 9},
        {**two, "schedule_or_interleave": "gpip"},
        {"zero": 8, "precision": "fp17"},
    )
    precision, batch, zero, schedule, both = (row.why_not for row in predict(tmp_path, *changes))
    assert precision == (
        "precision is 'bf17'; did you mean 'bf16'? it may be fp4, fp8, bf16, fp16, tf32, fp32, fp64, or blank where it is not "
        "known"
    )
    assert "micro_batch is '64', and a replica has 16 samples of a step (global_batch 512 / dp 32)" in batch
    assert zero == "zero is '9'; it may be 0, 1, 2, 3, or blank where it is not known"
    assert "schedule_or_interleave is 'gpip'; did you mean 'gpipe'?" in schedule
    assert "zero is '8'" in both and "precision is 'fp17'" in both, "everything that is wrong, at once"


def test_what_was_measured_need_not_be_known(tmp_path):
    known, blank = predict(tmp_path, {}, {"measured_value": ""})
    (absent,) = (
        predict_run(run)
        for run in read_table(
            write_table(tmp_path / "blind.csv", columns=tuple(one for one in COLUMNS if one != "measured_value"))
        )
    )
    assert known.predicted == blank.predicted == absent.predicted is not None
    assert (known.measured, blank.measured, absent.measured) == (3.1, None, None) and blank.in_range
    found = score([known, blank])
    assert (found.count, found.unpredicted) == (1, 0)


def test_an_unknown_metric_is_said_to_be_one(tmp_path):
    (found,) = predict(tmp_path, {"measured_metric": "joules"})
    assert (
        found.predicted is None
        and "measured_metric is 'joules', an unknown metric; known are iter_time_s" in found.why_not
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dp": ""}, "dp 32"),
        ({"dp": "", "tp": 2, "pp": 4}, "dp 4"),
        ({"n_gpus": ""}, "32 devices"),
        ({"global_batch": ""}, "a batch of 512"),
        ({"global_batch": "", "dp": 8, "pp": 4, "micro_batch": 2}, "a batch of 256"),
        ({"micro_batch": ""}, "micro_batch 1"),
        ({"micro_batch": "", "source": "torchtitan"}, "micro_batch 16"),
        ({"source": "somebody", "schedule_or_interleave": "none"}, "a software like megatron"),
        ({"source": "somebody", "zero": 3}, "a software like fsdp"),
        ({"source": "somebody", "gpu": "B200"}, "a software like megatron-core"),
        ({"precision": ""}, "bfloat16"),
    ],
)
def test_what_a_row_leaves_out_is_derived_or_assumed_and_said(tmp_path, change, word):
    (found,) = predict(tmp_path, change)
    assert found.predicted is not None and 0 < found.predicted < 1e3
    assert not found.in_range and word in found.why_not.split("; ")


def test_heads_that_are_not_stated_are_those_of_other_rows_of_the_source_as_wide(tmp_path):
    blank = {"heads": "", "kv_heads": ""}
    known = {"heads": 32, "kv_heads": 32}
    rows = read(tmp_path, known, known, blank, {**blank, "source": "Megatron"}, {**blank, "hidden": 2560})
    assert [row.shape.heads for row in rows] == [32, 32, 32, 18, 20] and rows[2].assumed == ("32 heads",)


def test_a_row_says_neither_devices_nor_replicas(tmp_path):
    (found,) = predict(tmp_path, {"dp": "", "n_gpus": ""})
    assert found.predicted is None and "n_gpus is '', and so is dp" in found.why_not


LIKELY = {
    "source": ["somebody", "torchtitan", "MaxText", "NVIDIA NeMo 24.12", "DeepSeek-V3", "Alpa", "LLaMA-1", "MT-NLG DeepSpeed"],
    "model": ["GPT-1.7B", "Llama-3-8B", "Mixtral-8x7B", "Nemotron-H", ""],
    "gpu": ["A100", "V100-16GB", "H800", "H100-96GB-HBM2e 500W", "MI300X", "MI355X", "B300", "GB300", "TPU v5p", "RTX 4090"],
    "n_gpus": ["32", "", "4096"], "dp": ["32", "", "8"], "tp": ["1", "2", "8", ""], "pp": ["1", "4", "16", ""],
    "cp": ["1", "2", ""], "ep": ["1", "8", "64", ""],
    "zero": ["", "0", "1 (assumed)", "2", "3 (FSDP group 8)", "ZeRO-3", "unknown"],
    "schedule_or_interleave": ["none", "1F1B", "interleaved-1F1B v=3", "Interleaved1F1B", "DualPipe", "ZBV", "GPipe", "?"],
    "micro_batch": ["16", "", "0.5", "3", "n/a"], "global_batch": ["512", "", "7"],
    "precision": ["fp16", "BF16", "MXFP8", "NVFP4", "tf32", "fp32", "", "int8"],
    "recompute": ["full", "none", "selective (attention)", "unknown", "", "op-level AC", "full, 2 of 4 layers"],
    "seq_parallel": ["0", "1", "assumed 1", "", "yes"],
    "heads": ["24", "", "unknown"], "kv_heads": ["24", "", "8"], "vocab": ["51200", ""], "params_b": ["", "1.7", "8.03"],
    "measured_metric": [
        "iter_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu_hw", "mfu", "peak_mem_gib", "peak_reserved_gib",
        "mem_gb_nvidia_smi_max", "oom", "samples_per_s", "iter_time_ms", "joules",
    ],
    "measured_value": ["3.1", "0", "1", ""],
    "notes": ["", "MoE: 128 experts top-8, moe_ffn 768; head_dim 128", "MLA (q_lora 1536, kv_lora 512)", "4xV100 nodes"],
}  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(change=st.fixed_dictionaries({}, optional={column: st.sampled_from(cells) for column, cells in LIKELY.items()}))
def test_likely_rows_get_a_sane_number_or_a_reason(tmp_path_factory, change):
    path = tmp_path_factory.mktemp("likely") / "runs.csv"
    write_table(path, change, columns=(*COLUMNS, "params_b", "notes"))
    (run,) = read_table(path)
    found = predict_run(run)
    if found.predicted is None:
        assert found.why_not
        return
    assert math.isfinite(found.predicted) and (found.predicted > 0 or found.metric == "oom")
    assert found.seconds is not None and 1e-4 < found.seconds < 1e5
    assert found.in_range or found.why_not
    # What was measured says nothing about a step.
    assert predict_run(replace(run, measured=None)).seconds == found.seconds


@settings(max_examples=100, deadline=None)
@given(
    column=st.sampled_from(COLUMNS),
    cell=st.one_of(st.text(max_size=12), st.sampled_from(["", "nan", "-1", "0", "1e308", "٣", "v=9", "0x8", " "])),
)
def test_no_cell_ends_a_prediction(tmp_path_factory, column, cell):
    path = tmp_path_factory.mktemp("fuzz") / "runs.csv"
    if "\x00" in cell:
        return
    try:
        cell.encode()
    except UnicodeEncodeError:
        return
    write_table(path, {column: cell})
    (found,) = (predict_run(run) for run in read_table(path))
    assert found.row == 0 and (found.predicted is not None or found.why_not)


def test_a_mark_in_front_empty_lines_and_empty_cells_at_the_end_move_nothing(tmp_path):
    path = tmp_path / "runs.csv"
    cells = ",".join(str(ROW[column]) for column in COLUMNS)
    without = cells.rpartition(",")[0]
    text = f'{",".join(COLUMNS)},notes\n{cells},\n\n{cells},,,\n{cells}\n{without}\n{cells},"two\nlines"\n{cells},\n'
    path.write_text(text, encoding="utf-8-sig")
    rows = read_table(path)
    assert all(isinstance(row, Run) for row in rows)
    assert [(row.row, row.line) for row in rows] == [(0, 2), (1, 4), (2, 5), (3, 6), (4, 7), (5, 9)]
    assert [row.measured for row in rows] == [3.1, 3.1, 3.1, None, 3.1, 3.1]


def test_a_row_with_a_comma_too_few_or_too_many_has_no_prediction(tmp_path):
    """It was filled up or cut off, and predicted from numbers that stood under other columns' names."""
    path = tmp_path / "runs.csv"
    cells = ",".join(str(ROW[column]) for column in COLUMNS)
    path.write_text(f"{','.join(COLUMNS)}\n{cells},one,more\nsomebody,GPT\n{cells}\n")
    long, short, whole = read_table(path)
    assert isinstance(long, Unread) and isinstance(short, Unread) and isinstance(whole, Run)
    assert "it has 27 cells and the header has 25: 'one' is under no column" in long.reason
    assert "it has 2 cells and the header has 25: layers and what follows is missing" in short.reason
    assert (short.row, short.line, short.source) == (1, 3, "somebody")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            [column for column in COLUMNS if column not in ("heads", "zero")],
            "has 23 columns, and heads, zero are not among them; a table of runs has source",
        ),
        (
            ["n_gpu" if column == "n_gpus" else column for column in COLUMNS],
            "has 25 columns, and n_gpus is not among them; rename 'n_gpu' to 'n_gpus'; a table",
        ),
        ([*COLUMNS, "dp"], "has the column dp 2 times; keep one of them"),
    ],
)
def test_a_missing_column_is_named_and_so_is_one_that_is_there_twice(tmp_path, columns, message):
    with pytest.raises(RequestError, match=message):
        read_table(write_table(tmp_path / "runs.csv", columns=tuple(columns)))


def test_what_is_no_table(tmp_path):
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text(",".join(COLUMNS) + "\n")
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe\x00")
    for name, message in (
        ("absent.csv", "cannot read .*absent.csv: No such file or directory; give a CSV file that is there"),
        (".", "cannot read .*: Is a directory"),
        ("empty.csv", "empty.csv is empty; a table of runs begins with a line of columns: source"),
        ("header.csv", "has no rows"),
        ("picture.csv", "is not a CSV file in UTF-8"),
    ):
        with pytest.raises(RequestError, match=message):
            read_table(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("A100-80GB-SXM", "a100-80gb"), ("A100 (DGX-A100)", "a100-80gb"), ("A100-40GB", "a100-40gb"),
        ("A100-PCIe-40GB", "a100-40gb-pcie"), ("V100-SXM2-32GB", "v100-32gb"), ("V100 16GB", "v100-16gb"),
        ("H100", "h100-80gb"), ("H100-96GB-HBM2e 500W (400Gb/s/GPU)", "h100-96gb"), ("H100-PCIe", "h100-80gb-pcie"),
        ("H800", "h800-80gb"), ("NVIDIA H20 96GB", "h20-96gb"), ("GH200", "gh200-96gb"), ("B300", "b300-270gb"),
        ("L40S", "l40s-48gb"), ("AMD Instinct MI325X", "mi325x"),
        ("GB200", "gb200-186gb"), ("B200", "b200-180gb"), ("MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_devices_are_known_by_family_memory_and_form(text, device):
    assert find_device(text).device.name == device


def test_model_flops_are_three_forwards(tmp_path):
    (run,) = read(tmp_path)
    chain = job_of(run).chain
    assert model_flops(chain) == 3 * chain.forward_flops
