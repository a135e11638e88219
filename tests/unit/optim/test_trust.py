"""Trust ratios: the quotient, and 1 where there is none."""

import torch

from shoal.optim.trust import scaled_sum, trust_ratios


def test_ratio_is_the_quotient_and_one_where_a_norm_is_zero_or_not_finite():
    numerators = torch.tensor([3.0, 0.0, 3.0, 0.0, float("inf"), float("nan")], dtype=torch.float64)
    denominators = torch.tensor([4.0, 4.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    ratios = trust_ratios(numerators, denominators, torch.float32)
    assert [ratio.item() for ratio in ratios] == [0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert all(ratio.dtype == torch.float32 and ratio.ndim == 0 for ratio in ratios)


def test_scaled_sum_leaves_its_inputs_alone():
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    (total,) = scaled_sum([first], [second], 0.5)
    assert total.tolist() == [6.0, 12.0]
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [10.0, 20.0])
