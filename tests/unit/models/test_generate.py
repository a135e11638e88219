"""Generation from a model whose next token is known."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.models.generate import generate


class Counting(nn.Module):
    """Says with certainty that 3 follows 2; remembers how it was called."""

    def __init__(self, strength: float = 100.0) -> None:
        super().__init__()
        self.sequence = 4
        self.strength = strength
        self.seen: list[tuple[int, bool]] = []
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append((tokens.shape[1], self.training))
        return F.one_hot((tokens + 1) % 10, 10).float() * self.strength


def test_it_goes_on_from_the_prompt_within_the_context() -> None:
    model = Counting()
    assert generate(model, [7], 6) == [8, 9, 0, 1, 2, 3]
    assert [length for length, _ in model.seen] == [1, 2, 3, 4, 4, 4]


def test_it_evaluates_and_leaves_the_mode_as_it_was() -> None:
    model = Counting()
    generate(model, [1], 1)
    assert model.seen == [(1, False)]
    assert model.training


def test_the_generator_decides_the_draws() -> None:
    model = Counting(strength=0.0)
    draws = [generate(model, [0], 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_temperature_zero_and_top_one_take_the_likeliest() -> None:
    model = Counting(strength=0.01)
    assert generate(model, [0], 5, temperature=0.0) == [1, 2, 3, 4, 5]
    assert generate(model, [0], 5, top_k=1) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("wrong", [{"prompt_tokens": []}, {"temperature": -1.0}, {"top_k": 0}])
def test_wrong_requests_are_refused(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"prompt_tokens": [1], "num_tokens": 1, **wrong}
    with pytest.raises(RequestError):
        generate(Counting(), **arguments)  # type: ignore[arg-type]
