"""Everything else that a forward pass draws, by name, and what cannot be keyed."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import RunError
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.randomness.keyed import Window
from support.models.functional_dropout import Net, keyed, run

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: x + torch.rand_like(x), "torch.rand_like"),
        (lambda x: x + torch.randn(x.shape), "torch.randn"),
        (lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)), "torch.bernoulli"),
        (lambda x: x + torch.empty_like(x).normal_(), "torch.Tensor.normal_"),
        (lambda x: x + torch.randint(3, (1,)), "torch.randint"),
        (lambda x: x[torch.multinomial(torch.ones(4), 4)], "torch.multinomial"),
        (lambda x: F.rrelu(x, training=True), "torch.nn.functional.rrelu"),
        (lambda x: F.gumbel_softmax(x), "torch.nn.functional.gumbel_softmax"),
        (lambda x: x + torch.normal(0.0, 1.0, (1,), generator=torch.Generator().manual_seed(0)), "torch.normal"),
    ],
)
def test_other_randomness_is_named_with_its_module(draw, name):
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return draw(x)

    model, key = keyed(nn.Sequential(nn.Linear(8, 8), Draws()))
    run(model, key, torch.randn(4, 8))
    assert key.foreign_draws() == [f"{name} in module '1'"]


@pytest.mark.parametrize(
    "passes",
    [
        lambda x: x if torch.rand([]) < 0.0 else x + 1,
        lambda x: x if torch.rand(()) >= 0.0 else x + 1,
        lambda x: x if torch.rand(1).to(x.device) > 1 else x + 1,
        lambda x: x if torch.rand_like(x).le(torch.tensor(-0.5)).any() else x + 1,
        lambda x: x[torch.randn(3).shape[0] :],
    ],
)
def test_draws_that_decide_nothing_are_not_held_against_a_model(passes):
    """LayerDrop at zero draws for every layer and skips none: OPT, BART and Whisper of Hugging Face were refused for it."""

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return passes(x)

    model, key = keyed(nn.Sequential(nn.Linear(8, 8), Draws()))
    for _ in range(3):
        run(model, key, torch.randn(4, 8))
    assert not key.foreign_draws() and key.draws_unused


@pytest.mark.parametrize(
    "passes",
    [
        lambda x: x if torch.rand([]) < 0.1 else x + 1,
        lambda x: x if torch.rand([]) <= 0.0 else x + 1,
        lambda x: x if torch.rand([]) > 0.0 else x + 1,
        lambda x: x if torch.randn([]) < 0.0 else x + 1,
        lambda x: x * float(torch.rand([])),
        lambda x: x * torch.rand([]).item(),
        lambda x: x * torch.rand(2).tolist()[0],
        lambda x: x * torch.rand(2).numpy()[0],
        lambda x: [x, x + 1][torch.randint(2, ())],
        lambda x: [x, x + 1][int(torch.randint(2, ()))],
        lambda x: x if torch.randint(2, ()) else x + 1,
        lambda x: (x, torch.rand(4)),
        lambda x: x + torch.rand(4, 8).clone(),
        lambda x: x + torch.rand(8)[0],
    ],
)
def test_draws_that_decide_something_are(passes):
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return passes(x)

    model, key = keyed(nn.Sequential(nn.Linear(8, 8), Draws()))
    run(model, key, torch.randn(4, 8))
    assert len(key.foreign_draws()) == 1 and "in module '1'" in key.foreign_draws()[0]


@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python's random"), (np.random.rand, "numpy.random")])
def test_other_generators_are_noticed(draw, name):
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * draw()

    model, key = keyed(Draws())
    run(model, key, torch.randn(4, 8))
    assert key.foreign_draws() == [f"{name} in the forward pass"]


def test_a_model_that_begins_to_draw_later_is_noticed_and_keyed_from_then_on():
    class Late(nn.Module):
        p = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, self.p, self.training)

    model, key = keyed(Late())
    x = torch.ones(4, 64)
    run(model, key, x)
    assert not key.foreign_draws()
    model.p = 0.5
    run(model, key, x)
    assert "later forward pass" in key.foreign_draws()[0]
    assert torch.equal(run(model, key, x), run(model, key, x))


def _harmless(x: Tensor) -> Tensor:
    return x if torch.rand([]) < 0.0 else x + 1


@pytest.mark.parametrize(
    ("first", "begins"),
    [
        (_harmless, lambda x: F.dropout(x, 0.5)),
        (_harmless, lambda x: x + torch.randn(64)),
        (_harmless, lambda x: torch.rrelu(-x, training=True)),
        (lambda x: F.dropout(x, 0.5), lambda x: x + torch.randn(64)),
        (lambda x: F.dropout(x, 0.5), lambda x: torch.rrelu(-x, training=True)),
    ],
)
def test_a_model_that_draws_already_is_noticed_when_it_begins_to_draw_more(first, begins):
    """One harmless draw, or one keyed dropout, and nobody looked any more."""

    class Late(nn.Module):
        is_late = False

        def forward(self, x: Tensor) -> Tensor:
            x = first(x)
            return begins(x) if self.is_late else x

    model, key = keyed(Late())
    for _ in range(3):
        run(model, key, torch.ones(4, 64))
    assert not key.foreign_draws()
    model.is_late = True
    run(model, key, torch.ones(4, 64))
    assert len(key.foreign_draws()) == 1


@pytest.mark.timeout(300)
def test_a_compiled_models_functional_draws_are_called_foreign():
    model, key = keyed(Net())
    model.compile(backend="aot_eager")
    x = torch.randn(4, 6, 8)
    for _ in range(2):
        run(model, key, x)
    assert any(
        "torch.nn.functional.dropout in module 'first'" in name and "compiled" in name for name in key.foreign_draws()
    )


@pytest.mark.timeout(300)
def test_a_compiled_model_of_modules_stays_keyed():
    class Modules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(self.linear(x))

    model, key = keyed(Modules())
    x = torch.randn(4, 8)
    expected = run(model, key, x)
    model.compile(backend="aot_eager", fullgraph=True)
    again = apply_keyed_dropout(model, 0)
    for _ in range(2):
        assert torch.equal(run(model, again, x), expected)
    assert not again.foreign_draws()


def test_dropping_before_begin_is_refused():
    model, key = keyed(Net())
    with pytest.raises(RunError, match="before begin"), key.drawing():
        model(torch.randn(4, 6, 8))
    run(model, key, torch.randn(4, 6, 8))  # and the failure left nothing behind
    assert len(model._forward_pre_hooks) == 1


def test_four_dims_where_only_the_sequence_is_cut_are_refused():
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5)

    model, key = keyed(nn.Sequential(Drops()))
    key.narrow("0", (Window(1, (0,), 2),))
    with pytest.raises(RunError, match=r"\(4, 3, 2, 5\) where the sequence is cut"):
        run(model, key, torch.ones(4, 3, 2, 5))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layers_own_dropout_is_named_as_what_draws(layer):
    model = nn.Sequential(layer(3, 4, num_layers=2, batch_first=True, dropout=0.5))
    key = apply_keyed_dropout(model, 0)
    key.begin(0, np.arange(2))
    with key.drawing():
        model(torch.ones(2, 5, 3))
    assert key.foreign_draws() == [f"nn.{layer.__name__}(dropout=...) in module '0'"]
