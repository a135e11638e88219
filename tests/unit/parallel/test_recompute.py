"""Recompute changes what is kept, and no bit of any gradient."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import RequestError, RunError
from shoal.costs.saved import measure_saved
from shoal.models.config import GptConfig, MlpConfig, Seq2SeqConfig
from shoal.models.gpt import Gpt
from shoal.models.mlp import Mlp
from shoal.models.seq2seq import Seq2Seq
from shoal.parallel.analysis.structure import ModuleAnalysis, Stack
from shoal.parallel.recompute import apply_recompute
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.randomness.functional import FunctionalDraws

torch.set_num_threads(1)
IDS = [5, 6, 7, 8]


class DropsOften(nn.Module):
    """One dropout called three times in a block, and functional ones: which call is which must be told in the recompute."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.dropout = nn.Dropout(0.3)

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            x = self.dropout(torch.tanh(self.dropout(self.linear(self.dropout(x))) + shift))
            return torch.tanh(F.dropout(torch.tanh(F.dropout(x, 0.2, self.training)), 0.2, self.training))

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x, shift=x.mean())
        return x


class Convolves(nn.Module):
    """A small image model with blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.ReLU(), nn.Dropout2d(0.3)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x


def _case(name: str) -> tuple[nn.Module, tuple[Tensor, ...], ModuleAnalysis]:
    torch.manual_seed(0)
    tokens = torch.randint(1, 32, (4, 16))
    if name == "gpt":
        config = GptConfig(name="gpt", layers=3, hidden=32, heads=4, kv_heads=2, dropout=0.2)
        return Gpt(config, vocab=32, sequence=16), (tokens,), _rows("blocks", 3)
    if name == "seq2seq":
        pair = Seq2SeqConfig(name="seq2seq", layers=2, hidden=32, heads=4, dropout=0.2)
        analysis = ModuleAnalysis(stacks=(*_rows("encoder", 2).stacks, *_rows("decoder", 2).stacks))
        return Seq2Seq(pair, vocab=32, sequence=16), (tokens, tokens.flip(1)), analysis
    if name == "mlp":
        layers = MlpConfig(name="mlp", layers=3, hidden=16, dropout=0.2)
        return Mlp(layers, features=(16,), outputs=4), (torch.randn(4, 16),), _rows("layers", 3)
    if name == "cnn":
        return Convolves(), (torch.randn(4, 3, 6, 6),), _rows("blocks", 2)
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return encoder, (torch.randn(4, 8, 16),), _rows("layers", 2)
    # In the second round a block's calls do not begin at 0, and its recompute must not either.
    return DropsOften(2 if name == "twice" else 1), (torch.randn(4, 16),), _rows("blocks", 3)


def _rows(name: str, count: int) -> ModuleAnalysis:
    return ModuleAnalysis(stacks=(Stack(blocks=tuple(f"{name}.{number}" for number in range(count))),))


def _train(name: str, mode: Any, *, autocast: bool = False) -> tuple[list[Tensor], int]:
    """The gradients of three microbatches, and the bytes that the last forward kept."""
    model, inputs, analysis = _case(name)
    key = apply_keyed_dropout(model, 1)
    if mode != "none":
        apply_recompute(model, analysis=analysis, mode=mode, dropout=key)
    for step in range(3):
        key.begin(step, IDS)
        with (
            measure_saved(model, *inputs) as saved,
            key.drawing(),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            loss = model(*inputs).float().square().mean()
        key.begin(step + 10, [1, 2])  # another microbatch has begun before the backward pass, as in a pipeline
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], saved.num_bytes


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["gpt", "seq2seq", "mlp", "cnn", "encoder", "often", "twice"])
def test_gradients_are_the_same_bits_and_less_is_kept(name, autocast):
    plain, plain_bytes = _train(name, "none", autocast=autocast)
    selective, selective_bytes = _train(name, "selective", autocast=autocast)
    full, full_bytes = _train(name, "full", autocast=autocast)
    assert plain and all(gradient.any() for gradient in plain[:1])
    for other in (selective, full):
        assert all(map(torch.equal, other, plain))
    assert full_bytes < selective_bytes < plain_bytes


def test_dropout_drawn_anew_would_be_noticed(monkeypatch):
    """The comparison above can fail: without the key's contexts a recompute draws other bits, or is refused."""
    plain, _ = _train("often", "none")
    monkeypatch.setattr(FunctionalDraws, "remember", lambda self: nullcontext)
    other, _ = _train("often", "full")
    assert not all(map(torch.equal, other, plain))


def test_full_keeps_the_inputs_of_blocks_alone():
    """Blocks between nothing: what is kept is one (4, 16) tensor per block but the first, whose input is the model's own."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)))
    key = apply_keyed_dropout(model, 1)
    apply_recompute(model, analysis=ModuleAnalysis(stacks=(Stack(blocks=("0", "1", "2")),)), mode="full", dropout=key)
    x = torch.randn(4, 16)
    with measure_saved(model, x) as saved:
        model(x)
    assert saved.num_bytes == 2 * 4 * 16 * 4


def test_measuring_counts_each_storage_once_and_no_weights():
    linear = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with measure_saved(linear, x) as saved:
        y = linear(x)  # keeps x and its weight
    assert saved.num_bytes == 0
    with measure_saved(linear, x) as saved:
        z = torch.tanh(y)  # keeps its result
        (z * z.view(4, 8)).sum()  # the same storage, twice
    assert saved.num_bytes == 4 * 8 * 4


def test_without_a_gradient_nothing_is_wrapped():
    model, inputs, analysis = _case("gpt")
    key = apply_keyed_dropout(model, 1)
    expected = model.eval()(*inputs)
    apply_recompute(model, analysis=analysis, mode="selective", dropout=key)
    with torch.no_grad():
        assert torch.equal(model(*inputs), expected)


def test_foreign_draws_are_drawn_again():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(torch.tanh(self.linear(x)) * torch.rand(4, 8))

    def gradient(mode: str | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(Noisy(), Noisy())
        key = apply_keyed_dropout(model, 1)
        if mode:
            apply_recompute(model, analysis=ModuleAnalysis(stacks=(Stack(blocks=("0", "1")),)), mode=mode, dropout=key)
        for step in range(2):
            key.begin(step, IDS)
            with key.drawing():
                loss = model(torch.ones(4, 8)).sum()
            loss.backward()
        assert key.foreign_draws() == ["torch.rand in module '0'", "torch.rand in module '1'"]
        return model[0].linear.weight.grad

    assert torch.equal(gradient("full"), gradient(None))
    assert torch.equal(gradient("selective"), gradient(None))


def test_no_blocks_is_refused_with_the_fix():
    model = nn.Linear(2, 2)
    with pytest.raises(RequestError, match=r"no blocks in Linear.*parallel\.blocks"):
        apply_recompute(model, analysis=ModuleAnalysis(), mode="full", dropout=apply_keyed_dropout(model, 0))


def test_a_kept_product_that_is_changed_in_place_is_refused_by_name():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(inplace=True), nn.Linear(8, 8)))
    key = apply_keyed_dropout(model, 1)
    apply_recompute(model, analysis=ModuleAnalysis(stacks=(Stack(blocks=("0",)),)), mode="selective", dropout=key)
    loss = model(torch.randn(4, 8, requires_grad=True)).sum()
    with pytest.raises(RunError, match=r"block '0' changes the result of a matrix product in place.*recompute=full"):
        loss.backward()


def test_state_dict_and_hooks_stay():
    model, _, analysis = _case("gpt")
    names = list(model.state_dict())
    seen = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append(1))
    key = apply_keyed_dropout(model, 1)
    apply_recompute(model, analysis=analysis, mode="full", dropout=key)
    assert list(model.state_dict()) == names
    key.begin(0, IDS)
    model(torch.randint(1, 32, (4, 16))).sum().backward()
    assert seen == [1]  # hooks are outside and are not run again
