"""What a rank keeps of a module that was cut: weights, their names, and what others make of it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.parallel.zero.layout import lay_out
from shoal.pipeline.build import RankPart, Stages
from shoal.pipeline.stand_in import Absent
from shoal.schedules.catalogue import make_schedule
from support.pipeline.cut_modules import D, cut_at, gpt, tokens
from support.pipeline.stages_on_ranks import batch


def stored_bytes(model):
    """Of parameters, whether found by the module's own bookkeeping or hidden in an ``Absent``."""
    storages, seen = {}, [model]
    while seen:
        module = seen.pop()
        seen += [child.__dict__["unit"] if isinstance(child, Absent) else child for child in module._modules.values()]
        held = [
            *module._parameters.values(),
            *(value for value in module.__dict__.values() if isinstance(value, Tensor)),
        ]
        for tensor in held:
            if tensor is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def test_keeping_a_stage_frees_the_others():
    model = gpt()
    block = sum(parameter.nbytes for parameter in model.blocks[1].parameters())
    num_parameters = len(list(model.parameters()))
    before = stored_bytes(model)
    chain = cut_at(model, batch("gpt", 0)[0], "blocks.1", "norm")
    own = chain.keep({1})
    assert before == sum(parameter.nbytes for parameter in gpt().parameters())
    # What was let go of has one number per parameter left.
    assert block <= stored_bytes(model) <= block + 4 * num_parameters < before
    assert (
        {*own}
        == {name for name, _ in model.named_parameters()}
        == {*dict(gpt().blocks.named_parameters("blocks"))}
        - {name for name, _ in gpt().blocks[0].named_parameters("blocks.0")}
    )
    assert all(parameter.requires_grad for parameter in own.values())


def test_a_tied_weight_stays_with_all_its_holders():
    model, example = gpt(), batch("gpt", 0)[0]
    chain = cut_at(model, example, "blocks.1", "norm")
    assert chain.holders()["embedding.weight"] == {0, 2}
    own = chain.keep({2})
    assert {*own} == {"embedding.weight", "norm.weight"}
    assert model.head.weight is own["embedding.weight"] and not own["embedding.weight"].isnan().any()


def assert_names_are_those_of_the_whole(whole, chain, stages):
    """What a rank shows is the whole's, less what others hold: first names in order, and all names to a checkpoint."""
    own = chain.keep(stages)
    first = [name for name, _ in whole.named_parameters() if name in own]
    assert [name for name, _ in chain.model.named_parameters()] == list(own) == first
    every = {name: id(tensor) for name, tensor in whole.named_parameters(remove_duplicate=False)}
    held = {every[name] for name in own}
    expected = [name for name, number in every.items() if number in held]
    saved = chain.model.state_dict()
    assert [name for name in saved if name in every] == expected
    for name, tensor in saved.items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


@pytest.mark.parametrize("stage", [0, 1])
def test_a_tied_weight_keeps_its_names_on_every_rank_that_holds_it(stage):
    whole = gpt()
    chain = cut_at(copy.deepcopy(whole), batch("gpt", 0)[0], "blocks.1")
    assert_names_are_those_of_the_whole(whole, chain, {stage})
    assert "embedding.weight" in dict(chain.model.named_parameters())


class ReadsOutside(nn.Module):
    """Its output layer is the embedding's weight, read where no module runs; and a weight that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(D), requires_grad=False)
        self.same_scale = self.scale
        self.idle = nn.Parameter(torch.ones(D))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x * self.same_scale, self.embedding.weight)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_weight_that_is_read_outside_its_module_is_held_where_it_is_read(stage):
    torch.manual_seed(0)
    whole = ReadsOutside()
    chain = cut_at(copy.deepcopy(whole), tokens(0), "blocks.1")
    held = chain.holders()
    assert held["embedding.weight"] == {0, 1} and held["scale"] == {1} and held["idle"] == {0}
    sent = chain.run(0, tokens(1))
    assert_names_are_those_of_the_whole(whole, chain, {stage})
    assert not chain.model.scale.requires_grad
    if stage == 1:
        assert torch.equal(chain.run(1, tokens(1), sent), whole(*tokens(1)))


def test_an_absent_unit_shows_what_the_unit_is_like_and_has_no_weights():
    model = gpt()
    block = model.blocks[0]
    block.kind = "full"
    cut_at(model, batch("gpt", 0)[0], "blocks.1").keep({1})
    absent = model.blocks[0]
    assert isinstance(absent, Absent) and absent.kind == "full" and absent.attention is block.attention
    assert not list(absent.parameters()) and not absent.state_dict()
    with pytest.raises(AttributeError, match="nothing"):
        absent.nothing  # noqa: B018


@pytest.mark.parametrize("stage", [0, 1])
def test_zero_lays_out_what_a_rank_has_kept(stage):
    """The analysis still names the blocks of other ranks; they have no unit and are not visited."""
    example = batch("gpt", 0)[0]
    model = gpt()
    analysis = analyse_module(model, example, ParallelConfig())
    chain = cut_at(model, example, "blocks.1")
    own = chain.keep({stage})
    layout = lay_out(model, analysis, 2)
    assert {slot.name for unit in layout.units for slot in unit.slots} == own.keys()
    # On the last rank the tied weight has no module of its first name: it is the root's, which is there throughout.
    expected = {0: [["embedding"], ["embedding", "blocks.0"]], 1: [["blocks.1"], ["", "blocks.1"]]}[stage]
    blocks = [visit.path for visit in layout.visits]
    assert [path for path in blocks if path != "blocks.0"] == expected[0]
    assert [unit.path for unit in layout.units] == expected[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_is_cut_by_names_as_the_rank_itself_was(rank):
    """A prediction lays out this copy: modules, names and order must be those of the stage that trains."""
    example = batch("gpt", 0)[0]
    chain = cut_at(gpt(), example, "blocks.1")
    stages = Stages(units=chain.units, starts=chain.starts, schedule=make_schedule("1f1b", ranks=2, microbatches=2))
    own, copied = chain.keep({rank}), gpt()
    RankPart(elsewhere=stages.elsewhere(rank), names=frozenset(own)).cut(copied)
    for look in (nn.Module.named_modules, nn.Module.named_parameters):
        assert [(name, type(found)) for name, found in look(copied)] == [(n, type(f)) for n, f in look(chain.model)]
    assert list(copied.state_dict()) == list(chain.model.state_dict())
