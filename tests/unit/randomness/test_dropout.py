"""Dropout by key: the same bits for a sample, whatever is beside it, however often it is computed."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import RunError
from shoal.randomness.dropout import DropoutKey, apply_keyed_dropout, draw_mask

torch.set_num_threads(1)


class Net(nn.Module):
    """Two dropouts, the second called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.shared = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x))
        return self.shared(self.shared(x + 1.0) + 1.0)


def _net(seed: int = 0) -> tuple[Net, DropoutKey]:
    torch.manual_seed(0)
    net = Net()
    return net, apply_keyed_dropout(net, seed)


def _run(net: nn.Module, key: DropoutKey, x: Tensor, ids: list[int], step: int = 1) -> Tensor:
    key.begin(step, ids)
    output: Tensor = net(x)
    return output


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6, 7], [3], [5, 6]])
def test_the_split_into_microbatches_changes_no_bit(cuts: list[int]) -> None:
    # No matrix product in it: its bits depend on the number of rows.
    net = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.1), nn.Dropout1d(0.5))
    key = apply_keyed_dropout(net, 0)
    x, ids = torch.randn(8, 7, 5), [40, 3, 77, 5, 2**40, 0, 9, 1]
    whole = _run(net, key, x, ids)
    bounds = [0, *cuts, 8]
    parts = [_run(net, key, x[a:b], ids[a:b]) for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), whole)


def test_seed_step_sample_module_and_call_each_change_the_bits() -> None:
    ones = torch.ones(1, 4096)

    def bits(path: str = "a", seed: int = 0, step: int = 1, sample: int = 5, call: int = 0) -> Tensor:
        model = nn.ModuleDict({path: nn.Dropout(0.5)})
        key = apply_keyed_dropout(model, seed)
        key.begin(step, [sample])
        for _ in range(call):
            model[path](ones)
        output: Tensor = model[path](ones)
        return output

    plain = bits()
    assert torch.equal(plain, bits())
    others = [bits(path="b"), bits(seed=1), bits(step=2), bits(sample=6), bits(call=1)]
    for other in others:
        agree = (other == plain).float().mean().item()
        assert 0.45 < agree < 0.55  # Independent fair bits agree in half the places; 0.05 is six sigma.


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_the_share_dropped_is_p_and_the_rest_is_scaled(p: float) -> None:
    drop = nn.Dropout(p)
    key = apply_keyed_dropout(drop, 3)
    size = 1 << 20
    output = _run(drop, key, torch.ones(4, size // 4), [1, 2, 3, 4])
    dropped = (output == 0).float().mean().item()
    assert abs(dropped - p) < 5 * (p * (1 - p) / size) ** 0.5
    assert output.max().item() == pytest.approx(1 / (1 - p))


def test_a_small_p_is_not_rounded_away() -> None:
    mask = draw_mask(torch.empty(1 << 23), torch.tensor([1]), torch.tensor([3]), 0, 1e-5, 1.0, False)
    dropped = int((mask == 0).sum())
    assert abs(dropped - 84) < 28  # Three sigma; sixteen bits would drop 128.


def test_places_within_a_sample_and_samples_are_independent() -> None:
    drop = nn.Dropout(0.5)
    key = apply_keyed_dropout(drop, 3)
    kept = (_run(drop, key, torch.ones(64, 1024), list(range(64))) > 0).double() - 0.5
    for lag in (1, 2, 3, 4, 8):
        assert abs((kept[:, lag:] * kept[:, :-lag]).mean().item()) < 0.005
    assert abs((kept[1:] * kept[:-1]).mean().item()) < 0.005


def test_a_sample_may_have_several_rows() -> None:
    drop = nn.Dropout(0.5)
    key = apply_keyed_dropout(drop, 0)
    x = torch.ones(3, 4, 7)
    assert torch.equal(_run(drop, key, x.flatten(0, 1), [4, 5, 6]), _run(drop, key, x, [4, 5, 6]).flatten(0, 1))


def test_rows_that_are_no_samples_share_one_mask() -> None:
    drop = nn.Dropout(0.5)
    key = apply_keyed_dropout(drop, 0)
    x = torch.ones(5, 64)
    assert torch.equal(_run(drop, key, x, [1, 2]), _run(drop, key, x, [3, 4, 7]))


def test_evaluation_and_p_zero_draw_nothing() -> None:
    net, _ = _net()
    x = torch.randn(2, 8)
    net.eval()
    assert torch.equal(net(x), net.first(x) + 1.0 + 1.0)  # Not even begun: nothing is asked of the key.
    zero = nn.Dropout(0.0)
    apply_keyed_dropout(zero, 0)
    assert zero(x) is x


def test_training_before_begin_is_refused_by_name() -> None:
    net, _ = _net()
    with pytest.raises(RunError, match="'drop' was called in training before begin"):
        net(torch.randn(2, 8))


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.Dropout1d, (6, 32, 5)), (nn.Dropout2d, (6, 32, 3, 2)), (nn.Dropout3d, (6, 32, 2, 1, 2))]
)
def test_spatial_dropout_drops_whole_channels(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    drop = kind(0.5)
    key = apply_keyed_dropout(drop, 0)
    output = _run(drop, key, torch.ones(shape), list(range(6)))
    per_channel = output.flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))
    assert 0.3 < (per_channel[..., 0] == 0).float().mean().item() < 0.7
    half = _run(drop, key, torch.ones(shape)[3:], [3, 4, 5])
    assert torch.equal(half, output[3:])
    alone = _run(drop, key, torch.ones(shape[1:]), [0])
    assert torch.equal(alone.flatten(1).amin(1), alone.flatten(1).amax(1))


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_keeps_mean_and_variance(kind: type[nn.Module]) -> None:
    drop = kind(0.2)
    key = apply_keyed_dropout(drop, 0)
    torch.manual_seed(0)
    x = torch.randn(64, 512, 4)
    output = _run(drop, key, x, list(range(64)))
    assert abs(output.mean().item()) < 0.03
    assert abs(output.std().item() - 1.0) < 0.03
    expected = F.alpha_dropout(x, 0.2, training=True)
    assert output.min().item() == pytest.approx(expected.min().item(), abs=1e-4)  # What a dropped unit becomes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_precision_drops_the_same_places(dtype: torch.dtype) -> None:
    drop = nn.Dropout(0.1)
    key = apply_keyed_dropout(drop, 0)
    plain = _run(drop, key, torch.ones(4, 100), [1, 2, 3, 4])
    other = _run(drop, key, torch.ones(4, 100, dtype=dtype), [1, 2, 3, 4])
    assert other.dtype == dtype
    assert torch.equal(other == 0, plain == 0)
    assert other.max() == torch.tensor(1 / 0.9, dtype=torch.float64).to(dtype)


def test_in_place_changes_its_input() -> None:
    drop = nn.Dropout(0.5, inplace=True)
    key = apply_keyed_dropout(drop, 0)
    x = torch.ones(2, 50)
    assert _run(drop, key, x, [1, 2]) is x
    assert (x == 0).any()


def test_the_gradient_passes_where_the_value_did() -> None:
    drop = nn.Dropout(0.5)
    key = apply_keyed_dropout(drop, 0)
    x = torch.ones(2, 50, requires_grad=True)
    output = _run(drop, key, x, [1, 2])
    output.sum().backward()
    assert torch.equal(x.grad, output.detach())


def _gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    net.zero_grad()
    loss.sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def test_a_recompute_draws_the_same_bits_again() -> None:
    net, key = _net()
    x, ids = torch.randn(4, 8), [5, 6, 7, 8]
    expected = _gradients(net, _run(net, key, x, ids))
    key.begin(1, ids)
    recomputed = checkpoint(net, x, use_reentrant=False, context_fn=key.recompute_contexts)
    key.begin(9, [100])  # As in a pipeline: the next microbatch has begun before this one's backward.
    assert all(map(torch.equal, _gradients(net, recomputed), expected))


def test_a_recompute_without_contexts_is_recognised_where_it_can_be() -> None:
    torch.manual_seed(0)
    once = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Tanh())
    key = apply_keyed_dropout(once, 0)
    x, ids = torch.randn(4, 8), [5, 6, 7, 8]
    expected = _gradients(once, _run(once, key, x, ids))
    key.begin(1, ids)
    assert all(map(torch.equal, _gradients(once, checkpoint(once, x, use_reentrant=False)), expected))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = torch.tanh(self.drop(torch.tanh(self.drop(self.linear(x)))))
            return output

    twice = Twice()
    key = apply_keyed_dropout(twice, 0)
    key.begin(1, ids)
    with pytest.raises(RunError, match="called 2 times and is recomputed"):
        _gradients(twice, checkpoint(twice, x, use_reentrant=False))


@pytest.mark.timeout(300)
def test_compiled_and_eager_draw_the_same_bits() -> None:
    # The aot_eager backend traces through dynamo and autograd as inductor does, and needs no C++ compiler in the test.
    net, key = _net()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 8)
    for step in (1, 2, 3):
        eager = _run(net, key, x, [5, 6, 7, 8 + step], step)
        expected = _gradients(net, eager)
        traced = _run(compiled, key, x, [5, 6, 7, 8 + step], step)
        assert torch.equal(traced, eager)
        assert all(map(torch.equal, _gradients(net, traced), expected))


def test_the_operator_obeys_torchs_rules() -> None:
    arguments = (torch.randn(4, 6), torch.tensor([1, 5, 6, 7, 8]), torch.tensor([3]), 0, 0.5, 2.0, False)
    torch.library.opcheck(torch.ops.shoal.draw_dropout_mask.default, arguments)
    spatial = (torch.randn(4, 6, 3), *arguments[1:6], True)
    torch.library.opcheck(torch.ops.shoal.draw_dropout_mask.default, spatial)


def test_the_model_keeps_its_names_and_its_classes() -> None:
    plain, (net, _) = Net(), _net()
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]
    assert isinstance(net.drop, nn.Dropout)
    copy.deepcopy(net)


def test_applying_twice_takes_the_newer_seed() -> None:
    net, _ = _net(0)
    x = torch.ones(4, 8)
    again = apply_keyed_dropout(net, 1)
    other, key = _net(1)
    assert torch.equal(_run(net, again, x, [1, 2, 3, 4]), _run(other, key, x, [1, 2, 3, 4]))


def test_a_subclass_with_its_own_forward_is_left_alone() -> None:
    class Mine(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            return input * 3.0

    model = nn.Sequential(Mine(0.5))
    apply_keyed_dropout(model, 0)
    assert model(torch.ones(1)).item() == 3.0


def test_the_bits_are_these() -> None:
    """Golden: other bits under the same key would break the resume of every run that was started before."""
    mask = draw_mask(torch.ones(2, 12), torch.tensor([7, 0, 2**33]), torch.tensor([12345]), 1, 0.5, 1.0, False)
    assert ["".join(str(int(bit)) for bit in row) for row in mask.tolist()] == ["001000100011", "110011001110"]
