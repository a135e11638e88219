"""Batch norm in one process: torch's own bits, one fold per microbatch, and every option of the layer."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.parallel.batchnorm import (
    add_in_order,
    apply_batchnorm,
    begin_microbatch,
    combine_moments,
    fold,
    is_applied,
    local_moments,
)


def build(momentum: float | None = 0.1, dtype: torch.dtype = torch.float32, **options: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3),
        nn.BatchNorm2d(5, momentum=momentum, **options),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, 4),
        nn.BatchNorm1d(4, momentum=momentum, **options),
    ).to(dtype=dtype)


def batch(seed: int, size: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 2 * torch.randn(size, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype) + 1


def applied(model: nn.Module) -> nn.Module:
    ours = copy.deepcopy(model)
    apply_batchnorm(ours, group=None, mode="local")
    return ours


def assert_same(ours: nn.Module, torchs: nn.Module) -> None:
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for (name, a), b in zip(ours.state_dict().items(), torchs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("momentum", [0.1, 0.37, 1.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_process_has_the_bits_of_torchs_layer(momentum, dtype):
    plain = build(momentum, dtype)
    ours = applied(plain)
    for step in range(3):
        for index in range(3):
            x = batch(10 * step + index, 4 + index, dtype)
            begin_microbatch(ours, index)
            mine, theirs = ours(x), plain(x)
            assert torch.equal(mine, theirs)
            mine.square().sum().backward()
            theirs.square().sum().backward()
        fold(ours)
        assert_same(ours, plain)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(ours.eval()(batch(99, dtype=dtype)), plain.eval()(batch(99, dtype=dtype)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", ["plain", "channels last", "transposed"])
def test_running_statistics_have_the_bits_of_torchs_kernel_for_every_input(momentum, dtype, form):
    """Torch rounds the fold otherwise for 16-bit inputs and for strides of another kind: a proof in bfloat16 was off by it."""
    plain = nn.Sequential(nn.BatchNorm2d(16, momentum=momentum)).to(torch.promote_types(dtype, torch.float32))
    ours = applied(plain)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for index in range(4):
            x = (2 * torch.randn(3, 16, 5, 4, generator=generator) + 1).to(dtype)
            x = x.contiguous(memory_format=torch.channels_last) if form == "channels last" else x
            x = x.transpose(0, 2) if form == "transposed" else x
            begin_microbatch(ours, index)
            assert torch.equal(ours(x), plain(x))
        fold(ours)
        assert_same(ours, plain)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}])
def test_layers_without_parameters_or_without_statistics(options):
    plain = build(**options)
    ours = applied(plain)
    for index in range(2):
        begin_microbatch(ours, index)
        assert torch.equal(ours(batch(index)), plain(batch(index)))
    fold(ours)
    assert_same(ours, plain)
    assert torch.equal(ours.eval()(batch(9)), plain.eval()(batch(9)))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_the_layer_keeps_its_identity_names_and_checks(layer):
    model = nn.Sequential(layer(3))
    norm, weight, before = model[0], model[0].weight, list(model.state_dict())
    apply_batchnorm(model, group=None, mode="local")
    assert model[0] is norm and norm.weight is weight and isinstance(norm, layer)
    assert list(model.state_dict()) == before
    assert [name for name, _ in model.named_buffers()] == [
        f"0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    with pytest.raises(ValueError, match=r"expected .* input"):
        model(torch.zeros(2))
    assert is_applied(model) and not is_applied(nn.Linear(2, 2))


def test_statistics_wait_for_the_fold():
    ours = applied(build())
    before = copy.deepcopy(ours.state_dict())
    ours(batch(0))
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())
    fold(ours)
    assert int(ours[1].num_batches_tracked) == 1
    assert not torch.equal(before["1.running_mean"], ours[1].running_mean)


def test_a_microbatch_that_runs_twice_is_folded_once():
    plain = build()
    ours = applied(plain)
    for index in (0, 1):
        plain(batch(index))
        begin_microbatch(ours, index)
        ours(batch(index))
    for index in (1, 0):
        begin_microbatch(ours, index)
        ours(batch(index))
    fold(ours)
    assert_same(ours, plain)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_activations_are_folded_once(use_reentrant):
    plain = build()
    ours = applied(plain)
    for index in range(2):
        plain(batch(index))
        begin_microbatch(ours, index)
        x = batch(index).requires_grad_()
        checkpoint(ours, x, use_reentrant=use_reentrant).sum().backward()
    fold(ours)
    assert_same(ours, plain)


def test_a_skipped_step_leaves_no_trace():
    ours = applied(build())
    before = copy.deepcopy(ours.state_dict())
    begin_microbatch(ours, 0)
    ours(batch(0) * float("inf"))
    fold(ours, keep=False)
    fold(ours)
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())


def test_notes_of_one_step_do_not_reach_the_next():
    plain = build()
    ours = applied(plain)
    for indices in ((0, 1, 2), (0,)):
        for index in indices:
            begin_microbatch(ours, index)
            ours(batch(index))
            plain(batch(index))
        fold(ours)
    assert_same(ours, plain)


def test_an_evaluation_in_between_is_not_noted():
    plain = build()
    ours = applied(plain)
    begin_microbatch(ours, 0)
    ours(batch(0))
    plain(batch(0))
    ours.eval()(batch(1))
    ours.train()
    fold(ours)
    assert_same(ours, plain)


def test_one_value_per_channel_gives_the_bias_and_is_not_folded():
    """torch raises here; an epoch's last microbatch may hold one sample, and that must not end a run."""
    norm = nn.BatchNorm1d(3)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    apply_batchnorm(norm, group=None, mode="local")
    x = torch.randn(1, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = norm(x)
    y.sum().backward()
    fold(norm)
    torch.testing.assert_close(y, norm.bias.detach().reshape(1, 3), rtol=1e-4, atol=0)
    assert not x.grad.any()
    assert (norm.running_mean.tolist(), norm.running_var.tolist()) == ([0.0] * 3, [1.0] * 3)
    assert int(norm.num_batches_tracked) == 0


def test_no_sample_gives_gradients_of_zero_and_is_not_folded():
    ours = applied(build())
    ours(batch(0, size=0)).sum().backward()
    fold(ours)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in ours.parameters())
    assert int(ours[1].num_batches_tracked) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_statistics_in_float32(dtype):
    plain = build()
    ours = applied(plain)
    with torch.autocast("cpu", dtype=dtype):
        mine, theirs = ours(batch(0)), plain(batch(0))
    fold(ours)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)
    assert ours[1].running_var.dtype == torch.float32
    assert_same(ours, plain)


def test_sync_in_one_process_is_local():
    plain = build()
    ours = copy.deepcopy(plain)
    apply_batchnorm(ours, group=None, mode="sync")
    begin_microbatch(ours, 0)
    assert torch.equal(ours(batch(0)), plain(batch(0)))
    fold(ours)
    assert_same(ours, plain)


class Wrapped(nn.Module):
    """A root of the user's own: torch does not compile the forward pass of its own containers as one graph."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_a_compiled_model_notes_too():
    plain = build()
    ours = Wrapped(applied(plain))
    ours.compile(backend="eager", fullgraph=True)
    for index in range(3):
        begin_microbatch(ours, index)
        ours(batch(index)).sum().backward()
        plain(batch(index))
    fold(ours)
    assert_same(ours.body, plain)


def numpy_moments(x: np.ndarray) -> np.ndarray:
    flat = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    mean = flat.mean(axis=1)
    return np.concatenate(([flat.shape[1]], mean, ((flat - mean[:, None]) ** 2).sum(axis=1)))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0),
    spatial=st.sampled_from([(), (3,), (2, 3)]),
    offset=st.sampled_from([0.0, 1e4]),
    seed=st.integers(0, 999),
)
def test_parts_give_the_moments_of_the_whole(sizes, spatial, offset, seed):
    x = np.random.default_rng(seed).normal(size=(sum(sizes), 3, *spatial)) + offset
    edges = np.cumsum([0, *sizes])
    parts = [torch.from_numpy(x[a:b]) for a, b in pairwise(edges)]
    combined = combine_moments([local_moments(part) for part in parts])
    # The spread of values around 1e4 keeps 16 - 2 * 4 digits of float64 in either formula.
    np.testing.assert_allclose(combined.numpy(), numpy_moments(x), rtol=1e-12 if offset == 0 else 1e-6, atol=1e-12)


def test_nothing_has_count_zero():
    empty = local_moments(torch.zeros(0, 3, 4))
    assert empty.tolist() == [0.0] * 7
    assert combine_moments([empty, empty]).tolist() == [0.0] * 7


def test_an_empty_part_changes_no_bit():
    part = local_moments(torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    empty = torch.zeros_like(part)
    alone = combine_moments([part])
    assert torch.equal(combine_moments([empty, part]), alone)
    assert torch.equal(combine_moments([part, empty, empty]), alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_types_are_summed_in_a_longer_one(dtype):
    x = torch.full((4096, 1), 3.0, dtype=dtype)
    assert local_moments(x).tolist() == [4096.0, 3.0, 0.0]


def test_sums_go_from_first_to_last():
    values = [torch.tensor(value, dtype=torch.float64) for value in (1e16, 1.0, 1.0, -1e16)]
    assert add_in_order(values).item() == ((1e16 + 1.0) + 1.0) - 1e16
    assert values[0].item() == 1e16
