"""Memory: the twelve analytic numbers of a paper, ZeRO's divisions, and what schedules hold."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.costs.layers import LayerKind
from shoal.planner.hardware.presets import GIB
from shoal.planner.pricing.job import count_ranks, cut_stages, ranks_of_stages, spread_blocks
from shoal.planner.pricing.memory import CONTEXT_BYTES, in_flight_bound, kept_bytes, price_memory
from shoal.planner.simulation.step import schedule_for
from shoal.planner.tables.predict import predict_run
from shoal.planner.tables.table import COLUMNS, Run, read_table
from shoal.schedules.catalogue import FAMILIES
from shoal.schedules.player import peak_activations
from support.planner.jobs import PLAIN, job_of, shape_of

FIGURE_1 = [
    # layers, hidden, heads, pp, chunks, micro batch; then GiB: weights and state, activations, activations with sp and selective
    (48, 6144, 64, 1, 1, 4, 45.5625, 59.25, 9.5625),
    (96, 12288, 96, 8, 3, 1, 45.5625, 66.84375, 12.3515625),
    (105, 20480, 128, 35, 3, 1, 31.640625, 114.0234375, 23.076171875),
    (128, 25600, 160, 64, 1, 1, 32.958984375, 131.25, 26.5625),
]
"""Korthikanti et al. 2022 (arXiv:2205.05198), Fig. 1: first stage, tp=8, sequence 2048."""


def figure_rows(folder):
    lines = [",".join(COLUMNS)]
    for layers, hidden, heads, pp, chunks, micro, *wanted in FIGURE_1:
        for metric, recompute, sequence, value in (
            ("param_opt_mem_gib", "none", 0, wanted[0]),
            ("activation_mem_gib", "none", 0, wanted[1]),
            ("activation_mem_gib", "selective", 1, wanted[2]),
        ):
            row = {
                "source": "Korthikanti et al. 2022", "model": "GPT", "layers": layers, "hidden": hidden, "heads": heads,
                "kv_heads": heads, "ffn_hidden": 4 * hidden, "seq_len": 2048, "vocab": 51200, "gpu": "A100-80GB-SXM",
                "n_gpus": 8 * pp, "dp": 1, "tp": 8, "pp": pp, "cp": 1, "ep": 1, "zero": 0,
                "schedule_or_interleave": f"interleaved-1F1B v={chunks}" if chunks > 1 else "1F1B", "micro_batch": micro,
                "global_batch": micro * 8 * pp, "precision": "fp16", "recompute": recompute, "seq_parallel": sequence,
                "measured_metric": metric, "measured_value": value,
            }  # fmt: skip
            lines.append(",".join(str(row[column]) for column in COLUMNS))
    path = folder / "figure.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_table(path)


def test_the_twelve_numbers_of_the_figure_are_exact(tmp_path):
    rows = figure_rows(tmp_path)
    assert len(rows) == 12 and all(isinstance(row, Run) for row in rows)
    for row in rows:
        assert predict_run(row).predicted == row.measured


def memory_of(plan: Plan, **job):
    return price_memory(job_of(**job), plan)[0]


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [(0, 2, 4, 12), (1, 2, 4, 12 / 8), (2, 2, 4 / 8, 12 / 8), (3, 2 / 8, 4 / 8, 12 / 8)],
)
def test_zero_divides_what_it_says(zero, weights, gradients, optimizer):
    """Rajbhandari et al. 2020, Figure 1, with gradients in float32: 18 bytes for a weight in all."""
    job = job_of()
    found = price_memory(job, Plan(dp=8, zero=zero, microbatches=8))[0]
    size = job.chain.weights
    assert found.weights == pytest.approx(size * weights)
    assert found.gradients == pytest.approx(size * gradients)
    assert found.optimizer == pytest.approx(size * optimizer)


def test_sixteen_bytes_of_mixed_precision_and_states_of_ones_own():
    job = job_of(software="fsdp", state_bytes=8.0, weight_bytes=4.0)
    found = price_memory(job, Plan(dp=4, zero=3, microbatches=4))[0]
    assert (found.weights, found.gradients, found.optimizer) == pytest.approx(
        tuple(job.chain.weights / 4 * each for each in (4.0, 4.0, 8.0))
    )


def test_tensor_parallel_divides_matrices_and_not_norms():
    job, hidden, layers = job_of(), PLAIN.hidden, PLAIN.layers
    whole = layers * (4 * hidden + 2 * hidden) + 2 * hidden + PLAIN.sequence * hidden
    found = price_memory(job, Plan(dp=2, tp=8))[0]
    assert found.weights == pytest.approx(2 * (whole + (job.chain.weights - whole) / 8))


def test_experts_are_divided_by_ep_and_their_state_by_what_is_left_of_dp():
    job = job_of(shape_of(experts=8, expert_ffn=1024, is_gated=True))
    routed = sum(layer.expert_weights for layer in job.chain.layers)
    dense = job.chain.weights - routed
    found = price_memory(job, Plan(dp=8, ep=4, zero=1, microbatches=8))[0]
    assert found.weights == pytest.approx(2 * (dense + routed / 4))
    assert found.optimizer == pytest.approx(12 * (dense / 8 + routed / 4 / 2))


def test_a_tied_matrix_is_on_both_ends_of_a_pipeline():
    plan = Plan(dp=1, pp=4, schedule="1f1b", microbatches=8)
    tied, untied = (price_memory(job_of(shape_of(tied=tied)), plan) for tied in (True, False))
    assert [memory.weights for memory in tied] == [memory.weights for memory in untied]


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(FAMILIES)), ranks=st.integers(2, 8), microbatches=st.integers(1, 20), data=st.data())
def test_no_schedule_holds_more_than_its_bound(name, ranks, microbatches, data):
    facts = schedule_facts(name)
    chunks = data.draw(st.integers(2, 4)) if facts.takes_chunks else facts.chunks
    plan = Plan(dp=1, pp=ranks, schedule=name, chunks=chunks if chunks > 1 else None, microbatches=microbatches)
    try:
        schedule = schedule_for(plan, microbatches)
    except RequestError:
        return
    for rank, held in enumerate(peak_activations(schedule)):
        assert held <= in_flight_bound(plan, rank)


def test_the_bounds_that_everybody_knows():
    for rank in range(4):
        assert in_flight_bound(Plan(pp=4, microbatches=16), rank) == 4 - rank
        assert in_flight_bound(Plan(pp=4, schedule="gpipe", microbatches=16), rank) == 16
        assert in_flight_bound(Plan(pp=4, schedule="zb-h1", microbatches=16), rank) == 4
        assert (
            in_flight_bound(Plan(pp=4, schedule="interleaved", chunks=2, microbatches=16), rank) == 2 * (3 - rank) + 5
        )
    assert in_flight_bound(Plan(dp=4, microbatches=16), 0) == 1


@pytest.mark.parametrize("tensor", [1, 8])
def test_activations_by_recompute_mode(tensor):
    """Korthikanti et al. 2022, Table 2."""
    shape = shape_of(fused_attention=False, dropout=True)
    block = next(layer for layer in job_of(shape).chain.layers if layer.kind is LayerKind.BLOCK)
    area, scores = shape.sequence * shape.hidden, 5 * shape.heads * shape.sequence**2

    def kept(recompute: str, sequence_parallel: bool = False, context: int = 1) -> float:
        return kept_bytes(
            block, tensor=tensor, sequence_parallel=sequence_parallel, context=context, recompute=recompute
        )

    assert kept("none") == pytest.approx(area * (10 + 24 / tensor) + scores / tensor)
    assert kept("none", True) == pytest.approx((34 * area + scores) / tensor)
    assert kept("selective") == pytest.approx(area * (10 + 24 / tensor))
    assert kept("selective", True) == pytest.approx(34 * area / tensor)
    assert (kept("full"), kept("full", True)) == (2 * area, 2 * area / tensor)
    assert kept("selective", True, context=4) == pytest.approx(34 * area / tensor / 4)


def test_activations_are_those_of_the_microbatches_in_flight():
    job = job_of()
    plans = [Plan(dp=2, pp=4, schedule=name, microbatches=8) for name in ("1f1b", "gpipe")]
    early, late = (price_memory(job, plan)[0].activations for plan in plans)
    assert late == pytest.approx(2 * early)
    assert price_memory(job, plans[0], [8, 8, 8, 8])[0].activations == late
    smaller = price_memory(job, replace(plans[1], microbatches=16))[0].activations
    assert smaller == pytest.approx(late), "twice as many of half the size"


def test_recompute_needs_room_for_one_layer_and_zero_3_for_two():
    job, plan = job_of(), Plan(dp=16, microbatches=4)
    none, full = (price_memory(job, replace(plan, recompute=recompute))[0] for recompute in ("none", "full"))
    assert full.activations < none.activations and full.working >= none.activations / PLAIN.layers * 0.9
    sharded = price_memory(job, replace(plan, zero=3))[0]
    block = job.chain.layers[1].weights
    largest = max(layer.weights for layer in job.chain.layers)
    assert largest > block and sharded.working - none.working == pytest.approx(largest * (2 * 2 + 4))


def test_bidirectional_schedules_hold_their_weights_twice():
    job = job_of()
    plan = Plan(dp=1, pp=4, schedule="dualpipe", microbatches=8)
    found, once = (
        sum(memory.weights for memory in price_memory(job, replace(plan, schedule=schedule)))
        for schedule in ("dualpipe", "1f1b")
    )
    assert found == pytest.approx(2 * once)


def test_the_parts_add_up():
    found = memory_of(Plan(dp=2, tp=2, pp=4, schedule="1f1b", microbatches=8, zero=1))
    values = found.as_dict()
    parts = ("weights", "gradients", "optimizer", "activations", "working", "versions")
    assert values["allocated"] == pytest.approx(sum(values[part] for part in parts))
    assert values["device"] == pytest.approx(values["allocated"] * 1.05 + CONTEXT_BYTES)
    assert found.allocated < 80 * GIB


def test_blocks_are_spread_with_fewer_at_the_ends():
    assert spread_blocks(10, 4) == (2, 3, 3, 2) and spread_blocks(9, 4)[0] == spread_blocks(9, 4)[-1] == 2
    for blocks, stages in ((105, 32), (7, 7), (96, 8), (5, 2)):
        counts = spread_blocks(blocks, stages)
        assert sum(counts) == blocks and max(counts) - min(counts) <= 1
    cuts = cut_stages(job_of().chain, 4)
    assert cuts == ((0, 3), (3, 5), (5, 7), (7, 10)), "the embedding with the first, the output layer with the last"


def test_a_schedule_that_turns_round_has_first_and_last_stage_on_one_rank():
    plan = Plan(dp=1, pp=4, schedule="zbv", chunks=2, microbatches=8)
    assert ranks_of_stages(plan) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert ranks_of_stages(replace(plan, schedule="interleaved")) == (0, 1, 2, 3, 0, 1, 2, 3)
    first, *rest = count_ranks(job_of().chain, plan)
    assert sum(first.values()) == 4 and [sum(counted.values()) for counted in rest] == [2, 2, 2]


def test_what_products_in_eight_bits_read_is_kept_in_eight_bits_where_a_software_does():
    plan = Plan.parse("dp=16 microbatches=1")
    held = {
        (software, precision): price_memory(job_of(software=software, precision=precision), plan)[0].activations
        for software in ("megatron-core", "fsdp")
        for precision in ("bfloat16", "float8")
    }
    assert held["fsdp", "float8"] == held["fsdp", "bfloat16"] == held["megatron-core", "bfloat16"]
    # The inputs of the first products of both halves, and of the last: h + h + 4 h elements, of one byte less each.
    spared = 4 * 8 * 1024 * 1024 * (1 + 1 + 4)
    assert held["megatron-core", "bfloat16"] - held["megatron-core", "float8"] == pytest.approx(spared)
