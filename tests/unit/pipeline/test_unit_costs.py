"""Work that is counted: by hand for small modules, beside a clock for shipped ones, and alike in every process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.core.errors import RequestError
from shoal.data.spec import DataSpec
from shoal.models.build import build_model
from shoal.models.config import GptConfig, MlpConfig
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig
from shoal.pipeline.unit_costs import OPERATIONS_PER_BYTE, OPERATIONS_PER_SECOND, estimate_work, measure_costs
from shoal.pipeline.units import find_units
from support.pipeline.stages_on_ranks import batch, build


def work_of(model, example):
    """Operations of each unit in a forward pass, by path."""
    units = find_units(model, example, analyse_module(model, example, ParallelConfig()))
    costs = estimate_work(model, units, example)
    return {cost.path: round(cost.seconds * OPERATIONS_PER_SECOND / 3) for cost in costs}


def test_products_count_by_their_operations_and_the_rest_by_bytes():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    # An activation that is read and one that is written; a view is free.
    relu = OPERATIONS_PER_BYTE * 2 * 4 * 16 * 4
    assert work_of(model, (torch.randn(4, 8),)) == {"0": 2 * 4 * 8 * 16, "1": relu, "2": 0, "3": 2 * 4 * 16 * 2}


class Attending(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x[..., :6, :], x[..., :6, :])


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(64, 64, num_layers=2)

    def forward(self, x):
        return self.cells(x)[0]


def test_attention_and_recurrent_layers_count_as_the_products_that_they_are():
    attention = work_of(nn.Sequential(nn.Identity(), Attending()), (torch.randn(2, 3, 10, 4),))
    # Ten queries, six keys: scores over four features, and sums of values with four.
    assert attention["1"] == 2 * 2 * 3 * 10 * 6 * (4 + 4)
    recurrent = work_of(nn.Sequential(nn.Identity(), Cells()), (torch.randn(16, 8, 64),))
    gates = 4 * 64
    products = 2 * 16 * 8 * 2 * gates * (64 + 64)
    assert products <= recurrent["1"] < 1.5 * products


def test_blocks_of_one_kind_cost_the_same_and_work_grows_with_the_batch():
    shape = DataSpec(kind="tokens", vocab=65, sequence=16)
    model = build_model(GptConfig(layers=3, hidden=32, heads=4, dropout=0.1), shape)
    small, large = (work_of(model, (torch.randint(0, 65, (size, 16)),)) for size in (2, 4))
    assert small["blocks.0"] == small["blocks.1"] == small["blocks.2"]
    assert 1.9 * small["blocks.0"] < large["blocks.0"] < 2 * small["blocks.0"]
    assert small["embedding_dropout"] < small["blocks.0"] / 4


@pytest.mark.parametrize("kind", ["gpt", "tied gpt", "cnn", "mlp"])
def test_what_is_held_is_what_a_measurement_finds(kind):
    if kind == "mlp":
        model = build_model(MlpConfig(layers=3, hidden=8), DataSpec(kind="classes", features=(8, 8), classes=10))
        example = (torch.randn(4, 8, 8),)
    else:
        model, example = build(kind), batch(kind, 0)[0]
    units = find_units(model, example, analyse_module(model, example, ParallelConfig()))
    found = [
        [(cost.path, cost.weight_bytes, cost.activation_bytes, cost.can_start, cost.boundary_bytes) for cost in costs]
        for costs in (estimate_work(model, units, example), measure_costs(model, units, example))
    ]
    assert found[0] == found[1] and sum(held for _, _, held, _, _ in found[0]) > 0


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_hugging_face_models_cost_what_their_blocks_cost(name):
    transformers = pytest.importorskip("transformers")
    from support.models import hugging_face as hugging_face_cases

    make = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM"}[name]
    model = getattr(transformers, make)(getattr(hugging_face_cases, f"{name}_config")())
    work = work_of(model, (torch.randint(0, hugging_face_cases.VOCAB, (2, 16)),))
    blocks = [count for path, count in work.items() if path.endswith((".0", ".1"))]
    assert len(blocks) == 2 and blocks[0] == blocks[1] > 0.3 * sum(work.values())


PRINTED = """
import torch
from support.pipeline.stages_on_ranks import batch, build
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.parallel.analysis.analyse import analyse_module
from shoal.pipeline.unit_costs import estimate_work
from shoal.pipeline.units import find_units
for kind in ("gpt", "cnn"):
    model, example = build(kind), batch(kind, 0)[0]
    print(estimate_work(model, find_units(model, example, analyse_module(model, example, ParallelConfig())), example))
"""


@pytest.mark.soak
def test_every_process_counts_the_same():
    tests = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path]), "PYTHONHASHSEED": "5"}
    environment["OMP_NUM_THREADS"] = "2" if torch.get_num_threads() == 1 else "1"
    command = [sys.executable, "-c", PRINTED]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment).stdout
    own = ""
    for kind in ("gpt", "cnn"):
        model, example = build(kind), batch(kind, 0)[0]
        units = find_units(model, example, analyse_module(model, example, ParallelConfig()))
        own += f"{estimate_work(model, units, example)}\n"
    assert own == other


class Discarding(nn.Module):
    """Saves something for a result that nobody wants: its memory is free again, and the next tensor may get it."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.one(x)
        for _ in range(20):
            (y * 2).sin()
        return self.two(y)


def test_memory_that_is_used_again_is_counted_again():
    model, example = Discarding(), (torch.randn(256, 64),)
    costs = estimate_work(model, find_units(model, example, ModuleAnalysis()), example)
    stream = 256 * 64 * 4
    # The input and what sin was given, twenty times; the second layer keeps its input, which is new.
    assert [cost.activation_bytes for cost in costs] == [21 * stream, stream]


class Compiled(nn.Module):
    """As flex_attention is: it runs, but not where somebody looks."""

    def forward(self, x):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("no mode here\nand a long story")
        return x


def test_a_module_whose_work_torch_cannot_show_is_refused_with_the_fix():
    with pytest.raises(RequestError) as refused:
        work_of(nn.Sequential(nn.Linear(4, 4), Compiled()), (torch.randn(2, 4),))
    assert str(refused.value) == (
        "the work of the module cannot be counted: no mode here; name the places in pipeline.stages, or set "
        'pipeline.balance = "measured"'
    )


def test_counting_leaves_nothing_behind():
    model, example = build("cnn").eval(), batch("cnn", 0)[0]
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    seed = torch.get_rng_state()
    work_of(model, example)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), seed) and not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
