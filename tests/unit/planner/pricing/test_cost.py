"""Seconds of a step's parts: what scales, what divides, what is done again, and what is exposed."""

import math
from dataclasses import replace

import pytest

from shoal.core.plan import Plan
from shoal.costs.layers import LayerKind
from shoal.planner.hardware.software import SOFTWARE
from shoal.planner.pricing.collectives import all_gather, all_reduce
from shoal.planner.pricing.cost import price_parts, time_one_layer, wires_of
from shoal.planner.pricing.kernels import Slice, time_layer
from shoal.planner.search.estimate import estimate
from support.planner.jobs import PLAIN, ROUND, job_of, shape_of, whole


def block_of(job):
    return next(layer for layer in job.chain.layers if layer.kind is LayerKind.BLOCK)


SUSTAINED = 1 / math.hypot(1 / 312e12, 1 / (400 * 1.4e12))
"""Of an A100 of 400 W."""


def kernels_of(job, part: Slice, precision: str = "bfloat16"):
    return time_layer(
        block_of(job), part, device=job.cluster.device, precision=precision, item_bytes=2,
        software=job.stack.software, constants=job.stack.constants,
    )  # fmt: skip


def test_a_large_product_takes_its_flops_at_the_reached_peak_and_its_bytes_after_that():
    job = job_of(shape_of(hidden=8192, heads=64, ffn=32768))
    block = block_of(job)
    found = kernels_of(job, Slice(samples=1))
    reached = SUSTAINED * ROUND.matmul
    products = sum(op.flops for op in block.ops if op.kind == "matmul") / reached
    (core,) = (op for op in block.ops if op.kind == "attention")
    scores = core.rows * core.outer * core.heads
    attention = core.flops / 2 / reached + scores / 2 / (2.44e12 * ROUND.attention)
    assert found.attention == pytest.approx(attention)
    assert found.weight > products and found.weight == pytest.approx(products, rel=0.25)
    assert found.forward > found.weight + attention and found.input > found.weight + 2.5 * attention


def test_twice_the_samples_take_about_twice_the_time_and_weights_are_read_once():
    job = job_of()
    one, two = (kernels_of(job, Slice(samples=samples)) for samples in (1, 2))
    assert 1.8 < two.forward / one.forward < 2 and 1.8 < two.backward / one.backward < 2
    assert two.attention == pytest.approx(2 * one.attention) and two.kernels == one.kernels


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallel_divides_products_and_attention_and_not_norms(tensor):
    job = job_of()
    alone, shared = (kernels_of(job, Slice(samples=4, tensor=degree)) for degree in (1, tensor))
    assert shared.attention == pytest.approx(alone.attention / tensor)
    assert alone.forward / tensor < shared.forward < alone.forward
    with_sequence = kernels_of(job, Slice(samples=4, tensor=tensor, sequence_parallel=True))
    assert alone.forward / tensor <= with_sequence.forward < shared.forward


def test_context_parallel_divides_everything_but_reading_weights():
    job = job_of()
    alone, shared = (kernels_of(job, Slice(samples=4, context=degree)) for degree in (1, 4))
    assert shared.attention == pytest.approx(alone.attention / 4)
    assert alone.forward / 4 < shared.forward < alone.forward / 3.5


def test_a_misaligned_product_is_slow():
    aligned, odd = (kernels_of(job_of(shape_of(ffn=ffn)), Slice(samples=4)).weight for ffn in (4096, 4090))
    assert odd > 1.5 * aligned


def test_heads_that_are_misaligned_are_done_without_tensor_cores_unless_they_are_fused():
    """Heads of 128, 64 and 100 features: products of the last take sixteen times as long, what they read and write does not."""
    plain, fused = (
        [
            kernels_of(
                job_of(shape_of(hidden=heads * size, heads=heads, fused_attention=is_fused)), Slice(samples=4)
            ).attention
            for heads, size in ((8, 128), (8, 64), (8, 100))
        ]
        for is_fused in (False, True)
    )
    if_aligned = plain[1] + (plain[0] - plain[1]) * 36 / 64
    products = 4 * 1024 * 1024 * 100 * 8 * 4 / (SUSTAINED * 0.5)
    assert plain[2] - if_aligned == pytest.approx(15 * products)
    assert fused[1] < fused[2] < fused[0]


def test_fewer_bits_are_faster_where_the_device_has_them():
    h100, a100 = job_of(cluster="h100:8"), job_of(cluster="a100:8")
    assert kernels_of(h100, Slice(samples=8), "float8").weight < kernels_of(h100, Slice(samples=8)).weight
    # A100 has no float8: the peak of 16 bit, and the casts.
    assert kernels_of(a100, Slice(samples=8), "float8").weight > kernels_of(a100, Slice(samples=8)).weight


def test_full_recompute_adds_one_forward_and_selective_one_attention():
    job, plan = job_of(), Plan(dp=16, microbatches=1)
    none, selective, full = (
        time_one_layer(block_of(job), job, replace(plan, recompute=mode)) for mode in ("none", "selective", "full")
    )
    attention = kernels_of(job, Slice(samples=4)).attention
    assert full.forward == selective.forward == none.forward and full.weight == none.weight
    assert full.input - none.input == pytest.approx(none.forward)
    assert selective.input - none.input == pytest.approx(attention)


def test_the_stages_together_are_all_layers():
    job = job_of()
    one = price_parts(job, Plan(dp=16, microbatches=4))
    four = price_parts(job, Plan(dp=4, pp=4, schedule="1f1b", microbatches=16))
    assert len(one.stages) == 1 and len(four.stages) == 4 and four.microbatches == 16
    assert whole(four) == pytest.approx(whole(one), rel=1e-9)
    looped = price_parts(job, Plan(dp=4, pp=4, schedule="interleaved", chunks=2, microbatches=16))
    assert len(looped.stages) == 8 and whole(looped) == pytest.approx(whole(one), rel=1e-9)


def test_a_microbatch_half_as_large_takes_half_as_long():
    job = job_of()
    few, many = (price_parts(job, Plan(dp=4, microbatches=count)) for count in (2, 4))
    assert whole(few) == pytest.approx(2 * whole(many), rel=0.1)


def test_sums_over_tp_are_exposed_twice_and_three_times_with_recompute():
    job = job_of()
    plan = Plan(dp=2, tp=8, microbatches=8)
    wire = wires_of(plan, job).tensor
    block = block_of(job)
    pair = all_reduce(block.pair_bytes * 4, wire) * block.num_pairs
    for recompute, times in (("none", 2), ("selective", 2), ("full", 3)):
        found = time_one_layer(block, replace(job, global_batch=8), replace(plan, recompute=recompute))
        assert found.exposed["tp"] == pytest.approx(times * pair, rel=1e-6)
    alone = time_one_layer(block, job, Plan(dp=16))
    assert not any(alone.exposed.values())


def test_communication_inside_layers_is_part_of_their_time():
    slow = replace(ROUND, link=0.001)
    plan = Plan(dp=2, tp=8)
    quick, late = (time_one_layer(block_of(job_of()), job_of(constants=each), plan) for each in (ROUND, slow))
    more = late.exposed["tp"] - quick.exposed["tp"]
    assert late.forward + late.input + late.weight - (quick.forward + quick.input + quick.weight) == pytest.approx(more)


def test_keys_and_values_that_attention_hides_cost_nothing():
    long = job_of(shape_of(sequence=65536), global_batch=4)
    plan = Plan(dp=1, cp=4)
    assert time_one_layer(block_of(long), long, plan).exposed["cp"] == 0
    slow = replace(long, stack=replace(long.stack, constants=replace(ROUND, link=1e-4)))
    assert time_one_layer(block_of(slow), slow, plan).exposed["cp"] > 0


def test_experts_talk_twice_each_way():
    job = job_of(shape_of(experts=8, expert_ffn=1024, is_gated=True))
    found = time_one_layer(block_of(job), job, Plan(dp=16, ep=8))
    assert found.exposed["ep"] > 0 and time_one_layer(block_of(job), job, Plan(dp=16)).exposed["ep"] == 0


def test_waits_for_expert_ranks_are_booked_as_theirs():
    """They were booked as tp: a plan without tp was said to spend its time there."""
    shape = shape_of(experts=8, expert_ffn=1024, is_gated=True)
    job = job_of(shape, constants=replace(ROUND, sync=1e-3))
    for recompute, passes in (("none", 2), ("full", 3)):
        plan = Plan.parse(f"dp=8 ep=8 recompute={recompute}")
        late, prompt = (time_one_layer(block_of(each), each, plan) for each in (job, job_of(shape)))
        assert late.exposed["tp"] == 0
        assert late.exposed["ep"] - prompt.exposed["ep"] == pytest.approx(passes * 1e-3 * 2 * 3)
    found = estimate(job, Plan.parse("dp=8 tp=2 ep=8 microbatches=1"))
    assert found.exposed["tp"] > 0 < found.exposed["ep"] and {"tp", "ep"} < set(found.as_dict()["exposed"])


def test_gradients_are_summed_over_replicas_and_over_the_ranks_of_a_sequence():
    job = job_of(software="shoal")
    size = job.chain.weights * 4
    plan = Plan(dp=16, microbatches=4)
    wire = wires_of(plan, job).data
    none, one, two, three = (price_parts(job, replace(plan, zero=zero)) for zero in range(4))
    assert none.reduce == pytest.approx(all_reduce(size, wire)) and none.gather == 0
    assert one.reduce == two.reduce == pytest.approx(all_gather(size, wire))
    assert one.gather == two.gather == pytest.approx(all_gather(size / 2, wire))
    assert three.reduce == one.reduce, "once a step, under accumulation too"
    # Twice for each of four microbatches, layer by layer, each of which has its latency.
    assert three.gather == pytest.approx(8 * all_gather(size / 2, wire, len(job.chain.layers)))
    assert none.reduce_hidden == three.gather_hidden == 0, "shoal overlaps neither"
    shared = price_parts(job, Plan(dp=4, cp=4, microbatches=4))
    assert shared.reduce == none.reduce, "ranks that share a sequence have the same weights"
    assert price_parts(job, Plan(dp=1, tp=16)).reduce == 0


def test_who_keeps_shards_of_gradients_reduces_those_of_every_microbatch():
    job, plan = job_of(software="fsdp"), Plan(dp=16, microbatches=4)
    one, two = (price_parts(job, replace(plan, zero=zero)).reduce for zero in (1, 2))
    assert two == pytest.approx(4 * one)
    # Beside all backward passes, not the last alone: what is exposed is not more than with whole weights gathered again.
    two, three = (price_parts(job, replace(plan, zero=zero)) for zero in (2, 3))
    assert two.reduce - two.reduce_hidden <= three.reduce - three.reduce_hidden + three.gather - three.gather_hidden
    # A pipeline has gradients whole until its last cell.
    one, two = (price_parts(job, Plan(dp=8, pp=2, microbatches=4, zero=zero)).reduce for zero in (1, 2))
    assert two == one


def test_keys_and_values_go_from_rank_to_rank_at_one_ranks_speed():
    """A collective leaves a node by the links of all its ranks there; a ring's one message has its sender's alone."""
    wires = wires_of(Plan(dp=1, cp=16), job_of(cluster="h100:2x8"))
    assert wires.context.bandwidth == pytest.approx(50e9 * ROUND.network)
    assert wires.data.bandwidth > 4 * wires.context.bandwidth


def test_megatron_sums_gradients_in_float32_for_bfloat16_alone():
    half, brain = (
        price_parts(job_of(precision=precision), Plan(dp=16)).reduce for precision in ("float16", "bfloat16")
    )
    wire = wires_of(Plan(dp=16), job_of()).data
    size = job_of().chain.weights
    assert half == pytest.approx(all_reduce(2 * size, wire)) and brain == pytest.approx(all_reduce(4 * size, wire))


def test_what_overlaps_is_hidden_and_never_more_than_there_is():
    job = job_of(software="fsdp")
    found = price_parts(job, Plan(dp=16, zero=3, microbatches=2))
    assert 0 < found.reduce_hidden <= found.reduce and 0 < found.gather_hidden <= found.gather
    assert found.after_pipeline == pytest.approx(
        found.reduce - found.reduce_hidden + found.gather - found.gather_hidden + found.update + found.fixed
    )


def test_the_update_is_shared_out_by_zero():
    job = job_of()
    none, one = (price_parts(job, Plan(dp=16, zero=zero)).update for zero in (0, 1))
    assert none == pytest.approx(16 * one)


def test_a_boundary_is_sent_whole_or_in_parts():
    job = job_of(software="shoal")
    plan = Plan(dp=1, tp=8, pp=2, schedule="1f1b", microbatches=16)
    boundary = PLAIN.sequence * PLAIN.hidden * 2 * 4
    latency, bandwidth = 12e-6, 25e9 * 0.5
    assert price_parts(job, plan).transfer == pytest.approx(latency + boundary / bandwidth)
    assert price_parts(job, replace(plan, sp=True)).transfer == pytest.approx(latency + boundary / 8 / bandwidth)
    assert SOFTWARE["megatron"].scatters_transfer
    assert price_parts(job_of(), plan).transfer == pytest.approx(latency + boundary / 8 / bandwidth)
    assert price_parts(job, Plan(dp=16)).transfer == 0


def test_axes_run_on_the_wires_of_their_places():
    job = job_of(cluster="a100-80gb:8x8")
    found = wires_of(Plan(dp=4, tp=8, pp=2, schedule="1f1b"), job)
    assert found.tensor.bandwidth == 300e9 * 0.5 and found.data.bandwidth == 25e9 * 0.5
    assert (found.tensor.size, found.data.size, found.pipeline.size, found.context.size) == (8, 4, 2, 1)
    packed = wires_of(Plan(dp=32, tp=2), job)
    assert packed.data.bandwidth == 4 * 25e9 * 0.5, "four replicas of a node have four links"


def test_known_times_are_the_same_times():
    job, known = job_of(), {}
    plans = [Plan(dp=2, tp=2, pp=4, schedule=name, microbatches=8) for name in ("1f1b", "zb-h1")]
    for plan in plans:
        assert price_parts(job, plan, known) == price_parts(job, plan)
    assert len(known) == 1


def test_what_goes_on_beside_compute_still_costs_a_part_of_itself():
    job = job_of(software="fsdp", constants=replace(ROUND, network=0.01))
    parts = price_parts(job, Plan.parse("dp=16 microbatches=1 zero=3"))
    assert 0 < parts.gather_hidden <= 0.7 * parts.gather and 0 < parts.reduce_hidden <= 0.7 * parts.reduce


def test_experts_are_summed_over_tensor_parallel_ranks_though_nothing_else_is():
    """Whole experts over two of four tensor-parallel ranks, one replica: two ranks have each; dense layers nobody else has."""
    shape = shape_of(experts=8, expert_ffn=1024, is_gated=True)
    job = job_of(shape, cluster="h100:4", software="megatron-core")
    plan = Plan.parse("tp=4 sp=true ep=2 microbatches=4")
    parts = price_parts(job, plan)
    experts = shape.layers * 8 * 3 * 1024 * 1024 / 2
    assert parts.reduce == pytest.approx(all_reduce(experts * job.reduced_bytes, wires_of(plan, job).expert_data))
    assert (
        price_parts(job_of(cluster="h100:4", software="megatron-core"), Plan.parse("tp=4 microbatches=4")).reduce == 0
    )


def test_a_step_that_is_replayed_waits_for_no_host_and_hides_what_experts_exchange():
    shape = shape_of(experts=8, expert_ffn=1024, is_gated=True)
    slow_host = replace(ROUND, launch=1e-3, sync=1e-3)
    plan = Plan.parse("dp=8 ep=8 microbatches=8")
    launched, replayed = (
        price_parts(job_of(shape, cluster="h100:8", software=name, constants=slow_host), plan)
        for name in ("megatron-core", "megatron-core-graphs")
    )
    (stage,) = replayed.stages
    assert stage.exposed["ep"] == stage.exposed["tp"] == 0 < launched.stages[0].exposed["ep"]
    free_host = replace(slow_host, launch=1e-12, sync=1e-12)
    free = price_parts(job_of(shape, cluster="h100:8", software="megatron-core", constants=free_host), plan)
    assert whole(replayed) < whole(free) < whole(launched) / 2


def test_a_fused_loss_reads_the_scores_once():
    plain, fused = (whole(price_parts(job_of(shape_of(fused_loss=loss)), Plan.parse("dp=16 microbatches=1")))
                    for loss in (False, True))  # fmt: skip
    scores = 4 * 1024 * 51200
    # Twelve bytes less of each in the forward pass, and half as much again in the backward pass.
    assert plain - fused == pytest.approx(scores * 12 * 2.5 / (2.039e12 * ROUND.memory), rel=0.01)
