"""PowerSGD, DGC, 1-bit Adam and LAMB against their papers' rules, written plainly here."""

import math

import pytest
import torch

from shoal.compression import dgc, onebit, powersgd
from shoal.compression.feedback import encode_with_feedback
from shoal.compression.sign import Sign
from shoal.compression.sparse import TopK


def matrix_of_rank(rank, rows=30, cols=20, seed=0):
    maker = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=maker) @ torch.randn(rank, cols, generator=maker)


def once(matrix, right):
    left = powersgd.orthogonalise(powersgd.multiply_left(matrix, right))
    right = powersgd.multiply_right(matrix, left)
    return powersgd.product(left, right), right


@pytest.mark.parametrize(("own", "rank"), [(1, 1), (2, 2), (4, 4), (2, 4)])
def test_a_matrix_of_the_rank_is_exact(own, rank):
    matrix = matrix_of_rank(own)
    got, _ = once(matrix, powersgd.start_right(20, rank, key=1))
    assert float((got - matrix).norm() / matrix.norm()) < 1e-5


def test_a_warm_start_converges_to_the_best_of_its_rank():
    matrix = matrix_of_rank(20)
    _u, s, _v = torch.linalg.svd(matrix)
    best = float(s[2:].norm())
    right, errors = powersgd.start_right(20, 2, key=1), []
    for _ in range(200):
        got, right = once(matrix, right)
        errors.append(float((got - matrix).norm()))
    assert errors[0] > 1.02 * best
    assert errors[-1] < 1.001 * best


def test_columns_are_orthonormal_or_zero_and_zero_ones_come_back():
    left = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    left[:, 2] = 2 * left[:, 0]
    basis = powersgd.orthogonalise(left)
    assert torch.allclose(basis.T @ basis, torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0])), atol=1e-6)
    _, right = once(torch.zeros(30, 20), powersgd.start_right(20, 2, key=1))
    assert bool((right == 0).all())
    got, _ = once(matrix_of_rank(2), powersgd.revive_right(right, key=2))
    assert float((got - matrix_of_rank(2)).norm()) < 1e-3
    assert bool(once(torch.full((4, 4), float("nan")), torch.ones(4, 2))[0].isnan().all())


def test_a_matrix_is_compressed_when_bytes_say_so():
    assert powersgd.factor_bytes(100, 50, 2) == 4 * 150 * 2
    assert powersgd.is_worth((100, 50), 4) and not powersgd.is_worth((100, 50), 17)
    assert powersgd.is_worth((64, 3, 7, 7), 4) and not powersgd.is_worth((1000,), 1)


def test_dgc_is_the_papers_rule():
    maker = torch.Generator().manual_seed(0)
    state = dgc.start_state(torch.zeros(12))
    u, v = [0.0] * 12, [0.0] * 12
    for _ in range(6):
        gradient = torch.randn(12, generator=maker)
        encoded, state = dgc.send(dgc.accumulate(state, gradient, 0.9), 0.25)
        for i, g in enumerate(gradient.tolist()):
            u[i] = 0.9 * u[i] + g
            v[i] += u[i]
        places = sorted(sorted(range(12), key=lambda i: -abs(v[i]))[:3])
        assert encoded.payload[1].tolist() == places
        assert encoded.payload[0].tolist() == pytest.approx([v[i] for i in places], rel=1e-5)
        assert TopK(0.25).decode(encoded, 12).count_nonzero() == 3
        for i in places:
            u[i] = v[i] = 0.0
        assert state.momentum.tolist() == pytest.approx(u, rel=1e-5, abs=1e-6)
        assert state.unsent.tolist() == pytest.approx(v, rel=1e-5, abs=1e-6)


def test_dgc_warms_its_ratio_up_and_clips_each_replica():
    # Lin et al. 2018, section 3.3: sparsity 75%, 93.75%, 98.4375%, 99.6%, then 99.9%.
    ratios = [dgc.ratio_at(step, 4.0**-5, 8) for step in range(10)]
    assert ratios == pytest.approx([4.0**-e for e in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)])
    assert dgc.ratio_at(0, 0.01, 0) == 0.01
    assert dgc.local_clip_norm(1.0, 4) == 0.5


def test_onebit_adam_is_the_papers_rule():
    maker = torch.Generator().manual_seed(0)
    moments, codec = onebit.Moments(torch.zeros(6), torch.zeros(6)), Sign()
    residuals = [None, None]
    m, v = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    errors = [torch.zeros(6, dtype=torch.float64) for _ in range(2)]
    for step in range(8):
        gradients = [torch.randn(6, generator=maker) for _ in range(2)]
        if step < 4:
            mean = (gradients[0] + gradients[1]) / 2
            moments = onebit.warm_up(moments, mean, 0.9, 0.999)
            m, v = 0.9 * m + 0.1 * mean.double(), 0.999 * v + 0.001 * mean.double() ** 2
        else:
            sent, plain = [], []
            for rank, gradient in enumerate(gradients):
                own = encode_with_feedback(codec, onebit.move(moments.momentum, gradient, 0.9), residuals[rank])
                residuals[rank] = own.residual
                sent.append(own.sent)
                given = 0.9 * m + 0.1 * gradient.double() + errors[rank]
                plain.append(torch.where(given >= 0, 1.0, -1.0).double() * given.abs().mean())
                errors[rank] = given - plain[-1]
            moments = onebit.agree(moments, (sent[0] + sent[1]) / 2)
            m = (plain[0] + plain[1]) / 2
        assert torch.allclose(moments.momentum.double(), m, rtol=1e-5, atol=1e-6)
        assert torch.allclose(moments.variance.double(), v, rtol=1e-5)
        assert torch.allclose(onebit.direction(moments, 1e-8).double(), m / (v.sqrt() + 1e-8), rtol=1e-4, atol=1e-4)


def test_lambs_factor_is_bounded_and_slow():
    frozen = torch.tensor([4.0, 1.0])
    assert onebit.lamb_factor(frozen, torch.tensor([4.0, 1.0]), 1.0) == 1.0
    assert onebit.lamb_factor(frozen, torch.tensor([1.0, 1.0]), 1.0) == pytest.approx(1.1)
    assert onebit.lamb_factor(frozen, torch.tensor([1.0, 1.0]), 1.9) == 2.0
    assert onebit.lamb_factor(frozen, frozen * 1e6, 0.52) == 0.5
    assert math.isclose(onebit.lamb_factor(frozen, torch.zeros(2), 4.0), 4.0)
    before, gradient = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    assert torch.allclose(onebit.rebuild_gradient(before, onebit.move(before, gradient, 0.9), 0.9), gradient, atol=1e-5)
