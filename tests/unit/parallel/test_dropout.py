"""Under every plan each dropout draws its part of the mask that one process draws."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.mesh import pretend_mesh
from shoal.core.plan import Plan
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, Split, SplitKind, Stack
from shoal.parallel.context.positions import Positions
from shoal.parallel.dropout import cut_again, narrow_dropouts, place_of
from shoal.randomness.dropout import DropoutKey, apply_keyed_dropout
from shoal.randomness.keyed import Window

torch.set_num_threads(1)
IDS = [5, 6, 7]
BATCH, LENGTH, WIDTH, FEATURES, HEADS = 3, 24, 6, 16, 4


class Attends(nn.Module):
    """Attention's own dropout, on (batch, heads, queries, keys)."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, 0.5, self.training)


class Block(nn.Module):
    """Every kind of place that a dropout can have in a block; each is given a tensor of ones to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attends()
        self.up = nn.Linear(WIDTH, FEATURES)
        self.between = nn.Dropout(0.5)
        self.after = nn.Dropout(0.5)
        self.channels = nn.Dropout1d(0.5)
        self.alpha = nn.AlphaDropout(0.5)

    def forward(self, stream: Tensor, features: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        found = {"attention": self.attention(weights)} if weights is not None else {}
        return found | {
            "between": self.between(features),
            "after": self.after(stream),
            "channels": self.channels(stream),
            "alpha": self.alpha(stream),
            "functional features": F.dropout(features, 0.5, self.training),
            "functional stream": F.dropout(stream, 0.5, self.training),
        }


class Model(nn.Module):
    """A dropout before, a block, and dropouts after, of which one has run before too."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Dropout(0.5)  # registered before the block, runs after it
        self.embedding = nn.Dropout(0.5)
        self.blocks = nn.ModuleList([Block()])

    def forward(
        self, whole: Tensor, stream: Tensor, features: Tensor, weights: Tensor | None, tail: Tensor
    ) -> dict[str, Tensor]:
        found = {"embedding": self.embedding(whole), "functional before": F.dropout(whole, 0.5, self.training)}
        found |= self.blocks[0](stream, features, weights)
        return found | {"tail": self.tail(tail), "functional after": F.dropout(tail, 0.5, self.training)}


def _analysis(sequence_dim: int = 1) -> ModuleAnalysis:
    return ModuleAnalysis(
        stacks=(Stack(blocks=("blocks.0",), sequence_dim=sequence_dim),),
        splits=(
            Split(path="blocks.0.attention.query", kind=SplitKind.COLUMN),
            Split(path="blocks.0.up", kind=SplitKind.COLUMN),
        ),
        attentions=(Heads(path="blocks.0.attention", num_heads=HEADS, num_kv_heads=HEADS, dropout=0.5),),
        split_dropouts={"blocks.0.between": -1},
        tail_is_pointwise=True,
    )


def _run(model: Model, key: DropoutKey, inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    for step in range(2):  # the first forward finds out that the model draws functionally
        key.begin(step, IDS)
        with key.drawing():
            found: dict[str, Tensor] = model(**inputs)
    return found


def _inputs(
    sequence_dim: int, *, stream: int, inside: int, features: int, heads: int | None, tail: int
) -> dict[str, Tensor | None]:
    def ones(length: int, width: int) -> Tensor:
        shape = (BATCH, length, width) if sequence_dim == 1 else (length, BATCH, width)
        return torch.ones(shape)

    weights = None if heads is None else torch.ones(BATCH, heads, LENGTH, LENGTH)
    return {
        "whole": ones(LENGTH, WIDTH),
        "stream": ones(stream, WIDTH),
        "features": ones(inside, features),
        "weights": weights,
        "tail": ones(tail, WIDTH),
    }


def _take(whole: Tensor, dim: int, positions: list[int]) -> Tensor:
    return whole.index_select(dim, torch.tensor(positions))


PLANS = ["tp=2", "tp=2 sp=true", "cp=2", "cp=3 cp_kind=alltoall", "cp=2 tp=2", "cp=2 tp=2 sp=true", "cp=2 tp=3 sp=true",
         "cp=2 cp_kind=alltoall tp=2 sp=true", "dp=2"]  # fmt: skip


@pytest.mark.parametrize("sequence_dim", [1, 0])
@pytest.mark.parametrize("text", PLANS)
def test_every_place_in_a_model_draws_its_part(text, sequence_dim):
    plan = Plan.parse(text)
    features, heads = (24, 6) if plan.tp == 3 else (FEATURES, HEADS)
    whole_model = Model()
    whole_key = apply_keyed_dropout(whole_model, 0)
    narrow_dropouts(whole_key, analysis=_analysis(sequence_dim), mesh=pretend_mesh(Plan()), plan=Plan())
    has_weights = plan.cp == 1  # attention dropout under cp is refused elsewhere
    whole = _run(whole_model, whole_key, _inputs(
        sequence_dim, stream=LENGTH, inside=LENGTH, features=features, heads=heads if has_weights else None, tail=LENGTH,
    ))  # fmt: skip
    for rank in range(plan.world_size):
        mesh = pretend_mesh(plan, rank)
        place = place_of(mesh, plan)
        # Independently of the code: the positions as lists, cut as the techniques cut tensors.
        local = list(range(LENGTH))
        if place.positions is not None:
            local = place.positions.select(LENGTH).tolist()
        stream = local
        if plan.sp:
            size = len(local) // plan.tp
            stream = local[place.tp_rank * size : (place.tp_rank + 1) * size]
        own = range(place.tp_rank * features // plan.tp, (place.tp_rank + 1) * features // plan.tp)
        own_heads = range(place.tp_rank * heads // plan.tp, (place.tp_rank + 1) * heads // plan.tp)

        model = Model()
        model.blocks[0].up = nn.Linear(WIDTH, features // plan.tp)  # what tensor parallelism leaves
        key = apply_keyed_dropout(model, 0)
        narrow_dropouts(key, analysis=_analysis(sequence_dim), mesh=mesh, plan=plan)
        part = _run(model, key, _inputs(
            sequence_dim, stream=len(stream), inside=len(local), features=features // plan.tp,
            heads=len(own_heads) if has_weights else None, tail=len(local),
        ))  # fmt: skip
        for name in ("embedding", "functional before"):
            assert torch.equal(part[name], whole[name]), name
        for name in ("after", "channels", "alpha", "functional stream"):
            assert torch.equal(part[name], _take(whole[name], sequence_dim, stream)), name
        for name in ("between", "functional features"):
            expected = _take(_take(whole[name], sequence_dim, local), -1, list(own))
            assert torch.equal(part[name], expected), name
        for name in ("tail", "functional after"):
            assert torch.equal(part[name], _take(whole[name], sequence_dim, local)), name
        if has_weights:
            assert torch.equal(part["attention"], _take(whole["attention"], 1, list(own_heads)))
        assert not key.foreign_draws()


@pytest.mark.parametrize(("degree", "tp"), [(2, 2), (3, 2), (2, 3), (4, 4)])
@pytest.mark.parametrize("kind", ["ring", "alltoall"])
def test_sequence_parallel_inside_context_parallel_is_finer_chunks(kind, degree, tp):
    length = 2 * degree * tp * 2
    for index, rank in itertools.product(range(degree), range(tp)):
        positions = Positions(kind=kind, rank=index, degree=degree)
        local = positions.select(length)
        chunks, of = cut_again(positions.chunks, positions.num_chunks, rank=rank, degree=tp)
        finer = torch.arange(length).chunk(of)
        assert torch.equal(torch.cat([finer[chunk] for chunk in chunks]), local.chunk(tp)[rank])


def test_a_stack_that_sequence_parallelism_leaves_whole_is_not_narrowed():
    model = Model()
    key = apply_keyed_dropout(model, 0)
    analysis = ModuleAnalysis(stacks=(Stack(blocks=("blocks.0",), sequence_dim=1, is_pointwise=False),))
    plan = Plan.parse("tp=2 sp=true")
    narrow_dropouts(key, analysis=analysis, mesh=pretend_mesh(plan, 1), plan=plan)
    assert all(not module.layout.windows for module in key._modules)


def test_one_process_is_not_narrowed_and_its_masks_are_what_they_were():
    config = GptConfig(name="gpt", layers=1, hidden=8, heads=2, kv_heads=2, dropout=0.5)
    torch.manual_seed(0)
    model = Gpt(config, vocab=8, sequence=4)
    tokens = torch.randint(8, (3, 4))

    def run(key: DropoutKey) -> Tensor:
        key.begin(0, IDS)
        with key.drawing():
            output: Tensor = model(tokens)
        return output

    expected = run(apply_keyed_dropout(model, 0))
    key = apply_keyed_dropout(model, 0)
    analysis = ModuleAnalysis(stacks=(Stack(blocks=("blocks.0",), sequence_dim=1),), tail_is_pointwise=True)
    narrow_dropouts(key, analysis=analysis, mesh=pretend_mesh(Plan()), plan=Plan())
    assert torch.equal(run(key), expected)
    assert not key._functional.layouts


def test_the_windows_are_these():
    """By hand, rank 3 of cp=2 tp=2 sp=true: the second context rank has chunks 1 and 2 of 4, its second half is chunk 2."""
    plan = Plan.parse("cp=2 tp=2 sp=true")
    place = place_of(pretend_mesh(plan, 3), plan)
    assert place.stream(1, is_cut=True) == (Window(1, (4, 5), 8),)
    assert place.stream(1, is_cut=False) == (Window(1, (1, 2), 4),)
    assert place.share(-1) == (Window(-1, (1,), 2),)
