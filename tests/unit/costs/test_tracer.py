"""A look at a module leaves nothing behind."""

import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from shoal.costs.repeats import expand, repeating
from shoal.costs.tracer import Call, Level, ModuleReturn, Saved, Tracer, preserved_state, tensors_in
from shoal.telemetry.rngstate import keeping_draws


def draws():
    return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()


def test_what_is_drawn_inside_moves_no_generator():
    model = nn.Linear(2, 2)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for look in (keeping_draws(), preserved_state(model, training=True)):
        with look:
            inside = draws()
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert draws() == inside, "the next draws are those that the look had"
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def test_modes_and_buffers_are_as_before():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    model[1].eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with preserved_state(model, training=True):
        assert model[1].training
        model(torch.rand(4, 2))
    assert model[0].training and not model[1].training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class Tied(nn.Module):
    """A table that is read by its own module and by its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens):
        hidden = self.mix(self.table(tokens))
        return hidden.reshape(-1, hidden.shape[-1]) @ self.table.weight.T


def test_a_record_says_which_tensor_it_was():
    model = Tied()
    tracer = Tracer(model, level=Level.FUNCTIONS)
    tracer.run([torch.zeros(2, 3, dtype=torch.int64)])
    calls = [event for event in tracer.record.events if isinstance(event, Call)]
    product = next(call for call in calls if call.name in ("matmul", "__matmul__"))
    hidden, turned = tensors_in(product.args)
    assert turned.storage == tracer.record.parameters["table.weight"].storage and turned.shape == (8, 16)
    assert turned != tracer.record.parameters["table.weight"], "a view is another tensor in the same storage"
    assert product.path == "" and product.output == tracer.record.output
    returned = next(event for event in tracer.record.events if isinstance(event, ModuleReturn) and event.path == "mix")
    assert hidden.storage == returned.output.storage


def test_a_record_keeps_no_memory_and_gives_no_number_twice():
    class Loop(nn.Module):
        def forward(self, x):
            for _ in range(20):
                x = x * 2  # Each result is freed before the next but one is made, so addresses come again.
            return x

    kept = []
    tracer = Tracer(Loop(), level=Level.OPERATIONS)
    output = tracer.run([torch.ones(1000)])
    kept.append(weakref.ref(output))
    del output
    assert kept[0]() is None
    made = [event.output for event in tracer.record.events if isinstance(event, Call)]
    assert len({tensor.number for tensor in made}) == len({tensor.storage for tensor in made}) == 20


def test_an_opaque_module_is_one_call_and_its_hooks_are_not_in_it():
    model = Tied()
    model.mix.register_forward_hook(lambda module, args, output: output * 2)
    tracer = Tracer(model, level=Level.FUNCTIONS, opaque=lambda module: isinstance(module, nn.Linear))
    tracer.run([torch.zeros(2, 3, dtype=torch.int64)])
    inside = [event for event in tracer.record.events if isinstance(event, Call) and event.path == "mix"]
    assert [(call.name, call.func is None) for call in inside] == [("forward", True), ("mul", False)]


def test_sizes_are_given_out_by_the_reader():
    asked = []

    def on_size(tensor, dim):
        asked.append((tensor.shape, dim))
        return tensor.shape[dim]

    Tracer(Tied(), level=Level.FUNCTIONS, on_size=on_size).run([torch.zeros(2, 3, dtype=torch.int64)])
    assert ((2, 3, 8), 2) in asked


def test_what_is_saved_and_where_it_failed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tracer = Tracer(model, saved=True)
    tracer.run([torch.ones(2, 4)])
    saved = [event.tensor.shape for event in tracer.record.events if isinstance(event, Saved)]
    assert saved.count((2, 4)) == 3, "the input, and what tanh gave: once for itself and once for the layer after it"
    with pytest.raises(RuntimeError):
        tracer.run([torch.ones(2, 5)])
    assert tracer.record.running == ["", "0"]


class Blocks(nn.Module):
    """Blocks that all read one table, the first of which makes it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(count)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_repeated_block_is_as_if_it_had_run():
    model = Blocks(7)

    def events(repeated):
        tracer = Tracer(model, level=Level.OPERATIONS, saved=True)
        with repeating(tracer, [f"blocks.{number}" for number in range(7)] if repeated else []):
            tracer.run([torch.ones(2, 8)])
        found, numbers = [], {}
        for event in expand(tracer.record):
            fields = [getattr(event, name) for name in ("args", "kwargs", "output", "tensor") if hasattr(event, name)]
            tensors = [
                (tensor.shape, numbers.setdefault(tensor.storage, len(numbers))) for tensor in tensors_in(fields)
            ]
            found.append((type(event), getattr(event, "path", None), tensors))
        return found, len(tracer.record.events)

    (whole, _), (expanded, num_recorded) = events(False), events(True)
    assert expanded == whole
    assert num_recorded < len(whole)
