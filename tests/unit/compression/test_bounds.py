"""Errors of the codecs within the bounds that are promised: half a scale, contraction, no bias, and an exact residual."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.blocks import BlockInt
from shoal.compression.feedback import encode_with_feedback
from shoal.compression.keyed import codec_key, draw_bits, draw_uniform
from shoal.compression.quantize import QSGD, Natural
from shoal.compression.sign import Sign
from shoal.compression.sparse import RandomK, Threshold, TopK, select_largest

FLOATS = st.lists(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100), min_size=1, max_size=70)


def through(codec, flat, **known):
    return codec.decode(codec.encode(flat, **known), flat.numel())


@settings(max_examples=150, deadline=None)
@given(FLOATS, st.sampled_from([4, 8]), st.integers(0, 40))
def test_nearest_is_within_half_a_scale_and_the_residual_is_exact(numbers, bits, offset):
    flat, codec = torch.tensor(numbers), BlockInt(bits, 16)
    encoded = codec.encode(flat, offset=offset)
    decoded = codec.decode(encoded, flat.numel())
    blocks = (torch.arange(flat.numel()) + offset) // 16 - offset // 16
    scales = encoded.payload[0][blocks].double()
    # Dividing and multiplying round once each, by 2**-24 of at most 127 scales.
    assert bool(((flat.double() - decoded.double()).abs() <= scales * (0.5 + 2.0**-16)).all())
    kept = encode_with_feedback(codec, flat, None, offset=offset)
    assert torch.equal(kept.sent + kept.residual, flat)


@settings(max_examples=150, deadline=None)
@given(FLOATS, st.floats(0.01, 1), st.sampled_from([TopK, RandomK, Threshold]))
def test_what_is_sent_and_what_is_kept_is_what_was_given(numbers, number, kind):
    flat = torch.tensor(numbers)
    memory = torch.linspace(-1, 1, flat.numel())
    kept = encode_with_feedback(kind(number), flat, memory, key=3)
    assert torch.equal(kept.sent + kept.residual, flat + memory)
    assert bool(((kept.sent == 0) | (kept.residual == 0)).all())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.floats(0.01, 1))
def test_topk_takes_the_largest_and_of_ties_the_first(numbers, ratio):
    flat, k = torch.tensor(numbers, dtype=torch.float32), min(len(numbers), max(1, int(ratio * len(numbers))))
    expected = sorted(sorted(range(len(numbers)), key=lambda i: (-abs(numbers[i]), i))[:k])
    assert TopK(ratio).encode(flat).payload[1].tolist() == expected
    error = (flat - through(TopK(ratio), flat)).square().sum()
    assert float(error) <= (1 - k / flat.numel()) * float(flat.square().sum()) + 1e-6


@pytest.mark.parametrize("kind", ["normal", "equal", "sorted", "few"])
@pytest.mark.parametrize("k", [1, 1000, 90_000, 200_000])
def test_topk_of_many_is_that_of_a_stable_sort(kind, k):
    flat = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    if kind == "equal":
        flat = flat.mul(2).round()
    if kind == "sorted":
        flat = flat.sort().values
    if kind == "few":
        flat[torch.arange(200_000) % 12 != 5] = 0
    expected = flat.abs().sort(descending=True, stable=True).indices[:k].sort().values
    assert torch.equal(select_largest(flat, k), expected)


def test_the_rate_ratio_scales_the_residual():
    kept = encode_with_feedback(TopK(0.5), torch.tensor([1.0, 4.0]), torch.tensor([2.0, 0.0]), rate_ratio=0.25)
    assert kept.sent.tolist() == [0.0, 4.0] and kept.residual.tolist() == [1.5, 0.0]


NUM_KEYS = 3000


@pytest.mark.parametrize(
    ("codec", "spread"),
    [
        (BlockInt(8, 16, "keyed"), 1 / 127),
        (BlockInt(4, 16, "keyed"), 1 / 7),
        (QSGD(4, 16), 4 / 7),
        (QSGD(2, 16), 4.0),
        (Natural(), 1.0),
        (RandomK(0.25, unbiased=True), 4.0),
    ],
)
def test_keyed_rounding_is_unbiased(codec, spread):
    flat = torch.linspace(-1, 1, 16) * 0.97
    total = torch.zeros(16, dtype=torch.float64)
    for step in range(NUM_KEYS):
        total += through(codec, flat, key=codec_key(7, step), offset=32).double()
    # One draw differs from its mean by at most ``spread``: Hoeffding's bound at a chance of 1e-6 over the 16 elements.
    bound = spread * 2 * math.sqrt(math.log(2 * 16 / 1e-6) / (2 * NUM_KEYS))
    assert float((total / NUM_KEYS - flat).abs().max()) <= bound


def test_natural_gives_powers_of_two_around_and_denormals_too():
    flat = torch.tensor([0.3, -5.0, 1.0, -0.25, 3 * 2.0**-149, 2.0**-126, 3.4e38])
    allowed = [{0.25, 0.5}, {-4.0, -8.0}, {1.0}, {-0.25}, {0.0, 2.0**-126}, {2.0**-126}, {2.0**127}]
    for key in range(50):
        assert all(v in some for v, some in zip(through(Natural(), flat, key=key).tolist(), allowed, strict=True))


def test_draws_belong_to_elements():
    whole = draw_bits(11, 2**32 - 500, 1000)
    assert torch.equal(torch.cat([draw_bits(11, 2**32 - 500, 123), draw_bits(11, 2**32 - 377, 877)]), whole)
    assert whole.unique().numel() > 990
    assert not torch.equal(draw_bits(12, 2**32 - 500, 1000), whole)
    # 32 bits of a million draws, each set in half of them within 5 standard deviations (500 each).
    many = draw_bits(1, 0, 10**6)
    assert all(abs(int(((many >> bit) & 1).sum()) - 500_000) < 2500 for bit in range(32))
    uniform = draw_uniform(1, 0, 10**6)
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1


def test_draws_of_keys_and_neighbours_are_not_correlated():
    # 5 standard deviations of a correlation of 10**5 independent pairs.
    first, second = draw_uniform(1, 0, 10**5) - 0.5, draw_uniform(2, 0, 10**5) - 0.5
    for one, other in ((first, second), (first[1:], first[:-1])):
        assert abs(float((one * other).mean() * 12)) < 5 / math.sqrt(10**5)


def test_sign_of_zero_is_plus():
    flat = torch.tensor([0.0, -0.0, -2.0, 2.0])
    assert through(Sign(), flat).tolist() == [1.0, 1.0, -1.0, 1.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=70))
def test_sign_is_the_mean_magnitude_and_contracts(numbers):
    flat = torch.tensor(numbers)
    for start in range(0, flat.numel(), 16):
        part = flat[start : start + 16].double()
        got = through(Sign(16), flat)[start : start + 16].double()
        mean = part.abs().mean()
        assert torch.allclose(got, torch.where(part >= 0, mean, -mean), rtol=1e-5, atol=1e-40)
        # Karimireddy et al. 2019, lemma 8: ||x - C(x)||^2 = ||x||^2 - ||x||_1^2 / d.
        bound = part.square().sum() - part.abs().sum() ** 2 / part.numel()
        assert float((part - got).square().sum()) <= float(bound) * (1 + 1e-5) + 1e-5 * float(part.square().sum())


def test_random_k_sends_one_of_each_range_and_each_in_turn():
    codec, seen = RandomK(0.3), torch.zeros(30)
    for key in range(400):
        sent = through(codec, torch.ones(30), key=key)
        assert int(sent.sum()) == 9
        seen += sent
    # Ranges are of 3 or 4 elements, so each is chosen 100 or 133 times of 400, here within 5 standard deviations.
    assert float(seen.min()) > 100 - 45 and float(seen.max()) < 134 + 48
