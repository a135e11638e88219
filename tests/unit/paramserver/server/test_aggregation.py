"""Aggregation against the formulas written out in float64, and against what each promises."""

import numpy as np
import pytest
import torch

from shoal.paramserver.server.shard import accumulate, adasum, average, compensate_delay, fednova, scaled_sum


def draw(count: int, size: int = 37, dtype=torch.float64, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, dtype=dtype, generator=generator) for _ in range(count)]


def test_a_sum_goes_from_left_to_right_and_leaves_its_parts_alone():
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    assert scaled_sum(parts, [1.0, 1.0, 1.0]).item() == 0.0
    assert scaled_sum([parts[0], parts[2], parts[1]], [1.0, 1.0, 1.0]).item() == 1.0
    assert parts[0].item() == 1e8
    assert scaled_sum(parts[1:2], [0.5]).item() == 0.5 and parts[1].item() == 1.0
    assert scaled_sum(parts[1:2], [1.0]).data_ptr() != parts[1].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_has_the_same_bits_wherever_it_is_cut(dtype):
    parts = draw(3, size=1003, dtype=dtype)
    whole = scaled_sum(parts, [0.3, 1.0, 0.7])
    for cut in (1, 7, 16, 500, 1002):
        halves = [
            scaled_sum([part[where] for part in parts], [0.3, 1.0, 0.7]) for where in (slice(cut), slice(cut, None))
        ]
        assert torch.equal(torch.cat(halves), whole)


def test_accumulate_and_average_are_their_formulas():
    parts = draw(4)
    assert torch.allclose(accumulate(parts), sum(parts), rtol=0, atol=1e-14)
    expected = (3 * parts[0] + 1 * parts[1] + 5 * parts[2] + 2 * parts[3]) / 11
    assert torch.allclose(average(parts, [3, 1, 5, 2]), expected, rtol=0, atol=1e-14)


def test_fednova_is_its_formula():
    start, *ended = draw(4)
    shares, steps, rates = [0.5, 0.3, 0.2], [4, 1, 9], [0.1, 0.2, 0.05]
    directions = [(start - local).numpy() / (eta * tau) for local, eta, tau in zip(ended, rates, steps, strict=True)]
    effective = 0.5 * 4 + 0.3 * 1 + 0.2 * 9
    expected = start.numpy() - effective * 0.3 * sum(p * d for p, d in zip(shares, directions, strict=True))
    found = fednova(start, ended, shares=shares, steps=steps, rates=rates, rate=0.3)
    assert np.allclose(found.numpy(), expected, rtol=0, atol=1e-13)


def test_fednova_with_equal_steps_and_rates_is_the_plain_average_of_weights():
    start, *ended = draw(4)
    found = fednova(start, ended, shares=[0.5, 0.3, 0.2], steps=[5, 5, 5], rates=[0.1, 0.1, 0.1])
    assert torch.allclose(found, 0.5 * ended[0] + 0.3 * ended[1] + 0.2 * ended[2], rtol=0, atol=1e-13)


def test_fednova_goes_to_the_true_optimum_where_averaging_does_not():
    """Two workers with quadratic losses (x - 0)^2 / 2 and (x - 1)^2 / 2; the second takes ten times the steps."""
    centers, steps, eta = [0.0, 1.0], [1, 10], 0.01

    def local(start, center, count):
        for _ in range(count):
            start = start - eta * (start - center)
        return start

    plain = nova = torch.zeros(1, dtype=torch.float64)
    for _ in range(400):
        plain = average([local(plain, center, count) for center, count in zip(centers, steps, strict=True)], [1, 1])
        ended = [local(nova, center, count) for center, count in zip(centers, steps, strict=True)]
        nova = fednova(nova, ended, shares=[0.5, 0.5], steps=steps, rates=[eta, eta])
    assert abs(nova.item() - 0.5) < 0.02
    assert plain.item() > 0.85


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel():
    left, right = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 2.0])
    assert torch.equal(adasum([left, right]), left + right)
    (one,) = draw(1)
    assert torch.allclose(adasum([one, 3 * one]), 2 * one, rtol=0, atol=1e-14)
    for count in (1, 2, 3, 4, 5, 8):
        assert torch.allclose(adasum([one] * count), one, rtol=0, atol=1e-14)


def test_adasum_is_its_formula_over_a_tree_of_any_size():
    def pair(a, b):
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    a, b, c, d, e = (part.numpy() for part in draw(5))
    found = [adasum([torch.from_numpy(part) for part in parts]) for parts in ((a, b, c), (a, b, c, d, e))]
    expected = [pair(pair(a, b), c), pair(pair(pair(a, b), pair(c, d)), e)]
    for mine, theirs in zip(found, expected, strict=True):
        assert np.allclose(mine.numpy(), theirs, rtol=0, atol=1e-13)


def test_adasum_with_a_zero_gradient_keeps_the_other():
    (one,) = draw(1)
    assert torch.equal(adasum([torch.zeros_like(one), one]), one)


def test_delay_compensation_is_its_formula_and_nothing_without_delay():
    gradient, now, read = draw(3)
    found = compensate_delay(gradient, now, read, 0.04)
    assert torch.allclose(found, gradient + 0.04 * gradient * gradient * (now - read), rtol=0, atol=1e-15)
    assert torch.equal(compensate_delay(gradient, now, now, 0.04), gradient)


def test_delay_compensation_points_to_the_gradient_at_the_present_weights():
    """For the loss x^2 / 2 the true gradient at w is w; lambda g^2 with g = 1 and lambda = 1 is its Hessian exactly."""
    read, now = torch.ones(1), torch.tensor([0.5])
    assert compensate_delay(read.clone(), now, read, 1.0).item() == 0.5
