"""Who has the same weights: what ZeRO divides, what experts are summed over, and what one rank has of them."""

import pytest

from shoal.core.plan import Plan
from shoal.planner.hardware.software import SOFTWARE
from shoal.planner.pricing.cost import price_parts, wires_of
from shoal.planner.pricing.job import layer_weights, weight_groups
from shoal.planner.pricing.memory import price_memory
from support.planner.jobs import job_of, shape_of

EXPERTS = shape_of(experts=8, expert_ffn=1024, is_gated=True)


def parts_of(job):
    routed = sum(layer.expert_weights for layer in job.chain.layers)
    return job.chain.weights - routed, routed


@pytest.mark.parametrize(
    ("software", "divisor"), [("megatron-core", 8), ("fsdp", 8), ("shoal", 2), ("megatron-deepspeed", 2)]
)
def test_zero_divides_by_the_ranks_of_a_sequence_too_where_a_software_does(software, divisor):
    job = job_of(software=software)
    plan = Plan(dp=2, cp=4, zero=1, microbatches=4)
    size = job.chain.weights * SOFTWARE[software].state_bytes
    assert price_memory(job, plan)[0].optimizer == pytest.approx(size / divisor)
    assert price_parts(job, plan).update == pytest.approx(
        price_parts(job, Plan(dp=2, cp=4, microbatches=4)).update / divisor
    )


def test_experts_that_are_whole_take_their_ranks_from_tensor_parallelism_too():
    """Eight experts over eight ranks, of which two share every dense matrix: one whole expert each, and one other rank has it."""
    plan = Plan(dp=8, tp=2, ep=8, zero=1, microbatches=8)
    whole, split = (job_of(EXPERTS, software=software) for software in ("megatron-core", "megatron"))
    routed = parts_of(whole)[1]
    sharing = weight_groups(plan, whole.stack.software)
    assert (sharing.expert_split, sharing.expert_copies, sharing.dense_copies) == (1, 2, 8)
    more = price_memory(whole, plan)[0].weights - price_memory(split, plan)[0].weights
    assert more == pytest.approx(2 * (routed / 8 - routed / 16))
    # The state of all experts is the same in all, however it is divided.
    assert price_memory(whole, plan)[0].optimizer == pytest.approx(price_memory(split, plan)[0].optimizer)


def test_more_experts_than_replicas_are_possible_where_they_are_whole():
    sharing = weight_groups(Plan(dp=2, tp=4, ep=8), SOFTWARE["megatron-core"])
    assert (sharing.expert_copies, sharing.expert_shards) == (1, 1)
    job = job_of(EXPERTS, software="megatron-core")
    block = next(layer for layer in job.chain.layers if layer.expert_weights)
    found = layer_weights(block, Plan(dp=2, tp=4, ep=8), job.stack.software)
    assert found == pytest.approx(block.whole_weights + block.split_weights / 4 + block.expert_weights / 8)


def test_experts_that_nobody_else_has_are_not_summed():
    job = job_of(EXPERTS, software="megatron-deepspeed")
    dense, routed = parts_of(job)
    alone, pairs, everywhere = (price_parts(job, Plan(dp=8, ep=ep, microbatches=4)).reduce for ep in (8, 4, 1))
    assert 0 < alone < pairs < everywhere
    wire = wires_of(Plan(dp=8), job).data
    assert alone == pytest.approx(everywhere * dense / (dense + routed), rel=0.05) and wire.size == 8


def test_tokens_travel_once_where_experts_are_whole():
    """Of a sequence that two ranks share, each sends its half; where both have a half of every expert, each sends all."""
    plan = Plan(dp=8, tp=2, sp=True, ep=8, microbatches=2)
    whole, split = (
        price_parts(job_of(EXPERTS, software=software), plan).stages[0].exposed["ep"]
        for software in ("megatron-core", "megatron")
    )
    assert whole < 0.6 * split
