"""How replicas agree in seconds and bytes: what a policy keeps, what a stream hides, what a codec costs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import Traffic, TrafficCounter
from shoal.compression.config import CompressionConfig
from shoal.core.compressrule import CompressRule
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.planner.hardware.clusters import read_cluster
from shoal.planner.pricing.agreement import (
    Agreement,
    AgreementTimes,
    agree_parts,
    is_exact,
    price_agreement,
    rank_shapes,
    updated_share,
)
from shoal.planner.pricing.codecs import SPEEDS, BackWork, CodecSpeed, CodecWork, codec_work
from shoal.planner.pricing.cost import StepParts
from shoal.replicas.build import build_codings, build_policy
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.memory import policy_copies
from shoal.replicas.policy import Island
from support.planner.jobs import job_of, shape_of

MEASURED = Path(__file__).parents[4] / "benchmarks" / "compression"


def job_on(cluster):
    return replace(job_of(software="shoal"), cluster=read_cluster(cluster))


POLICIES = (
    "local:3",
    "diloco:3",
    "slowmo:3",
    "easgd:3",
    "stream:4,2,1",
    "sparse:3,0.1",
    "gossip:ring",
    "gossip:ring compress=int8",
    "pushsum:exponential",
)


@pytest.mark.parametrize("text", POLICIES)
def test_copies_are_what_the_policy_keeps(text):
    channel = Channel("islands", rank=0, size=1, transport=None, traffic=TrafficCounter())
    weights = {name: torch.zeros(1000) for name in "ab"}
    sync, _, compress = text.partition(" compress=")
    rule, codec = SyncRule.parse(sync), compress or None
    coding = build_codings(rule, codec, CompressionConfig(), weights, channel, 1).coding
    island = Island(channel=channel, weights=weights, seed=1, coding=coding)
    policy = build_policy(island, rule, ReplicaConfig(), order=sorted(weights))
    state = policy.state()
    kept = [tensor for group in (state.shared, state.own) for named in group.values() for tensor in named.values()]
    assert sum(tensor.numel() for tensor in kept) == policy_copies(rule.kind, is_compressed=codec is not None) * 2000


def times(**changes):
    silent = (0.0,) * 4
    given = {"exchange": (0.0, 0.0, 0.0, 8.0), "told": silent, "codec": silent, "update": silent, "sent": silent}
    return AgreementTimes(**{**given, "delay": 0, **changes})


def test_an_exchange_is_hidden_by_the_steps_until_it_is_needed():
    assert times().exposed(3.0) == (0.0, 0.0, 0.0, 8.0)
    assert times(delay=2).exposed(3.0) == (0.0, 0.0, 0.0, 2.0)
    assert times(delay=3).mean_seconds(3.0) == 0.0
    # What islands tell each other, and what they compute, nothing hides.
    loud = times(delay=3, told=(0.0, 1.0, 0.0, 0.0), codec=(0.0, 0.0, 0.0, 4.0))
    assert loud.exposed(3.0) == (0.0, 1.0, 0.0, 4.0) and loud.mean_seconds(3.0) == 5 / 4


def test_a_compressed_sum_takes_the_place_of_the_dense_one():
    parts = StepParts(stages=(), microbatches=1, reduce=5.0, reduce_hidden=2.0, update=1.0)
    own = times(exchange=(0.5,), told=(0.0,), codec=(0.25,), update=(0.0,), sent=(7.0,))
    found = agree_parts(parts, Plan(dp=2, compress="int8"), own, 10.0)
    assert found.after_pipeline == 0.5 + 0.25 + 1.0
    found = agree_parts(parts, Plan(islands=2, sync="diloco:4"), times(), 10.0)
    assert (found.reduce, found.agree) == (5.0, 2.0), "an island sums its own gradients as ever"


@pytest.mark.parametrize(
    ("plan", "exact"),
    [(Plan(dp=2, zero=3), True), (Plan(dp=2, compress="fp16"), False), (Plan(dp=2, sync="local:1"), False)],
)
def test_what_equals_one_process(plan, exact):
    assert is_exact(plan) == exact


def test_bytes_that_leave_a_rank_and_their_time():
    job = job_on("x86-server:4x1@ethernet-1g")
    plan = Plan(islands=4, dp=1, sync="local:1")
    counts = {
        ("islands", "all_reduce"): Traffic(calls=1, num_bytes=4000),
        ("islands", "all_to_all"): Traffic(calls=1, num_bytes=1000),
        ("everyone", "all_reduce_max"): Traffic(calls=1, num_bytes=4),
    }
    agreement = Agreement(cycle=(counts,), work=(CodecWork(),), touched=(0.0,), kept_bytes=0.0)
    found = price_agreement(job, plan, agreement)
    assert found.sent == (2 * 3 / 4 * 4000 + 3 / 4 * 1000,) and found.told == (0.0,)
    slower = price_agreement(job_on("x86-server:4x1@ethernet-100m"), plan, agreement)
    assert slower.exchange[0] > found.exchange[0] > 0
    # To neighbours goes what is counted, once for each.
    ring = price_agreement(job, Plan(islands=4, dp=1, sync="gossip:ring"), agreement)
    assert ring.sent == (2 * 3 / 4 * 4000 + 1000,)


def test_work_of_a_codec():
    config = CompressionConfig()
    both = codec_work(CompressRule.parse("int8"), config, 1000, num_ranks=4, is_sharded=False)
    assert both == CodecWork(1000, 1000, BackWork("int8", 250, 1000)), (
        "a rank encodes its gradient and its slice of the sum"
    )
    sharded = codec_work(CompressRule.parse("int8"), config, 1000, num_ranks=4, is_sharded=True)
    assert sharded == CodecWork(1000, 1000)
    picked = codec_work(CompressRule.parse("topk:0.01"), config, 1000, num_ranks=4, is_sharded=False)
    assert (picked.encoded, picked.decoded) == (1000, 5000), "every rank decodes what all sent, and its own once more"
    assert both.seconds("int8", 1e9) == pytest.approx(
        4 * (1250 / SPEEDS["int8"].encode + 2000 / SPEEDS["int8"].decode) / 1e9
    )
    kept = codec_work(CompressRule.parse("int4"), config, 1000, num_ranks=4, is_sharded=False)
    assert kept == CodecWork(1000, 2000, BackWork("int8", 250, 1250)), (
        "what is lost is known once it is decoded, both ways"
    )
    there = 1000 / SPEEDS["int4"].encode + 2000 / SPEEDS["int4"].decode
    back = 250 / SPEEDS["int8"].encode + 1250 / SPEEDS["int8"].decode
    assert kept.seconds("int4", 1e9) == pytest.approx(4 * (there + back) / 1e9)


def test_speeds_of_codecs_are_those_that_were_measured_last():
    newest = json.loads(max((MEASURED / "results").glob("*.json")).read_text())
    found = {row["codec"].partition(":")[0]: row for row in newest["codecs"]}
    # DGC sends as top-k does, 1-bit Adam as signs.
    found |= {"dgc": found["topk"], "onebit": found["sign"]}
    assert found.keys() == SPEEDS.keys()
    for kind, speed in SPEEDS.items():
        measured = CodecSpeed(found[kind]["encode_share"], found[kind]["decode_share"])
        assert speed.encode == pytest.approx(measured.encode, rel=0.05), (kind, speed, measured)
        assert speed.decode == pytest.approx(measured.decode, rel=0.05), (kind, speed, measured)


@pytest.mark.parametrize("numbers", [{}, {"tied": True}, {"is_gated": True, "experts": 4, "chosen_experts": 2}])
def test_a_model_by_its_numbers_has_matrices_with_all_its_weights(numbers):
    for layer in job_of(shape_of(**numbers)).chain.layers:
        assert sum(math.prod(shape) for _, shape in layer.shapes) == layer.weights, layer.name
        if layer.name.startswith("block"):
            assert max(math.prod(shape) for _, shape in layer.shapes if len(shape) == 2) >= 1024 * 1024


def test_a_rank_of_a_pipeline_sends_what_its_stages_have():
    job = job_of(software="shoal")
    alone, both = rank_shapes(job, Plan(dp=2)), rank_shapes(job, Plan(dp=2, pp=2))
    assert set(both) < set(alone) and updated_share(job, Plan(dp=2)) == 1.0
    assert updated_share(job, Plan(dp=4, zero=1)) == pytest.approx(1 / 4)
