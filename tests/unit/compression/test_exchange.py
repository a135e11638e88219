"""Compressed sums of several ranks, played by threads: against sums written out, counted bytes, and steps that are not taken."""

import math

import pytest
import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import Traffic
from shoal.compression.blocks import BlockInt
from shoal.compression.build import build_back, build_codec, has_residual
from shoal.compression.config import CompressionConfig
from shoal.compression.exchange import CompressedSum
from shoal.compression.keyed import codec_key
from shoal.compression.layout import TensorPart, cut_as_owned, cut_evenly
from shoal.compression.traffic import Link, state_bytes, sum_traffic
from shoal.core.compressrule import CompressRule
from support.thread_ranks import on_ranks

SHAPES = {"a.weight": (70, 33), "b.bias": (50,), "c.weight": (40, 60), "d.weight": (129, 2, 9), "e.scale": ()}
RULES = ["fp16", "bf16", "fp8", "int8", "int4", "qsgd:4", "natural", "sign", "topk:0.05", "threshold:0.5"]
RULES += ["dgc:0.05", "randk:0.1", "powersgd:2"]


def gradient(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def build(channel: Channel, word: str, owned=None, **config) -> CompressedSum:
    parts = {name: TensorPart(shape) for name, shape in SHAPES.items()}
    settings = CompressionConfig(**{"min_elements": 100, **config})
    rule = CompressRule.parse(word)
    return CompressedSum(parts, rule, settings, channel, seed=3, device=torch.device("cpu"), owned=owned)


def run(word: str, size: int, *, steps: int = 3, owned=None, **config):
    """Sums of some steps, the state afterwards, and whether counted traffic was forecast, by rank."""

    def work(channel: Channel):
        exchange, sums = build(channel, word, owned, **config), []
        for step in range(steps):
            exchange.begin_step(step)
            mine = gradient(channel.rank, step)
            with channel.traffic.counting() as counts:
                exchange.reduce_(mine)
            assert counts == exchange.forecast_traffic()
            exchange.commit()
            sums.append(mine)
        return sums, exchange.own_state(), exchange.shared_state()

    return on_ranks(size, work)


@pytest.mark.parametrize("word", RULES)
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_sum_and_traffic_is_as_forecast(word, size):
    found = run(word, size)
    for sums, _, _ in found[1:]:
        for step, mine in enumerate(sums):
            for name, tensor in mine.items():
                assert torch.equal(tensor, found[0][0][step][name]), (step, name)
    plain = gradient(0, 1)["b.bias"]
    for rank in range(1, size):
        plain = plain + gradient(rank, 1)["b.bias"]
    assert torch.equal(found[0][0][1]["b.bias"], plain)


@pytest.mark.parametrize("back", [None, "same", "int8"])
@pytest.mark.parametrize("word", ["int8", "int4", "sign", "qsgd:4"])
def test_two_legs_are_the_rule_written_out(word, back):
    size, rule, config = 3, CompressRule.parse(word), CompressionConfig(min_elements=100, back=back)
    codec, keeps = build_codec(rule, config), has_residual(rule, config)
    returning = build_back(rule, config)
    assert isinstance(returning, BlockInt) and returning.bits == 8 if back == "int8" else returning is not None
    found = run(word, size, back=back)
    for name in ("a.weight", "c.weight", "d.weight"):
        numel = math.prod(SHAPES[name])
        residuals, unsent = [torch.zeros(numel) for _ in range(size)], torch.zeros(numel)
        for step in range(3):
            total = None
            for rank in range(size):
                given = gradient(rank, step)[name].reshape(-1) + (residuals[rank] if keeps else 0)
                sent = codec.decode(codec.encode(given, key=codec_key(3, step, f"{name}/{rank}")), numel)
                residuals[rank] = given - sent
                total = sent if total is None else total + sent
            total = total + unsent if keeps else total
            result = returning.decode(returning.encode(total, key=codec_key(3, step, f"{name}/sum")), numel)
            unsent = total - result
            assert torch.equal(found[0][0][step][name].reshape(-1), result), (name, step)
        if keeps:
            assert torch.equal(found[1][1]["residual"][name], residuals[1])


@pytest.mark.parametrize(("back", "there", "returned"), [(None, 17, 33), ("same", 17, 17), ("int8", 17, 33)])
def test_a_sum_of_int4_comes_back_as_int8(back, there, returned):
    """By blocks of 32 elements in bytes: 16 or 32 of codes, and a quarter of a block's scale of four."""
    link = Link(axis="dp", num_ranks=4, has_order=True)
    parts = {"a.weight": TensorPart((64, 128))}
    found = sum_traffic(parts, CompressRule.parse("int4"), CompressionConfig(back=back), link, step=0)
    blocks = 64 * 128 // 32
    assert found == {
        ("dp", "all_to_all"): Traffic(calls=1, num_bytes=there * blocks),
        ("dp", "all_gather"): Traffic(calls=1, num_bytes=returned * blocks),
    }
    bytes_kept = {
        rank: state_bytes(parts, CompressRule.parse("int4"), CompressionConfig(back=back), num_ranks=4, rank=rank)
        for rank in range(4)
    }
    assert set(bytes_kept.values()) == {2 * 4 * (64 * 128 + 64 * 128 // 4)}


@pytest.mark.parametrize("word", RULES)
def test_shards_have_the_bits_of_one_sum_whatever_the_cut(word):
    """Under ZeRO the sum stays with its owner, so it is that of the first leg: what ``both_ways=false`` gives everybody."""
    owned = [
        {"a.weight": (0, 330), "b.bias": (0, 50), "c.weight": (0, 0), "d.weight": (0, 18)},
        {"a.weight": (330, 2310), "c.weight": (0, 1380), "d.weight": (18, 36), "e.scale": (0, 1)},
        {"c.weight": (1380, 2400), "d.weight": (36, 2322)},
    ]
    whole = run(word, 3, both_ways=False)[0][0]
    for rank, (sums, _, _) in enumerate(run(word, 3, owned=owned)):
        for step, mine in enumerate(sums):
            for name, (first, end) in owned[rank].items():
                own = mine[name].reshape(-1)[first:end]
                assert torch.equal(own, whole[step][name].reshape(-1)[first:end]), (rank, step, name)


@pytest.mark.parametrize("word", ["int4", "topk:0.05", "dgc:0.05", "powersgd:2", "randk:0.1"])
def test_a_step_that_is_not_taken_leaves_the_state(word):
    def work(channel: Channel):
        exchange, sums = build(channel, word), []
        for step, is_taken in ((0, True), (1, False), (2, True)):
            exchange.begin_step(step)
            mine = gradient(channel.rank, step)
            if not is_taken:
                mine = {name: torch.full_like(tensor, math.nan) for name, tensor in mine.items()}
            exchange.reduce_(mine)
            if is_taken:
                exchange.commit()
                sums.append(mine)
        return sums

    def straight(channel: Channel):
        exchange, sums = build(channel, word), []
        for step in (0, 2):
            exchange.begin_step(step)
            mine = gradient(channel.rank, step)
            exchange.reduce_(mine)
            exchange.commit()
            sums.append(mine)
        return sums

    for skipped, plain in zip(on_ranks(2, work), on_ranks(2, straight), strict=True):
        for one, other in zip(skipped, plain, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SHAPES)


@pytest.mark.parametrize("word", [*RULES, "int4@2"])
def test_one_bad_element_is_seen_by_all(word):
    def work(channel: Channel):
        exchange = build(channel, word)
        exchange.begin_step(0)
        mine = gradient(channel.rank, 0)
        if channel.rank == 1:
            mine["c.weight"][39, 59] = math.nan
        exchange.reduce_(mine)
        return mine["c.weight"]

    assert all(not bool(total.isfinite().all()) for total in on_ranks(2, work))


def test_nothing_is_lost_by_what_selects():
    sums = run("topk:0.05", 2, steps=4)
    name = "c.weight"
    sent = sum(one[name] for one in sums[0][0])
    kept = sum(state["residual"][name].view(40, 60) for _, state, _ in sums)
    given = sum(gradient(rank, step)[name] for step in range(4) for rank in range(2))
    assert torch.allclose(sent + kept, given, atol=1e-5)


def test_before_the_first_step_all_is_dense():
    found = run("int8@2", 2)[0][0]
    for step in (0, 1):
        assert torch.equal(found[step]["a.weight"], gradient(0, step)["a.weight"] + gradient(1, step)["a.weight"])
    assert not torch.equal(found[2]["a.weight"], gradient(0, 2)["a.weight"] + gradient(1, 2)["a.weight"])


def test_cuts_lie_at_blocks_below_the_even_share():
    parts = {"a": TensorPart((3, 110)), "b": TensorPart((5, 100), offset=64, numel=300)}
    pieces = cut_evenly(parts, 2, 128)
    assert [(one.name, one.start, one.stop, one.offset) for one in pieces[0]] == [("a", 0, 256, 0)]
    assert [(one.name, one.start, one.stop, one.offset) for one in pieces[1]] == [
        ("a", 256, 330, 256),
        ("b", 0, 300, 64),
    ]
    widened = cut_as_owned(parts, [{"b": (10, 100)}, {}], 128)
    assert [(one.start, one.stop, one.offset) for one in widened[0]] == [(0, 192, 64)]
