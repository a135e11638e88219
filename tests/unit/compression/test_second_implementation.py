"""The formulas that proofs compare with give what the codecs give, bit for bit: two implementations of one page."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import keyed
from shoal.compression.build import build_codec
from shoal.compression.config import CompressionConfig
from shoal.compression.exchange import CompressedSum
from shoal.compression.layout import TensorPart
from shoal.compression.sparse import RandomK, Threshold, TopK
from shoal.core.compressrule import CompressRule
from shoal.verify.oracle import codecs as formulas
from shoal.verify.oracle.sums import CompressedSums, owner_of
from support.thread_ranks import on_ranks

WORDS = ["fp16", "bf16", "fp8", "int8", "int4", "int8:24", "sign", "qsgd:2", "qsgd:4", "qsgd:8", "natural"]
SIZES = [(1, 0), (7, 3), (128, 0), (5000, 77), (70_000, 2**32 - 500)]
ANY_FLOATS = st.lists(st.floats(width=32), min_size=1, max_size=70)


def random_values(numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def hostile_values(kind, numel):
    flat = random_values(numel)
    match kind:
        case "denormals":
            return flat * 1e-42
        case "least":
            return flat * 2.0**-126
        case "largest":
            return flat * 1e38
        case "zeros":
            flat[::3], flat[1::5] = 0.0, -0.0
        case "all zeros":
            flat.zero_()
        case "not finite":
            flat[numel // 2], flat[numel // 3], flat[-1] = float("inf"), float("nan"), -float("inf")
        case "halves":
            return (flat * 8).round() / 2
        case "wide":
            return flat * torch.logspace(-40, 37, numel)
    return flat


HOSTILE = ["random", "denormals", "least", "largest", "zeros", "all zeros", "not finite", "halves", "wide"]


def assert_same_bits(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    both = np.isnan(found) & np.isnan(expected)
    wrong = ~(both | (found.view(np.int32) == expected.view(np.int32)))
    assert not wrong.any(), (found[wrong][:3], expected[wrong][:3])


def check_block_codec(word, rounding, flat, offset, key=77):
    rule = CompressRule.parse(word)
    codec = build_codec(rule, CompressionConfig(round=rounding))
    formula = formulas.block_codec(rule, block=None, at_random=rounding == "keyed")
    decoded = codec.decode(codec.encode(flat, key=key, offset=offset), flat.numel())
    assert_same_bits(decoded.numpy(), formula(flat.numpy(), key, offset))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_formulas_of_blocks_give_the_codecs_bits(word, kind):
    for numel, offset in SIZES:
        for rounding in ("nearest", "keyed"):
            check_block_codec(word, rounding, hostile_values(kind, numel), offset)


@settings(max_examples=200, deadline=None)
@given(ANY_FLOATS, st.sampled_from([*WORDS, "int4:8"]), st.integers(0, 300), st.integers(0, 2**64 - 1))
def test_formulas_give_the_bits_of_any_floats(numbers, word, offset, key):
    check_block_codec(word, "keyed", torch.tensor(numbers), offset, key)


@pytest.mark.parametrize("start", [0, 5, 2**32 - 300, 2**40])
def test_draws_are_the_same_hash(start):
    elements = np.arange(start, start + 1000, dtype=np.int64)
    for key in (0, 1, 2**64 - 1, formulas.key_of(3, 7, "a/0")):
        drawn = formulas.draw_words(key, elements).view(np.int32)
        assert np.array_equal(drawn, keyed.draw_bits(key, start, 1000).numpy())
        assert_same_bits(formulas.draw_uniform(key, elements), keyed.draw_uniform(key, start, 1000).numpy())
    assert formulas.key_of(3, 7, "a/0") == keyed.codec_key(3, 7, "a/0")


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("numel", [1, 5, 999, 70_000])
def test_selections_are_the_same(kind, numel):
    flat = hostile_values(kind, numel)
    for ratio in (0.001, 0.1, 0.37, 1.0):
        encoded = TopK(ratio).encode(flat)
        places = np.sort(formulas.largest_places(flat.numpy(), ratio))
        assert encoded.payload[1].tolist() == places.tolist()
        assert_same_bits(TopK(ratio).decode(encoded, numel).numpy(), formulas.only(flat.numpy(), places))
        chosen = RandomK(ratio).encode(flat, key=9)
        places, widths = formulas.random_ranges(numel, ratio, 9)
        assert_same_bits(chosen.payload[0].numpy(), flat.numpy()[places])
        assert_same_bits(RandomK(ratio).decode(chosen, numel).numpy(), formulas.only(flat.numpy(), places))
        unbiased = RandomK(ratio, unbiased=True).encode(flat, key=9)
        with np.errstate(over="ignore"):
            assert_same_bits(unbiased.payload[0].numpy(), flat.numpy()[places] * widths.astype(np.float32))
    for threshold in (1e-43, 0.1, 2.5):
        places = formulas.places_above(flat.numpy(), threshold)
        assert Threshold(threshold).encode(flat).payload[1].tolist() == places.tolist()


SHAPES = {"a.weight": (70, 33), "b.bias": (50,), "c.weight": (40, 60), "d.weight": (129, 2, 9), "e.scale": ()}
METHODS = [
    *("fp16", "bf16", "fp8", "int8", "int4:16", "qsgd:4", "natural", "sign", "topk:0.05@1", "threshold:0.5"),
    *("dgc:0.05@1", "randk:0.1", "powersgd:2@2"),
]
SETTINGS = [
    *({}, {"residual": True}, {"residual": False}, {"both_ways": False}, {"round": "keyed", "block": 24}),
    *({"back": "same"}, {"back": "int8"}, {"back": "int8", "round": "keyed", "residual": True}),
]
NUM_STEPS = 5


def gradients_of(rank, step):
    maker = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=maker) for name, shape in SHAPES.items()}


def rows_of(name, rank, size):
    """The elements that a rank keeps under ZeRO: whole rows, which divide blocks."""
    shape = SHAPES[name] or (1,)
    row = torch.Size(shape[1:]).numel()
    return shape[0] * rank // size * row, shape[0] * (rank + 1) // size * row


def summed_by_ranks(word, size, config, *, is_sharded):
    """By rank: the sums of each step, and what is remembered after it."""

    def work(channel):
        owned = [{name: rows_of(name, rank, size) for name in SHAPES} for rank in range(size)] if is_sharded else None
        parts = {name: TensorPart(shape) for name, shape in SHAPES.items()}
        found = []
        ours = CompressedSum(
            parts, CompressRule.parse(word), config, channel, seed=3, device=torch.device("cpu"), owned=owned
        )
        for step in range(NUM_STEPS):
            ours.begin_step(step)
            given = gradients_of(channel.rank, step)
            ours.reduce_(given)
            if step == 3:
                ours.forget()
            else:
                ours.commit()
            own = {what: {name: flat.clone() for name, flat in of.items()} for what, of in ours.own_state().items()}
            shared = {
                what: {name: (flat.clone(), start) for name, (flat, start, _) in of.items()}
                for what, of in ours.shared_state().items()
            }
            found.append((given, own, shared))
        return found

    return on_ranks(size, work)


def check_sums(word, size, config, *, is_sharded):
    oracle = CompressedSums(
        CompressRule.parse(word),
        config.model_dump(),
        SHAPES,
        seed=3,
        num_ranks=size,
        has_way_back=not is_sharded,
    )
    found = summed_by_ranks(word, size, config, is_sharded=is_sharded)
    for step in range(NUM_STEPS):
        totals = oracle.sum(step, [gradients_of(rank, step) for rank in range(size)])
        if step == 3:
            oracle.forget()
        else:
            oracle.commit()
        memory, seen = oracle.memory(), set()
        for rank in range(size):
            given, own, shared = found[rank][step]
            for name, total in totals.items():
                part = slice(*rows_of(name, rank, size)) if is_sharded else slice(None)
                where = (word, size, step, rank, name)
                assert torch.equal(given[name].reshape(-1)[part], total.reshape(-1)[part]), where
            for what, of in own.items():
                for name, flat in of.items():
                    seen.add(f"{name}/{what}-{rank}")
                    assert torch.equal(flat, memory[f"{name}/{what}-{rank}"].reshape(-1)), (
                        word,
                        size,
                        step,
                        rank,
                        what,
                        name,
                    )
            for what, pieces in shared.items():
                for name, (flat, start) in pieces.items():
                    seen.add(f"{name}/{what}")
                    whole = memory[f"{name}/{what}"]
                    same = torch.equal(flat.reshape(-1), whole.reshape(-1)[start : start + flat.numel()])
                    assert same, (word, size, step, rank, what, name)
        assert seen == memory.keys(), (word, seen ^ memory.keys())
        assert all(owner_of(key) is None or owner_of(key) < size for key in memory)


@pytest.mark.parametrize("word", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_over_ranks_and_what_they_remember_are_the_same(word, size):
    for settings_ in SETTINGS:
        check_sums(word, size, CompressionConfig(min_elements=100, **settings_), is_sharded=False)
    check_sums(word, size, CompressionConfig(min_elements=100), is_sharded=size > 1)
