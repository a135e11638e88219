"""Options that a row names: what each changes, that other words change nothing, and what predictions make of them."""

from dataclasses import replace

import pytest

from shoal.core.plan import Plan
from shoal.planner.hardware.software import SOFTWARE
from shoal.planner.pricing.collectives import Group, all_reduce, wire_of
from shoal.planner.pricing.cost import price_parts
from shoal.planner.pricing.memory import price_memory
from shoal.planner.tables.options import as_used, exchanges_heads
from support.planner.jobs import job_of, shape_of, whole

TITAN, CORE, FSDP, MEGATRON = (SOFTWARE[name] for name in ("torchtitan", "megatron-core", "fsdp", "megatron"))


@pytest.mark.parametrize(
    "words", ["no comm overlap", "communication overlap is off", "without communication overlap", "no overlap"]
)
def test_what_is_said_not_to_overlap_does_not(words):
    used = as_used(CORE, f"Megatron-LM 23e00ed, TE 2.11, {words}; fused CE")
    assert not any((used.overlaps_reduce, used.overlaps_gather, used.overlaps_transfer, used.overlaps_tensor))
    assert (
        replace(used, overlaps_reduce=True, overlaps_gather=True, overlaps_transfer=True, overlaps_tensor=0.5) == CORE
    )


def test_words_that_name_no_option_change_nothing():
    for software in SOFTWARE.values():
        if software is not TITAN:
            for words in ("communication overlaps as usual; DDP; NOTE 2", "TP comm overlap off; DP overlap on",
                          "no overlap-grad-reduce", "without FlashAttention", "no fp8 all-gather", "HSDP, 8x 80GB"):  # fmt: skip
                assert as_used(software, words) == software, words


@pytest.mark.parametrize(("words", "overlaps"), [("DDP-impl=torch", True), ("DDP-impl=local", False), ("DDP", False)])
def test_megatrons_two_wrappers(words, overlaps):
    assert as_used(MEGATRON, words).overlaps_reduce is overlaps


def test_torchtitan_compiles_and_hides_only_when_asked():
    eager, compiled, hiding = (
        as_used(TITAN, f"torchtitan; FSDP2{words}") for words in ("", "; torch.compile", "; torch.compile; AsyncTP")
    )
    assert compiled == TITAN and not eager.fused_pointwise and not eager.fused_loss and "narrow" not in eager.apart
    assert hiding.overlaps_tensor > 0 and replace(hiding, overlaps_tensor=0.0) == TITAN
    for words in ("no torch.compile", "not compiled", "compile=False", "torch.compile off", "no AsyncTP"):
        assert as_used(TITAN, f"torchtitan; {words}") == eager, words
    # Somebody else's compiler is not its own.
    assert as_used(FSDP, "torch.compile") == FSDP


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("3 (FSDP group 8)", 8), ("FSDP group size 8", 8), ("HSDP 4 x 16", 16), ("HSDP (2x32)", 32),
        ("HSDP (replicate 4, shard 16)", 16), ("3 (FSDP)", 0), ("HSDP", 0), ("HSDP, 8x80GB", 0),
    ],
)  # fmt: skip
def test_groups_over_which_weights_are_cut(words, size):
    assert as_used(FSDP, words).shard_group == size


def test_groups_gather_less_far_and_hold_more():
    plan = Plan.parse("dp=64 zero=3 microbatches=1")
    far, near = (job_of(shape_of(), cluster="a100-80gb:8x8", software="fsdp") for _ in range(2))
    near = replace(near, stack=replace(near.stack, software=as_used(near.stack.software, "FSDP group 8")))
    over_all, in_groups = price_parts(far, plan), price_parts(near, plan)
    # Inside a node; and an eighth of the gradients once more between the nodes.
    assert in_groups.gather < 0.7 * over_all.gather
    between = all_reduce(near.chain.weights / 8 * 2, wire_of(Group(8, 8), near.cluster, near.stack.constants))
    assert in_groups.reduce == pytest.approx(in_groups.gather / 2 + between)
    (spread,), (held,) = price_memory(far, plan), price_memory(near, plan)
    assert held.optimizer == pytest.approx(8 * spread.optimizer) and held.weights == pytest.approx(8 * spread.weights)


@pytest.mark.parametrize(("words", "num_bytes"), [("mixed_precision DEFAULT", 4.0), ("mixed_precision PURE", 2.0)])
def test_what_is_gathered_as_it_is_kept_is_wide(words, num_bytes):
    assert as_used(FSDP, words).gathered_bytes == num_bytes


def test_narrow_gathers_take_half_as_long():
    plan, job = Plan.parse("dp=16 zero=3 microbatches=1"), job_of(shape_of(), cluster="h100:2x8", software="torchtitan")
    narrow = replace(job, stack=replace(job.stack, software=as_used(TITAN, "torch.compile; fp8 all-gather")))
    wide, less = (price_parts(each, plan) for each in (job, narrow))
    assert less.gather < 0.6 * wide.gather and less.reduce == wide.reduce


def test_weights_below_stage_3_are_wide_shards_and_a_cast_copy():
    job = replace(job_of(shape_of(), cluster="a100-80gb:2x8", software="fsdp"), weight_bytes=4.0)
    (found,) = price_memory(job, Plan.parse("dp=16 zero=2 microbatches=1"))
    assert found.weights == pytest.approx(job.chain.weights * (4 / 16 + 2))


def test_flash_attention_is_fused_in_any_software():
    for words in ("flash attention", "FlashAttention-2", "flash_attn"):
        assert as_used(MEGATRON, f"Megatron with {words}").fused_attention and not MEGATRON.fused_attention


def test_selective_recompute_by_operation_does_half_the_products_again_and_keeps_half():
    plan = Plan.parse("dp=1 microbatches=1")
    times, kept = {}, {}
    for mode in ("none", "selective", "full"):
        job = job_of(shape_of(is_gated=True), cluster="h100:1", software="torchtitan")
        times[mode] = whole(price_parts(job, replace(plan, recompute=mode)))
        kept[mode] = price_memory(job, replace(plan, recompute=mode))[0].activations
    assert times["none"] < times["selective"] < times["full"]
    assert kept["selective"] == pytest.approx((kept["none"] + kept["full"]) / 2, rel=0.01)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("CP a2a", True), ("a2a CP", True), ("DeepSpeed-Ulysses", True), ("cp_comm_type a2a", True), ("cp ring p2p", False),
        ("MoE a2a; CP 2", False), ("CP=2 EP=8 all-to-all dispatcher", False), ("EP all-to-all + CP ring", False),
    ],
)  # fmt: skip
def test_which_way_a_sequence_is_shared_out(text, found):
    assert exchanges_heads(text) is found
