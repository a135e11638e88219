"""Where stages begin: the recipe's places, and balanced ones under a bound of memory, the same on every rank."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.pipeline import stages as choose
from shoal.pipeline.build import Stages, prove_stages
from shoal.pipeline.config import PipelineConfig
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.split import UnitCost
from shoal.pipeline.stages import choose_starts, stage_memory
from shoal.pipeline.unit_costs import estimate_work
from shoal.pipeline.units import find_units
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.csv_file import read_csv
from shoal.schedules.player import peak_activations, peak_activations_by_stage

EXAMPLE = (torch.randn(2, 8),)


def line(name="1f1b", ranks=2, microbatches=4, chunks=None):
    return make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)


def model_of(*widths: int):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, after) for width, after in pairwise(widths)))


def starts_of(model, schedule, example=EXAMPLE, **given):
    config = PipelineConfig(**{key: given.pop(key) for key in list(given) if key in PipelineConfig.model_fields})
    return choose_starts(
        model, find_units(model, example, ModuleAnalysis()), example, schedule=schedule, config=config, **given
    )


EVEN = model_of(8, 8, 8, 8, 8)
"""Four layers alike."""


def test_the_recipes_own_places_are_taken_and_nothing_is_run(monkeypatch):
    monkeypatch.delattr(choose, "estimate_work")
    assert starts_of(EVEN, line(), stages=["3"]) == (0, 3)
    assert starts_of(EVEN, line(ranks=3), stages=["0", "1", "3"]) == (0, 1, 3)
    assert starts_of(EVEN, line("interleaved", 2, 4, 2), stages=["1", "2", "3"]) == (0, 1, 2, 3)


def test_a_stage_of_several_ranks_gets_as_many_times_the_work():
    def turns(*replicas):
        return make_schedule("1f1b", ranks=sum(replicas), microbatches=4, replicas=replicas)

    assert starts_of(EVEN, turns(3, 1)) == (0, 3) and starts_of(EVEN, turns(1, 3)) == (0, 1)
    assert starts_of(EVEN, turns(2, 2)) == (0, 2) and starts_of(EVEN, turns(1, 2, 1)) == (0, 1, 3)
    assert starts_of(EVEN, turns(3, 1), stages=["1"]) == (0, 1), "what the recipe names is taken"


@pytest.mark.parametrize(
    ("schedule", "stages", "message"),
    [
        (make_schedule("1f1b", ranks=4, microbatches=4, replicas=(2, 1, 1)), ["2"], "pipeline.stages names 1 place after "
         "the first, which makes 2 stages, and replicas=2-1-1 has 3; name 2, or leave pipeline.stages out"),
        (line(ranks=4), ["2"], "pipeline.stages names 1 place after the first, which makes 2 stages, and pp=4 has 4; "
         "name 3, or leave pipeline.stages out"),
        (line(), ["0", "1", "2"], "pipeline.stages names 2 places after the first, which makes 3 stages, and pp=2 has 2; "
         "name 1, or leave pipeline.stages out"),
        (line(), ["0"], "pipeline.stages names 0 places after the first, which makes 1 stage, and pp=2 has 2; "
         "name 1, or leave pipeline.stages out"),
        (line("interleaved", 2, 4, 2), ["2"], "pipeline.stages names 1 place after the first, which makes 2 stages, and "
         "pp=2 with 2 chunks has 4; name 3, or leave pipeline.stages out"),
        (line(), ["4"], "pipeline.stages: '4' is no place where a stage can begin; places are such as '0', '1', '2'"),
    ],
)  # fmt: skip
def test_places_that_do_not_make_the_schedules_stages_are_refused_with_both_numbers(schedule, stages, message):
    with pytest.raises(RequestError) as refused:
        starts_of(EVEN, schedule, stages=stages)
    assert str(refused.value) == message


def test_stages_are_balanced_by_work_and_not_by_their_number():
    assert starts_of(EVEN, line()) == (0, 2)
    assert starts_of(model_of(8, 8, 8, 8, 8, 64), line()) == (0, 4)
    assert starts_of(EVEN, line("zbv", 2, 4)) == (0, 1, 2, 3)


def test_more_stages_than_places_are_refused_with_pp_and_chunks():
    with pytest.raises(RequestError, match=r"pp=5 wants 5 stages, and the module can be cut at 3 places .* lower pp$"):
        starts_of(EVEN, line(ranks=5))
    with pytest.raises(RequestError, match=r"pp=4 with 2 chunks wants 8 stages, .*which makes 4; lower pp or chunks"):
        starts_of(EVEN, line("interleaved", 4, 4, 2))


class Twice(nn.Module):
    """The middle of it is called twice, so no stage begins there."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.middle(self.middle(self.middle(self.first(x)))))


def test_a_module_that_is_called_twice_begins_no_stage():
    assert starts_of(Twice(), line()) == (0, 4)


def test_measured_costs_are_agreed_on_and_estimated_ones_need_not_be(monkeypatch):
    def measured(model, units, example):
        # This rank finds the first layer slow; the first rank found another.
        return tuple(
            UnitCost(path=unit.path, seconds=9.0 if place == 0 else 1.0, weight_bytes=1, activation_bytes=1, can_start=True)
            for place, unit in enumerate(units)
        )  # fmt: skip

    monkeypatch.setattr(choose, "measure_costs", measured)
    given = []

    def agree(starts):
        given.append(tuple(starts))
        return [0, 3]

    assert starts_of(EVEN, line(), balance="measured", agree=agree) == (0, 3)
    assert starts_of(EVEN, line(), balance="measured") == (0, 1)
    assert starts_of(EVEN, line(), agree=agree) == (0, 2)
    assert given == [(0, 1)]


def test_a_real_measurement_gives_a_cut():
    starts = starts_of(EVEN, line(), balance="measured")
    assert starts[0] == 0 and starts[1] in (1, 2, 3)


WEIGHT, KEPT = (8 * 8 + 8) * 4, 2 * 8 * 4
"""Bytes of a layer of EVEN, and of what it keeps of the example."""


def test_versions_of_weights_move_the_cut():
    # Two versions and two microbatches on the first rank, one of each on the second.
    half, rest = 2 * (2 * WEIGHT + 2 * KEPT), 3 * (WEIGHT + KEPT)
    assert rest < half
    assert starts_of(EVEN, line("pipedream"), memory=f"{half} B") == (0, 2)
    assert starts_of(EVEN, line("pipedream"), memory=f"{half - 1} B") == (0, 1)
    assert starts_of(EVEN, line(), memory=f"{half - 1} B") == (0, 2)
    with pytest.raises(RequestError, match="no cut into 2 stages is within memory"):
        starts_of(EVEN, line("pipedream"), memory=f"{rest - 1} B")


def test_activations_are_those_of_a_microbatch_where_its_size_is_known():
    # Eight times the example's samples.
    half, rest = 2 * (WEIGHT + 2 * 8 * KEPT), 3 * (WEIGHT + 8 * KEPT)
    assert rest < half
    assert starts_of(EVEN, line(), memory=f"{half - 1} B", samples=16) == (0, 1)
    assert starts_of(EVEN, line(), memory=f"{half - 1} B", samples=15) == (0, 2)
    assert starts_of(EVEN, line(), memory=f"{half - 1} B") == (0, 2)


def test_a_stages_share_of_its_rank_and_what_it_holds():
    held = [(own.limit_bytes, own.num_microbatches, own.num_versions) for own in stage_memory(line(ranks=3), 100)]
    assert held == [(100, 3, 1), (100, 2, 1), (100, 1, 1)]
    held = [
        (own.limit_bytes, own.num_microbatches, own.num_versions) for own in stage_memory(line("pipedream", 3), 100)
    ]
    assert held == [(100, 3, 3), (100, 2, 2), (100, 1, 1)]
    # Two stages on each rank, in chunks and in both directions.
    assert [own.limit_bytes for own in stage_memory(line("interleaved", 2, 4, 2), 101)] == [50] * 4
    assert [own.limit_bytes for own in stage_memory(line("chimera", 4, 4), 100)] == [50] * 4


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "v-min", "chimera", "dualpipe", "dualpipev"])
def test_the_stages_of_a_rank_together_hold_no_less_than_the_rank(name):
    schedule = make_schedule(name, ranks=4, microbatches=8)
    by_stage = peak_activations_by_stage(schedule)
    for rank, peak in enumerate(peak_activations(schedule)):
        own = [by_stage[stage] for stage in schedule.grid.stages_of(rank)]
        assert max(own) <= peak <= sum(own)


def test_a_schedule_from_a_file_is_cut_by_what_it_holds():
    schedule = read_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", name="mine", origin="mine.csv")
    assert [own.num_microbatches for own in stage_memory(schedule, 1)] == [2, 1]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"memory": "2 gigs"}, "recipe: memory: '2 gigs' is not a number of bytes; write a number with KiB"),
        ({"memory": "0 GiB"}, "recipe: memory: '0 GiB' is 0 bytes, which hold no model; leave memory out"),
        ({"balance": "measure"}, "recipe: balance: there is no 'measure'; did you mean 'measured'?"),
        ({"stage": ["a"]}, "recipe: unknown key 'stage'; did you mean 'stages'?"),
        (
            {"stages": "a"},
            "recipe: stages: 'a' is no list; write one in brackets, such as [3, 1], or ['a', 'b'] of words",
        ),
    ],
)
def test_a_wrong_key_or_value_is_refused(tables, message):
    with pytest.raises(RequestError) as refused:
        validate(PipelineConfig, tables, origin="recipe")
    assert str(refused.value).startswith(message)


def test_nothing_said_is_no_bound_and_estimated_work():
    config = validate(PipelineConfig, {}, origin="recipe")
    assert (config.stages, config.balance, config.memory_bytes) == ([], "estimated", None)
    assert PipelineConfig(memory="1.5 KiB").memory_bytes == 1536


def test_the_layers_of_these_tests_hold_what_is_said_of_them():
    costs = estimate_work(EVEN, find_units(EVEN, EXAMPLE, ModuleAnalysis()), EXAMPLE)
    assert {(cost.weight_bytes, cost.activation_bytes) for cost in costs} == {(WEIGHT, KEPT)}


class Skips(nn.Module):
    """Its longest layers are in the middle, where a skip goes past them: only before and after can it be cut."""

    def __init__(self):
        super().__init__()
        self.early, self.first, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 64)
        self.inner, self.up, self.last = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(self.early(x))
        return self.last(self.up(self.inner(self.down(x))) + x)


class Towers(nn.Module):
    """Nothing of the first goes through the second."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.one(x) * self.two(x)


class Branching(nn.Module):
    """Looks at values between its units, which a later stage does not have."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        x = self.one(x)
        x = self.two(x)
        if not torch.isfinite(x).all() or x.abs().max() > 1000:
            raise ValueError("the activations have exploded")
        return self.three(x)


def test_the_cut_is_sought_among_the_places_that_are_legal():
    """A DLRM, a U-Net and encoder-decoders were refused, because the most even cut was the only one that was tried."""
    model = Skips()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert starts_of(model, line()) == (0, 5) and starts_of(model, line(ranks=3)) == (0, 1, 5)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_where_no_cut_is_legal_the_legal_places_are_named():
    with pytest.raises(RequestError) as refused:
        starts_of(Skips(), line(ranks=4))
    told = str(refused.value)
    assert told.startswith(
        "pp=4 wants 4 stages, and the module can be cut at 2 places (first, last), which makes 3; lower pp. "
    )
    assert "reads something of an earlier stage" in told
    with pytest.raises(RequestError, match="can be cut at 0 places, which makes 1; lower pp"):
        starts_of(Towers(), line())


def test_a_place_that_the_recipe_names_and_that_is_not_legal_is_refused_with_those_that_are():
    model = Skips()
    units = find_units(model, EXAMPLE, ModuleAnalysis())
    with pytest.raises(RequestError, match=r"from .inner. on, reads .*\. Stages can begin at .first., .last.$"):
        prove_stages(model, EXAMPLE, Stages(units=units, starts=(0, 3), schedule=line()))


class Asserting(Branching):
    """The same, as an assertion."""

    def forward(self, x):
        x = self.two(self.one(x))
        assert torch.isfinite(x).all() and x.abs().max() < 1000
        return self.three(x)


class Leaving(Branching):
    """Takes another way instead."""

    def forward(self, x):
        x = self.two(self.one(x))
        if not x.abs().max() < 1000:
            return x
        return self.three(x)


@pytest.mark.parametrize("build", [Branching, Asserting, Leaving])
def test_code_that_does_otherwise_on_values_that_are_not_there_is_cut_elsewhere(build):
    assert starts_of(build(), line()) == (0, 1)


def test_a_mistake_of_the_cutting_is_no_place_that_cannot_be_cut():
    """Any error was said to be the module's, so that a bug of ours was a plan that is refused."""
    model = model_of(8, 8)
    chain = StagedModule(model, find_units(model, EXAMPLE, ModuleAnalysis()), (0, 1))
    chain._stage_of_call = []
    with pytest.raises(IndexError):
        chain.prove(EXAMPLE)


class Breaks(Branching):
    """Fails by itself, cut or not."""

    is_broken = False

    def forward(self, x):
        if self.is_broken:
            raise ValueError("broken")
        return self.three(self.two(self.one(x)))


def test_a_module_that_fails_uncut_is_not_called_illegal_at_every_place():
    model = Breaks()
    chain = StagedModule(model, find_units(model, EXAMPLE, ModuleAnalysis()), (0, 1))
    model.is_broken = True
    with pytest.raises(ValueError, match="broken"):
        chain.prove(EXAMPLE)
