"""Stages one after another against the whole module, bit for bit: shipped modules at every cut, and modules of people."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError, RunError
from shoal.data.spec import DataSpec
from shoal.models.build import build_model
from shoal.models.config import MlpConfig
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.units import find_units
from support.pipeline.cut_modules import D, cut_at, gpt, run_through, tokens, units_of
from support.pipeline.stages_on_ranks import batch, build


def mlp():
    torch.manual_seed(0)
    return build_model(MlpConfig(layers=3, hidden=8), DataSpec(kind="classes", features=(8, 8), classes=10))


def sequence(*, inplace=False):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.ReLU(inplace), nn.Linear(D, D))
    return nn.Sequential(nn.Linear(D, D), inner, nn.ReLU(inplace), nn.Linear(D, D))


SHIPPED = {
    "gpt": (gpt, lambda seed: batch("gpt", seed)[0]),
    "cnn": (lambda: build("cnn"), lambda seed: batch("cnn", seed)[0]),
    "mlp": (mlp, lambda seed: batch("cnn", seed)[0]),
    "sequence": (sequence, lambda seed: (torch.randn(3, D, generator=torch.Generator().manual_seed(seed)),)),
}


def every_cut(num_units):
    return [starts for count in range(num_units) for starts in itertools.combinations(range(1, num_units), count)]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_cut_of_a_shipped_module_gives_what_the_module_gives(name):
    make, inputs_of = SHIPPED[name]
    whole = make().eval()
    example, inputs = inputs_of(0), inputs_of(1)
    units = units_of(whole, example)
    expected = whole(*inputs).detach()
    assert len(units) >= 4
    for starts in every_cut(len(units)):
        chain = StagedModule(copy.deepcopy(whole), units, [0, *starts])
        chain.settle(example)
        assert torch.equal(run_through(chain, inputs).detach(), expected), starts


def test_stages_that_are_kept_alone_give_it_too():
    """Each in a module that has let go of all others, as on its own rank."""
    whole, inputs = gpt(), batch("gpt", 1)[0]
    received = ()
    for stage in range(3):
        chain = cut_at(copy.deepcopy(whole), batch("gpt", 0)[0], "blocks.1", "norm")
        chain.keep({stage})
        received = chain.run(stage, inputs, [*received])
    assert torch.equal(received, whole(*inputs))


class Pair(nn.Module):
    """Two streams in, two out, and words besides."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, left: Tensor, right: Tensor, *, mask: Tensor, sizes: dict[str, Tensor], swap: bool):
        left, right = self.left(left) * mask, torch.tanh(self.right(right)) * sizes["right"]
        return (right, left) if swap else (left, right)


class Pairs(nn.Module):
    """A stack of them; the mask comes from the inputs and goes to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(D, 2 * D)
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.end = nn.Linear(2 * D, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = (x > 0).float()
        left, right = self.start(x).chunk(2, dim=-1)
        for number, block in enumerate(self.blocks):
            left, right = block(left, right, mask=mask, sizes={"right": right.abs().sum()}, swap=number % 2 == 0)
        return {"scores": self.end(torch.cat([left, right], dim=-1)), "mask": mask}


def test_blocks_with_several_tensors_tuples_and_keywords():
    torch.manual_seed(0)
    model, example, inputs = Pairs(), (torch.randn(3, D),), (torch.randn(3, D),)
    expected = model(*inputs)
    chain = cut_at(model, example, "blocks.1", "blocks.2", "end")
    found = run_through(chain, inputs)
    assert torch.equal(found["scores"], expected["scores"]) and torch.equal(found["mask"], expected["mask"])
    # The streams and what is computed of them; the mask is every stage's own.
    assert [len(message) for message in chain.messages] == [0, 3, 3, 1]


class Decoder(nn.Module):
    """Learned positions on the module itself, a mask for every block, and a skip from the start to the end if wanted."""

    def __init__(self, *, skip: bool = False, inplace: bool = False) -> None:
        super().__init__()
        self.skip, self.inplace = skip, inplace
        self.embedding = nn.Embedding(11, D)
        self.positions = nn.Parameter(torch.randn(4, D))
        self.scale = nn.Parameter(torch.randn(D))
        self.blocks = nn.ModuleList(Masked() for _ in range(3))
        self.head = nn.Linear(D, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril() & (tokens > 0)[:, None, :]
        x = self.embedding(tokens)
        if self.inplace:
            x += self.positions
        else:
            x = x + self.positions
        first = x
        for block in self.blocks:
            x = block(x, mask)
        if self.skip:
            x = x + first
        return self.head(x * self.scale)


class Masked(nn.Module):
    """Means over what the mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(mask.float() @ x)


def test_a_mask_computed_from_the_inputs_reaches_every_block_without_being_sent():
    torch.manual_seed(0)
    model = Decoder()
    expected = model(*tokens(1))
    chain = cut_at(model, tokens(0), "blocks.0", "blocks.1", "blocks.2", "head")
    assert torch.equal(run_through(chain, tokens(1)), expected)
    assert chain.messages == [(), (0,), (0,), (0,), (0,)]


@pytest.mark.parametrize("unit", ["blocks.0", "blocks.1", "blocks.2"])
def test_a_skip_past_the_cut_is_refused_with_the_units_name(unit):
    with pytest.raises(RequestError, match=f"from '{unit}' on, reads something of an earlier stage"):
        cut_at(Decoder(skip=True), tokens(0), unit)


def test_a_skip_that_ends_before_the_cut_is_no_obstacle():
    torch.manual_seed(0)
    model = Decoder(skip=True)
    expected = model(*tokens(1))
    assert torch.equal(run_through(cut_at(model, tokens(0), "head"), tokens(1)), expected)


def test_a_parameter_in_no_unit_belongs_to_the_stage_that_reads_it():
    chain = cut_at(Decoder(), tokens(0), "blocks.1", "head")
    held = chain.holders()
    # The scale is applied before the head is called, which is still the stage before it.
    assert held["positions"] == {0} and held["scale"] == {1}
    own = chain.keep({1})
    assert set(own) == {"scale", *(f"blocks.{n}.linear.{part}" for n in (1, 2) for part in ("weight", "bias"))}
    assert dict(chain.model.named_parameters()).keys() == own.keys()


def test_a_stage_that_reads_no_gradient_of_a_loose_parameter_runs_without_it():
    torch.manual_seed(0)
    whole = Decoder()
    expected = whole(*tokens(1))
    sent = cut_at(copy.deepcopy(whole), tokens(0), "blocks.1").run(0, tokens(1))
    chain = cut_at(copy.deepcopy(whole), tokens(0), "blocks.1")
    chain.keep({1})
    assert torch.equal(chain.run(1, tokens(1), sent), expected)


@pytest.mark.parametrize("starts", every_cut(5))
def test_layers_that_write_to_their_input_can_be_cut_anywhere(starts):
    """A stage whose first unit was ``nn.ReLU(inplace=True)`` failed in autograd, and one after it in its stand-in."""
    torch.manual_seed(1)
    inputs = (torch.randn(3, D),)
    plain = sequence()
    expected = plain(*inputs)
    expected.sum().backward()
    model = sequence(inplace=True)
    chain = StagedModule(model, units_of(model, inputs), [0, *starts])
    chain.settle((torch.randn(3, D),))
    received, ends = (), []
    for stage in range(chain.num_stages):
        out = chain.run(stage, inputs, received)
        is_last = stage == chain.num_stages - 1
        ends.append((received, [out.sum()] if is_last else list(out)))
        received = () if is_last else [tensor.detach().requires_grad_() for tensor in out]
    assert torch.equal(out, expected)
    grads = None
    for taken, given in reversed(ends):
        torch.autograd.backward(given, grads)
        grads = [tensor.grad for tensor in taken]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_module_that_writes_between_its_units_can_be_cut():
    torch.manual_seed(0)
    model = Decoder(inplace=True)
    expected = model(*tokens(1))
    chain = cut_at(model, tokens(0), "blocks.1", "head")
    assert torch.equal(run_through(chain, tokens(1)), expected)
    assert chain.holders()["positions"] == {0}


class Fork(nn.Module):
    """Takes another way for another batch, and catches whatever is raised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        way = int(x[0, 0])
        if way == 3:
            return self.a(x)
        x = self.a(x)
        if way == 1:
            x, way = self.c(x), 0
        x = self.c(self.b(x))
        return self.a(x) if way == 2 else x


def way(number):
    return (torch.full((2, D), float(number)),)


def test_another_way_than_the_examples_is_an_error_that_names_both():
    chain = cut_at(Fork(), way(0), "b")
    with pytest.raises(RunError, match=r"calls 'c' where it called 'b' on the example"):
        chain.run(0, way(1))
    sent = chain.run(0, way(2))
    with pytest.raises(RunError, match=r"calls 'a' where it called 'nothing more' on the example"):
        chain.run(1, way(2), sent)
    with pytest.raises(RunError, match="ended before it called 'b', where stage 1 begins"):
        chain.run(0, way(3))
    # And it can be used after an error.
    assert torch.equal(chain.run(1, way(0), chain.run(0, way(0))), chain.model(*way(0)))


class Catches(nn.Module):
    """Goes on after an error of its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        try:
            x = self.b(x)
        except Exception:
            x = torch.zeros_like(x)
        return self.c(x)


def test_a_modules_own_except_does_not_catch_the_leaving():
    torch.manual_seed(0)
    model = Catches()
    expected = model(*way(1))
    assert torch.equal(run_through(cut_at(model, way(0), "b", "c"), way(1)), expected)


class Gated(nn.Module):
    """A mask that is computed from the stream before the first block and handed to every block, past the blocks between."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.embedding = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList(Masking() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        is_large = x.abs() > self.limit
        for block in self.blocks:
            x = block(x, is_large)
        return x


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(x).masked_fill(mask, 0.0)


@pytest.mark.parametrize("limit", [0.5, 1000.0])
def test_a_mask_that_is_computed_from_the_stream_crosses_too_even_where_the_example_has_none(limit):
    model, example = Gated(limit), (torch.randint(9, (2, 4)),)
    units = find_units(model, example, analyse_module(model, example, ParallelConfig()))
    starts = [index for index, unit in enumerate(units) if unit.path in ("embedding", "blocks.1")]
    chain = StagedModule(model, units, starts)
    chain.settle(example)
    assert chain.messages == [(), (0, 1)]


class Fan(nn.Module):
    """Layers that hand many tensors on, of a type of their own."""

    def __init__(self, count, dtype=torch.float32):
        super().__init__()
        self.first, self.fan, self.last = nn.Linear(D, D), Spread(count, dtype), Gathered()

    def forward(self, x):
        return self.last(*self.fan(self.first(x)))


class Spread(nn.Module):
    def __init__(self, count, dtype):
        super().__init__()
        self.count, self.dtype = count, dtype

    def forward(self, x):
        return [(x * place).to(self.dtype) for place in range(1, self.count + 1)]


class Gathered(nn.Module):
    def forward(self, *tensors):
        return torch.stack(tensors).sum(0)


def test_more_tensors_than_a_parcel_holds_are_refused_with_the_unit_and_both_numbers():
    example = (torch.randn(2, D),)
    with pytest.raises(RequestError) as refused:
        cut_at(Fan(13), example, "fan", "last")
    assert str(refused.value) == (
        "stage 2, from 'last' on, is given 13 tensors, whose shapes and types take 66 numbers, and a message's header has 64; "
        "begin it at another unit"
    )
    assert len(cut_at(Fan(12), example, "fan", "last").messages[2]) == 12
    assert cut_at(Fan(13), example, "fan").num_stages == 2
    with pytest.raises(RequestError, match=r"'last' on, is given a tensor of torch\.complex128"):
        cut_at(Fan(2, torch.complex128), example, "last")
