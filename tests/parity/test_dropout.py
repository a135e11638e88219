"""Dropout on, of every kind, under plans that split a tensor: real processes against one, with and without recompute.

A mask that differs anywhere moves gradients by a tenth of their size; arithmetic in another order moves them by 1e-16.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.full_tensor import take_local
from shoal.comm.mesh import build_mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig, SplitKind
from shoal.parallel.context.apply import apply_context_parallel
from shoal.parallel.dropout import narrow_dropouts
from shoal.parallel.recompute import apply_recompute
from shoal.parallel.tensor.apply import apply_tensor_parallel
from shoal.randomness.dropout import DropoutKey, apply_keyed_dropout
from shoal.testing.ranks import run_on_ranks

BATCH, LENGTH, WIDTH = 3, 16, 16
IDS = [11, 4, 2**35]


class Attends(nn.Module):
    """A user's attention, with dropout on its weights and on its result, both functional."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        p = 0.2 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=p).transpose(1, 2).flatten(2)
        return F.dropout(self.out(mixed), 0.2, self.training)


class Feeds(nn.Module):
    """A user's feed-forward, with functional dropout on split features and on the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.gelu(self.up(x)), 0.2, self.training)
        return F.dropout(self.down(x), 0.2, self.training)


class Block(nn.Module):
    """Both, behind norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attends = nn.LayerNorm(WIDTH), Attends()
        self.norm2, self.feeds = nn.LayerNorm(WIDTH), Feeds()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attends(self.norm1(x))
        output: Tensor = x + self.feeds(self.norm2(x))
        return output


class Functional(nn.Module):
    """Not one nn.Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2, self.training)
        for block in self.blocks:
            x = block(x)
        return F.dropout(x, 0.2, self.training)


def _case(name: str) -> tuple[nn.Module, Tensor, ModuleAnalysis]:
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    model: nn.Module
    if name == "functional":
        model = Functional()
    elif name == "gpt":
        config = GptConfig(name="gpt", layers=2, hidden=WIDTH, heads=4, kv_heads=2, dropout=0.2)
        model, x = Gpt(config, vocab=32, sequence=LENGTH), torch.randint(32, (BATCH, LENGTH))
    else:
        first = name == "encoder"
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 3 * WIDTH, dropout=0.2, batch_first=first)
        model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), x if first else x.transpose(0, 1)
    model = model.double()
    analysis = analyse_module(model, (x,), ParallelConfig())
    whole = (SplitKind.LOGITS, SplitKind.VOCABULARY)
    analysis = replace(analysis, splits=tuple(split for split in analysis.splits if split.kind not in whole))
    return model, x, analysis


def _gradients(model: nn.Module, key: DropoutKey, x: Tensor, positions: Tensor | None, dim: int) -> dict[str, Tensor]:
    """Two microbatches: the first finds out what is drawn, the second knows."""
    for call in range(2):
        key.begin(call, IDS)
        with key.drawing():
            output = model(x)
        torch.manual_seed(call)
        shape = list(output.shape)
        shape[dim] = LENGTH  # of the whole, whatever this rank has of it
        weights = torch.randn(shape, dtype=torch.float64)
        if positions is not None:
            weights = weights.index_select(dim, positions)
        (output * weights).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def one_process(name: str) -> dict[str, Tensor]:
    model, x, analysis = _case(name)
    # No part of parallel/: the shape of what a dropout sees is enough.
    return _gradients(model, apply_keyed_dropout(model, 7), x, None, analysis.stacks[0].sequence_dim or 0)


def worst_error(world: World, name: str, text: str, mutant: str = "") -> tuple[float, str]:
    """This rank's largest relative error of a gradient, and whose it is."""
    torch.set_num_threads(1)
    expected = one_process(name)
    plan = Plan.parse(text)
    mesh = build_mesh(world, plan)
    model, x, analysis = _case(name)
    key = apply_keyed_dropout(model, 7)
    placements: dict[str, Any] = {}
    partial: frozenset[str] = frozenset()
    if mesh.has(Axis.TENSOR):
        layout = apply_tensor_parallel(model, analysis=analysis, mesh=mesh, sequence_parallel=plan.sp)
        placements, partial = dict(layout.placements), frozenset(layout.partial)
    context = None
    if mesh.has(Axis.CONTEXT):
        context = apply_context_parallel(model, analysis=analysis, mesh=mesh, kind=plan.cp_kind)
    if mutant != "not narrowed":
        narrow_dropouts(key, analysis=analysis, mesh=mesh, plan=plan)
    if plan.recompute != "none":
        apply_recompute(model, analysis=analysis, mode=plan.recompute, dropout=key)  # type: ignore[arg-type]
    positions = context.positions(LENGTH) if context is not None and context.keeps_local else None
    found = _gradients(model, key, x, positions, analysis.stacks[0].sequence_dim or 0)
    assert not key.foreign_draws(), key.foreign_draws()
    errors = []
    total = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for parameter in sorted(found):
        gradient = found[parameter].contiguous()
        if parameter in partial:
            gradient = mesh.channel(Axis.TENSOR).all_reduce_(gradient)
        if context is not None:
            gradient = mesh.channel(Axis.CONTEXT).all_reduce_(gradient)
        whole = expected[parameter]
        local = take_local(whole, placements[parameter]) if parameter in placements else whole
        # The law's rule: a gradient that is nothing but rounding (a key's bias, to which softmax is blind) is bounded absolutely.
        is_noise = float(whole.norm()) < 10 * torch.finfo(whole.dtype).eps * total
        errors.append((float((gradient - local).norm()) / (total if is_noise else float(whole.norm())), parameter))
    return max(errors)


def two_ranks(world: World) -> dict[tuple[str, ...], tuple[float, str]]:
    cases = [
        ("gpt", "tp=2"),
        ("gpt", "tp=2 sp=true recompute=selective"),
        ("gpt", "cp=2 recompute=full"),
        ("gpt", "cp=2 cp_kind=alltoall"),
        ("functional", "tp=2 recompute=full"),
        ("functional", "tp=2 sp=true recompute=selective"),
        ("encoder", "tp=2 recompute=selective"),
        ("encoder", "tp=2 sp=true"),
        ("sequence first", "tp=2 sp=true recompute=full"),
        ("gpt", "tp=2 sp=true", "not narrowed"),
        ("functional", "tp=2", "not narrowed"),
        ("encoder", "tp=2", "not narrowed"),
        ("gpt", "cp=2", "not narrowed"),
    ]
    return {case: worst_error(world, *case) for case in cases}


def four_ranks(world: World) -> dict[tuple[str, ...], tuple[float, str]]:
    cases = [
        ("gpt", "cp=2 tp=2 sp=true recompute=full"),
        ("gpt", "cp=2 cp_kind=alltoall tp=2 sp=true recompute=selective"),
        ("functional", "tp=2 dp=2 sp=true"),
    ]
    return {case: worst_error(world, *case) for case in cases}


@pytest.fixture(scope="module")
def results() -> list[dict[tuple[str, ...], tuple[float, str]]]:
    return run_on_ranks(two_ranks, 2, deadline_seconds=110)


def test_every_plan_drops_what_one_process_drops(results):
    for found in results:
        for case, (error, name) in found.items():
            assert len(case) == 3 or error <= 1e-12, (case, error, name)


def test_masks_that_are_not_narrowed_are_caught(results):
    for found in results:
        for case, (error, _) in found.items():
            assert len(case) == 2 or error > 1e-3, (case, error)


@pytest.mark.soak
def test_finer_chunks_on_four_ranks():
    for found in run_on_ranks(four_ranks, 4, deadline_seconds=110):
        for case, (error, name) in found.items():
            assert error <= 1e-12, (case, error, name)
