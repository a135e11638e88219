"""The chain of a recipe: shapes by the data, cuts by what is found in the model, the loss with the last link."""

from pathlib import Path

import pytest
import torch

from shoal.core.errors import RequestError
from shoal.costs.layers import LayerKind, ModelCosts, OpKind, TensorSplit
from shoal.costs.saved import measure_saved
from shoal.data.check import check_data
from shoal.data.spec import DataSpec
from shoal.engine.parallelize import analyse
from shoal.optim.precision import Precision
from shoal.parallel.analysis.structure import SplitKind
from shoal.parallel.requirements import describe_facts
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe, load_recipe
from shoal.trainer.own_parts import OwnPartsHere
from shoal.tuning.planned_model import costs_of

RECIPES = Path(__file__).parents[3] / "recipes"


def load(name: str, *changes: str) -> tuple[Recipe, DataSpec]:
    recipe = load_recipe(RECIPES / f"{name}.toml", changes)
    spec = check_data(recipe.data).spec or OwnPartsHere().measure_data(recipe).spec
    assert spec is not None
    return recipe, spec


def kept_bytes(chain: ModelCosts) -> float:
    return sum(layer.kept.whole + layer.kept.split + layer.kept.scores for layer in chain.layers)


CASES = {
    "tiny": ("tiny", "model.layers=6"),
    "tied": ("tiny", "model.tied=true"),
    "bfloat16": ("tiny", 'train.precision="bfloat16"'),
    "digits": ("digits",),
    "reverse": ("reverse", "model.layers=4"),
    "mlp": ("digits", 'model={name="mlp", layers=4}'),
    "regression": (
        "digits",
        'model={name="mlp", layers=4}',
        'data={source="synthetic", kind="regression", samples=64}',
        'train.batch_norm="local"',
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_keeps_what_its_run_keeps(name):
    recipe, spec = load(*CASES[name])
    chain = costs_of(recipe, spec)
    model, loss, data = build_parts(recipe)
    precision = Precision.named(recipe.train.precision)
    model.train()
    counts = []
    for num_samples in (4, 8):
        items = data.train.collate(range(num_samples))
        inputs = [precision.cast_input(tensor) for tensor in items.inputs]
        # The targets of a text are its inputs moved by one; the loss makes a copy of such a view, of 8 bytes a token.
        targets = precision.cast_input(items.targets).contiguous()
        with measure_saved(model, *inputs, targets) as saved, precision.autocast("cpu"):
            result = loss(model(*inputs), targets)
        counts.append(saved.num_bytes)
        del result
    assert kept_bytes(chain) == (counts[1] - counts[0]) / 4
    assert chain.weights == sum(parameter.numel() for parameter in model.parameters())
    assert chain.tokens == data.spec.tokens_per_sample


@pytest.mark.parametrize("name", CASES)
def test_cuts_are_those_that_are_found_in_the_model(name):
    recipe, spec = load(*CASES[name])
    chain = costs_of(recipe, spec)
    model, _, data = build_parts(recipe)
    analysis = analyse(model, data, recipe.parallel)
    facts = describe_facts(analysis, model)
    cut = {split.path: split.kind for split in analysis.splits}
    weights = {id(p): p for path in cut for p in model.get_submodule(path).parameters() if p.ndim > 1}
    biases = [
        model.get_submodule(path).bias
        for path, kind in cut.items()
        if kind in (SplitKind.COLUMN, SplitKind.LOGITS) and getattr(model.get_submodule(path), "bias", None) is not None
    ]
    split = sum(p.numel() for p in weights.values()) + sum(bias.numel() for bias in biases)
    assert sum(layer.split_weights for layer in chain.layers) == split
    blocks = [block for stack in analysis.stacks for block in stack.blocks]
    assert [layer.name for layer in chain.layers if layer.kind is LayerKind.BLOCK] == blocks
    num_tables = sum(kind is SplitKind.VOCABULARY for kind in cut.values())
    assert sum(layer.num_pairs for layer in chain.layers) == facts.num_pairs + num_tables
    assert facts.heads == (((chain.heads, chain.kv_heads),) if chain.heads else ())


def test_a_recipe_whose_model_fits_nowhere():
    """Neither the 175 billion weights nor one block's are allocated."""
    sizes = ("model.layers=96", "model.hidden=12288", "model.heads=96", "model.kv_heads=96", "data.sequence=2048")
    chain = costs_of(*load("tiny", *sizes))
    assert chain.num_blocks == 96 and chain.weights > 1.7e11
    assert chain.numbers == (0, *[1] * 96, 2)
    assert {layer.num_pairs for layer in chain.layers if layer.kind is LayerKind.BLOCK} == {2}
    assert all(
        op.cut is not TensorSplit.NOTHING
        for layer in chain.layers
        for op in layer.ops
        if op.kind in (OpKind.MATMUL, OpKind.ATTENTION)
    )


OWN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.asks = asks

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if self.asks and x.mean() > 1e9:
            x = -x
        return self.head(x)


def build():
    return Net(asks=False)


def build_asking():
    return Net(asks=True)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    data = 'data={source="synthetic", kind="classes", samples=64, features=[8], classes=3}'

    def load_own(build: str) -> tuple[Recipe, DataSpec]:
        return load("digits", f'model={{build="own_net:{build}"}}', data, 'train.batch_norm="local"')

    return load_own


def test_the_users_own_module(own):
    chain = costs_of(*own("build"))
    assert [layer.name for layer in chain.layers] == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert [layer.num_pairs for layer in chain.layers] == [1, 1, 1, 1, 0]
    assert chain.layers[0].split_weights == 2 * 8 * 32 + 32


def test_a_module_that_looks_at_values_is_refused(own):
    with pytest.raises(RequestError, match=r"Net fails at aten\._local_scalar_dense.*\[planner\.shape\]"):
        costs_of(*own("build_asking"))


def test_nothing_is_drawn():
    recipe, spec = load("tiny")
    state = torch.random.get_rng_state()
    costs_of(recipe, spec)
    assert torch.equal(torch.random.get_rng_state(), state)
