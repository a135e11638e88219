"""The optimizers that torch gives, against formulas written here; groups; initial state; and where a shard may be cut."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.core.errors import RequestError
from shoal.optim.build import CUT_MULTIPLE, build_optimizer, initialise_state, set_rate
from shoal.optim.config import OptimConfig
from shoal.optim.groups import freeze

NAMES = ["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "lars", "lamb"]
FUSED = ["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad"]
CUT_ANYWHERE = ["sgd", "adagrad"]
PLAIN = [f"torch.optim.{name}" for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop")]
"""Classes of torch without a fused kernel."""


class Affine(nn.Module):
    """One decayed and one exempt parameter."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 7, generator=generator, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(5, generator=generator, dtype=dtype))


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for _, parameter in sorted(model.named_parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


# One function per published rule; g is the gradient, s the state, t the step from 1.


def sgd(w, g, s, t, lr, decay):
    return w - lr * (g + decay * w)


def momentum(w, g, s, t, lr, decay):
    # Sutskever et al. 2013, equations 1 and 2, with the rate outside the velocity.
    s["v"] = 0.8 * s.get("v", 0) + (g + decay * w)
    return w - lr * s["v"]


def nesterov(w, g, s, t, lr, decay):
    # Sutskever et al. 2013, equations 3 and 4, written in terms of the look-ahead weights.
    g = g + decay * w
    s["v"] = 0.8 * s.get("v", 0) + g
    return w - lr * (g + 0.8 * s["v"])


def adam_move(g, s, t):
    # Kingma & Ba 2015, algorithm 1.
    s["m"] = 0.85 * s.get("m", 0) + 0.15 * g
    s["v"] = 0.95 * s.get("v", 0) + 0.05 * g**2
    return (s["m"] / (1 - 0.85**t)) / (np.sqrt(s["v"] / (1 - 0.95**t)) + 1e-5)


def adam(w, g, s, t, lr, decay):
    return w - lr * adam_move(g + decay * w, s, t)


def adamw(w, g, s, t, lr, decay):
    # Loshchilov & Hutter 2019, algorithm 2, line 12.
    return w - lr * decay * w - lr * adam_move(g, s, t)


def adagrad(w, g, s, t, lr, decay):
    # Duchi et al. 2011, equation 1 with a diagonal matrix.
    g = g + decay * w
    s["sum"] = s.get("sum", 0) + g**2
    return w - lr * g / (np.sqrt(s["sum"]) + 1e-5)


RULES = {"sgd": sgd, "momentum": momentum, "nesterov": nesterov, "adam": adam, "adamw": adamw, "adagrad": adagrad}


@pytest.mark.parametrize("name", FUSED)
def test_four_steps_follow_the_published_rule(name):
    # All keys, as a resolved recipe has them: a momentum that nobody reads is refused where it was written alone.
    given = {"momentum": 0.8, "betas": (0.85, 0.95), "eps": 1e-5, "trust": 0.001}
    config = OptimConfig(name=name, lr=0.05, weight_decay=0.3, **given)
    model = Affine()
    optimizer = build_optimizer(config, model)
    expected = {key: value.detach().numpy().copy() for key, value in model.named_parameters()}
    states = {key: {} for key in expected}
    for step in range(4):
        gradients(model, step)
        lr = 0.05 / (step + 1)
        set_rate(optimizer, lr)
        for key, parameter in model.named_parameters():
            decay = 0.3 if key == "weight" else 0.0
            expected[key] = RULES[name](expected[key], parameter.grad.numpy(), states[key], step + 1, lr, decay)
        optimizer.step()
    for key, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[key], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("name", "eps"), [("adam", 1e-8), ("adamw", 1e-8), ("adagrad", 1e-10), ("lamb", 1e-6)])
def test_eps_left_out_is_the_usual_one(name, eps):
    assert build_optimizer(OptimConfig(name=name), Affine()).param_groups[0]["eps"] == eps
    assert build_optimizer(OptimConfig(name=name, eps=1e-3), Affine()).param_groups[0]["eps"] == 1e-3


class Mixed(nn.Module):
    """Parameters of every kind that decay treats differently."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.image_norm = nn.LayerNorm((2, 3))
        self.batch = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.embedding = nn.Embedding(4, 3)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(()))


def group_names(model: nn.Module, config: OptimConfig) -> list[list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        [names[parameter] for parameter in group["params"]] for group in build_optimizer(config, model).param_groups
    ]


@pytest.mark.parametrize("name", NAMES)
def test_norms_biases_and_scalars_are_exempt_in_the_order_of_names(name):
    model = Mixed()
    exempt = ["batch.bias", "batch.weight", "gain", "image_norm.bias", "image_norm.weight", "linear.bias"]
    everything = [sorted(["embedding.weight", "linear.weight", *exempt])]
    grouped = OptimConfig(name=name, weight_decay=0.1)
    assert group_names(model, grouped) == [["embedding.weight", "linear.weight"], exempt]
    assert group_names(model, OptimConfig(name=name, weight_decay=0.1, exempt_1d=False)) == everything
    if name not in ("lars", "lamb"):
        assert group_names(model, OptimConfig(name=name)) == everything, "no decay, nothing to be exempt from"


@pytest.mark.parametrize("name", NAMES)
def test_exempt_parameters_have_no_decay(name):
    groups = build_optimizer(OptimConfig(name=name, weight_decay=0.1), Mixed()).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    if name in ("lars", "lamb"):
        assert [group["adapt"] for group in groups] == [True, False]


def test_a_model_without_parameters_is_refused():
    with pytest.raises(RequestError, match="no trainable parameter"):
        build_optimizer(OptimConfig(), nn.ReLU())


def test_a_parameter_with_gaps_is_refused_and_a_transposed_one_is_not():
    """Fused kernels walk over memory as if it had no gaps: they would write into what lies between."""
    model = Affine()
    model.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    with pytest.raises(RequestError, match=r"'weight'.*contiguous"):
        build_optimizer(OptimConfig(), model)
    model.weight = nn.Parameter(torch.randn(1, 4).expand(3, 4))
    with pytest.raises(RequestError, match="'weight'"):
        build_optimizer(OptimConfig(), model)
    model.weight = nn.Parameter(torch.randn(4, 8).t())
    build_optimizer(OptimConfig(), model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_initialised_state_changes_no_bit_of_training(name, dtype):
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.01)
    early, late = Affine(dtype), Affine(dtype)
    optimizers = [build_optimizer(config, early), build_optimizer(config, late)]
    initialise_state(optimizers[0])
    if name != "sgd":
        assert all(optimizers[0].state[parameter] for parameter in early.parameters())
    for step in range(3):
        for model, optimizer in zip((early, late), optimizers, strict=True):
            gradients(model, step)
            optimizer.step()
    for a, b in zip(early.parameters(), late.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizers[1].state[b].items():
            if value is not None:
                mine = optimizers[0].state[a][key]
                assert torch.equal(mine, value)
                assert (mine.dtype, mine.device, mine.stride()) == (value.dtype, value.device, value.stride())


def test_channels_last_parameters_keep_their_layout_in_the_state():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(OptimConfig(), model)
    initialise_state(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride()


# Where a shard is cut.


def misaligned(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values at an odd place in memory."""
    store = torch.empty(values.numel() + offset, dtype=values.dtype)
    store[offset:] = values
    return store[offset:]


def train_pieces(name: str, numel: int, cuts: list[int], offset: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Weights, then state by key, after four steps of a flat tensor that is held in pieces."""
    generator = torch.Generator().manual_seed(numel)
    weights = torch.randn(numel, generator=generator, dtype=dtype)
    grads = [torch.randn(numel, generator=generator, dtype=dtype) * 10.0**exponent for exponent in (0, -2, 1, -1)]
    edges = [0, *cuts, numel]
    spans = [slice(start, end) for start, end in pairwise(edges)]
    model = nn.ParameterList(nn.Parameter(misaligned(weights[span], offset)) for span in spans)
    config = OptimConfig(name=name, lr=0.013, weight_decay=0.07, exempt_1d=False)
    optimizer = build_optimizer(config, model)
    for grad in grads:
        for parameter, span in zip(model, spans, strict=True):
            parameter.grad = misaligned(grad[span], (3 * offset + 1) % 7)
        optimizer.step()
    keys = sorted(
        key for key, value in optimizer.state[model[0]].items() if isinstance(value, torch.Tensor) and value.ndim
    )
    return [torch.cat([p.detach() for p in model])] + [
        torch.cat([optimizer.state[p][key] for p in model]) for key in keys
    ]


def random_cuts(data: st.DataObject, numel: int, multiple: int) -> list[int]:
    places = range(multiple, numel, multiple)
    return sorted(data.draw(st.sets(st.sampled_from(places), max_size=5))) if places else []


@pytest.mark.parametrize("name", [*FUSED, *PLAIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), numel=st.integers(1, 400), offset=st.integers(0, 9))
def test_a_cut_at_a_multiple_changes_no_bit_wherever_the_piece_lies(name, dtype, data, numel, offset):
    cuts = random_cuts(data, numel, 1 if name in CUT_ANYWHERE else CUT_MULTIPLE)
    whole, pieces = train_pieces(name, numel, [], 0, dtype), train_pieces(name, numel, cuts, offset, dtype)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), numel=st.integers(2, 200), offset=st.integers(0, 9))
def test_an_odd_cut_reaches_no_further_than_the_tail_of_a_piece(name, dtype, data, numel, offset):
    """torch 2.13's fused kernels do NOT give the same bits under every cut: a tail is rounded otherwise, by an ulp or so.

    This test says how far that goes, so that sharding can rely on the rest: elements before a tail are equal in every bit.
    """
    cuts = random_cuts(data, numel, 1)
    whole, pieces = train_pieces(name, numel, [], 0, dtype), train_pieces(name, numel, cuts, offset, dtype)
    edges = [0, *cuts, numel]
    for a, b in zip(whole, pieces, strict=True):
        for start, end in pairwise(edges):
            body = start + (end - start) // CUT_MULTIPLE * CUT_MULTIPLE
            last_of_whole = numel // CUT_MULTIPLE * CUT_MULTIPLE
            assert torch.equal(a[start : min(body, last_of_whole)], b[start : min(body, last_of_whole)])
        torch.testing.assert_close(a, b, rtol=64 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", [*FUSED, *PLAIN])
def test_the_number_of_threads_changes_no_bit(name):
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(train_pieces(name, 100_007, [], 0, torch.float32))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["lars", "lamb"])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), numel=st.integers(2, 200), offset=st.integers(0, 9))
def test_our_own_arithmetic_may_be_cut_anywhere(name, data, numel, offset):
    """Without the trust ratio, which needs the whole tensor, LARS and LAMB are elementwise and must not see a cut."""

    def run(cuts: list[int], offset: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(numel)
        weights, grad = torch.randn(2, numel, generator=generator)
        edges = [0, *cuts, numel]
        spans = [slice(start, end) for start, end in pairwise(edges)]
        model = nn.ParameterList(nn.Parameter(misaligned(weights[span], offset)) for span in spans)
        optimizer = build_optimizer(OptimConfig(name=name, lr=0.013, weight_decay=0.07, exempt_1d=False), model)
        optimizer.param_groups[0]["adapt"] = False
        for _ in range(4):
            for parameter, span in zip(model, spans, strict=True):
                parameter.grad = misaligned(grad[span], offset)
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in model])

    assert torch.equal(run([], 0), run(random_cuts(data, numel, 1), offset))


def test_the_formulas_above_can_fail():
    """A rule with a planted mistake (no bias correction) is not within the tolerance."""
    state: dict[str, float] = {}
    right = adam(1.0, 0.5, state, 1, 0.1, 0.0)
    wrong = 1.0 - 0.1 * state["m"] / (math.sqrt(state["v"]) + 1e-5)
    assert abs(right - wrong) > 1e-3


@pytest.mark.parametrize(
    ("match", "words"),
    [("nowhere.*", r"groups\[0\]\.match 'nowhere.*' matches no parameter"), ("*", "leave something to train")],
)
def test_groups_that_fit_nothing_or_freeze_everything_are_refused(match, words):
    config = OptimConfig(groups=({"match": match, "frozen": True},))
    with pytest.raises(RequestError, match=words):
        freeze(nn.Linear(2, 2), config)


def test_a_model_that_trains_nothing_by_itself_is_not_blamed_on_groups():
    """A teacher whose parameters are frozen already: what reads its weights says so."""
    freeze(nn.Linear(2, 2).requires_grad_(False), OptimConfig(groups=({"match": "*", "frozen": True},)))
