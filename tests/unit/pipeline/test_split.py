"""Cuts of a chain against every possible cut, the recipe's own cuts, and the measured costs of shipped models."""

import itertools
import time
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.core.errors import RequestError
from shoal.data.spec import DataSpec
from shoal.models.build import build_model
from shoal.models.config import CnnConfig, GptConfig
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig
from shoal.pipeline.split import StageMemory, UnitCost, parse_starts, split, split_replicated
from shoal.pipeline.unit_costs import measure_costs
from shoal.pipeline.units import Unit, find_units
from support.processes.instruction_count import instructions

UNIT_COSTS = st.builds(
    UnitCost,
    path=st.just("unit"),
    # Few values, so that there are ties, and such as floats cannot hold.
    seconds=st.sampled_from([0.0, 0.1, 0.2, 0.3, 1 / 3, 0.7]),
    weight_bytes=st.integers(0, 5),
    activation_bytes=st.integers(0, 5),
    can_start=st.booleans(),
    boundary_bytes=st.integers(0, 5),
)
CHAINS = st.lists(UNIT_COSTS, min_size=1, max_size=8)


def chain(*seconds: float, memory: int = 0, can_start: bool = True) -> tuple[UnitCost, ...]:
    return tuple(
        UnitCost(path=f"u.{place}", seconds=value, weight_bytes=memory, activation_bytes=0, can_start=can_start)
        for place, value in enumerate(seconds)
    )


def every_cut(costs, num_stages):
    places = [place for place, cost in enumerate(costs) if place and cost.can_start]
    for starts in itertools.combinations(places, num_stages - 1):
        yield (0, *starts)


def stages_of(costs, starts):
    return [costs[first:end] for first, end in itertools.pairwise([*starts, len(costs)])]


def exact(costs) -> Fraction:
    return sum((Fraction(cost.seconds) for cost in costs), Fraction())


def bytes_of(stage, own: StageMemory) -> int:
    weights, activations = sum(cost.weight_bytes for cost in stage), sum(cost.activation_bytes for cost in stage)
    return own.num_versions * weights + own.num_microbatches * activations


def score(costs, starts):
    seconds = [exact(stage) for stage in stages_of(costs, starts)]
    return max(seconds), sum(value * value for value in seconds)


@settings(max_examples=300, deadline=None)
@given(CHAINS, st.integers(1, 5))
def test_the_cut_is_the_best_of_all(costs, num_stages):
    cuts = list(every_cut(costs, num_stages))
    if not cuts:
        with pytest.raises(RequestError, match=f"wants {num_stages} stages"):
            split(costs, num_stages)
        return
    found = split(costs, num_stages)
    assert found.starts in cuts
    assert score(costs, found.starts) == min(score(costs, starts) for starts in cuts)
    assert found.slowest_seconds == float(score(costs, found.starts)[0]) == max(found.stage_seconds)
    assert found.stage_bytes == tuple(
        sum(cost.weight_bytes + cost.activation_bytes for cost in stage) for stage in stages_of(costs, found.starts)
    )


@settings(max_examples=200, deadline=None)
@given(CHAINS, st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_the_cut_is_the_best_of_all_where_stages_have_several_ranks(costs, replicas):
    """By the time per microbatch: a stage's seconds over its ranks."""

    def turned(starts):
        shared = [exact(stage) / count for stage, count in zip(stages_of(costs, starts), replicas, strict=True)]
        return max(shared), sum(value * value for value in shared)

    cuts = list(every_cut(costs, len(replicas)))
    if not cuts:
        with pytest.raises(RequestError, match=f"wants {len(replicas)} stages"):
            split(costs, len(replicas), replicas=replicas)
        return
    found = split(costs, len(replicas), replicas=replicas)
    assert turned(found.starts) == min(map(turned, cuts))
    assert found.slowest_seconds == pytest.approx(float(turned(found.starts)[0]))
    assert found.stage_seconds == tuple(float(exact(stage)) for stage in stages_of(costs, found.starts))


@settings(max_examples=300, deadline=None)
@given(CHAINS, st.integers(1, 4), st.data())
def test_the_cut_is_the_best_within_memory(costs, num_stages, data):
    cuts = list(every_cut(costs, num_stages))
    own = st.builds(
        StageMemory, limit_bytes=st.integers(0, 60), num_microbatches=st.integers(0, 4), num_versions=st.integers(1, 4)
    )
    memory = data.draw(st.lists(own, min_size=num_stages, max_size=num_stages))
    held = {starts: tuple(map(bytes_of, stages_of(costs, starts), memory)) for starts in cuts}
    within = [
        starts
        for starts in cuts
        if all(used <= own.limit_bytes for used, own in zip(held[starts], memory, strict=True))
    ]
    if not within:
        with pytest.raises(RequestError, match="within memory" if cuts else "can be cut at"):
            split(costs, num_stages, memory=memory)
        return
    found = split(costs, num_stages, memory=memory)
    assert found.starts in within and found.stage_bytes == held[found.starts]
    assert score(costs, found.starts) == min(score(costs, starts) for starts in within)


def test_a_slow_unit_does_not_make_the_rest_uneven():
    assert split(chain(1, 1, 1, 1, 9), 3).starts == (0, 2, 4)
    assert split(chain(9, 1, 1, 1, 1), 3).starts == (0, 1, 3)
    # Units that floats cannot hold: summed as floats, 0.1 three times over is more than 0.3.
    assert split(chain(*[0.1] * 12), 4).starts == (0, 3, 6, 9)


def test_what_a_stage_keeps_of_each_microbatch_moves_the_cut():
    """As in 1F1B, where the first of two stages holds two microbatches and the last holds one."""
    costs = [
        UnitCost(path=str(place), seconds=1, weight_bytes=1, activation_bytes=10, can_start=True) for place in range(6)
    ]
    free = split(costs, 2)
    bound = split(costs, 2, memory=[StageMemory(limit_bytes=45, num_microbatches=2), StageMemory(limit_bytes=45)])
    assert free.starts == (0, 3) and bound.starts == (0, 2)
    assert free.stage_bytes == (33, 33) and bound.stage_bytes == (42, 44)


def test_too_many_stages_are_refused_with_the_places():
    costs = chain(*[1.0] * 6)
    with pytest.raises(RequestError) as refused:
        split(costs, 8, num_chunks=2)
    assert str(refused.value) == (
        "pp=4 with 2 chunks wants 8 stages, and the module can be cut at 5 places (u.1, u.2, u.3, u.4, ...), "
        "which makes 6; lower pp or chunks"
    )
    assert split(costs, 6, num_chunks=2).starts == (0, 1, 2, 3, 4, 5)
    with pytest.raises(RequestError, match=r"replicas=2-1-1 wants 3 stages, .* which makes 2; name fewer stages"):
        split(chain(1, 1), 3, replicas=(2, 1, 1))
    with pytest.raises(RequestError) as refused:
        split(chain(1, 1, can_start=False), 2)
    assert str(refused.value) == "pp=2 wants 2 stages, and the module can be cut at 0 places, which makes 1; lower pp"


def test_a_cut_that_needs_more_memory_is_refused_with_both_numbers():
    memory = [StageMemory(limit_bytes=3 * 1024, num_versions=2)] * 2
    with pytest.raises(RequestError) as refused:
        split(chain(1, 1, 1, 1, memory=1024), 2, memory=memory)
    assert "stage 0 (u.0 to u.1) holds 4.0 KiB" in str(refused.value)
    assert "2 times its weights, and its limit is 3.0 KiB" in str(refused.value)


def test_a_long_chain_is_cut_with_little_work():
    assert instructions(lambda: split(chain(*[0.1, 0.3, 0.2] * 70), 32)) < 20_000_000
    replicated = chain(*[0.1, 0.3, 0.2] * 10, memory=10)
    assert instructions(lambda: split_replicated(replicated, 8, 0.001)) < 4_000_000


def every_replicated(costs, num_ranks):
    for num_stages in range(1, num_ranks + 1):
        for starts in every_cut(costs, num_stages):
            for ends in itertools.combinations(range(1, num_ranks), num_stages - 1):
                yield starts, tuple(after - before for before, after in itertools.pairwise([0, *ends, num_ranks]))


def slowest_replicated(costs, starts, replicas, per_byte) -> Fraction:
    """T(i -> j, m) of the paper for each stage, and 2 a / B for each boundary."""
    times = [Fraction(2 * costs[start].boundary_bytes) * per_byte for start in starts[1:]]
    for stage, count in zip(stages_of(costs, starts), replicas, strict=True):
        weights = sum(cost.weight_bytes for cost in stage)
        times.append(max(exact(stage), 2 * (count - 1) * weights * per_byte) / count)
    return max(times)


@settings(max_examples=200, deadline=None)
@given(st.lists(UNIT_COSTS, min_size=1, max_size=6), st.integers(1, 5), st.sampled_from([0.0, 0.01, 0.05, 0.3]))
def test_the_replicated_cut_is_the_best_of_all_with_the_fewest_stages(costs, num_ranks, per_byte):
    def rate(starts, replicas):
        return slowest_replicated(costs, starts, replicas, Fraction(per_byte)), len(starts)

    found = split_replicated(costs, num_ranks, per_byte)
    plans = list(every_replicated(costs, num_ranks))
    assert (found.starts, found.replicas) in plans
    assert rate(found.starts, found.replicas) == min(rate(*plan) for plan in plans)
    assert found.slowest_seconds == pytest.approx(float(rate(found.starts, found.replicas)[0]))


def test_convolutions_are_replicated_and_heavy_layers_are_not():
    """The paper's example, VGG-16: many replicas of the light and slow front, one of the heavy and quick end."""
    front = [
        UnitCost(path=f"c{n}", seconds=5, weight_bytes=1, activation_bytes=0, can_start=True, boundary_bytes=50)
        for n in range(3)
    ]
    end = UnitCost(path="fc", seconds=4, weight_bytes=1000, activation_bytes=0, can_start=True, boundary_bytes=10)
    found = split_replicated([*front, end], 4, 0.1)
    assert (found.starts, found.replicas, found.slowest_seconds) == ((0, 3), (3, 1), 5.0)
    # A network so fast that it does not matter: plain data parallelism.
    assert split_replicated([*front, end], 4, 0.0).replicas == (4,)


UNITS = tuple(
    Unit(path=path, is_once=path != "drop") for path in ("embed", "drop", "blocks.0", "blocks.1", "drop", "head")
)


def test_named_starts_are_found_with_and_without_the_first():
    assert parse_starts(["blocks.1", "head"], UNITS) == (0, 3, 5)
    assert parse_starts(["embed", "blocks.1", "head"], UNITS) == (0, 3, 5)
    assert parse_starts([], UNITS) == (0,)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["block.1"], r"pipeline.stages: 'block.1' is no place .* the nearest is 'blocks.1'"),
        (["blocks.1.mlp"], "lies inside 'blocks.1'"),
        (["blocks"], "the nearest is 'blocks.0'"),
        (["xyzzy"], "places are such as 'embed'"),
        (["drop"], "'drop' is called 2 times"),
        (["head", "blocks.1"], "'blocks.1' is call 3 .* begins at call 5, 'head'"),
        (["head", "head"], "name each place once"),
        (["head", "embed"], "'embed' is call 0"),
    ],
)
def test_a_wrong_start_is_refused_with_the_fix(texts, message):
    with pytest.raises(RequestError, match=message):
        parse_starts(texts, UNITS)


def measure(model, example):
    units = find_units(model, example, analyse_module(model, example, ParallelConfig()))
    return units, measure_costs(model, units, example)


def weights_of(model) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_costs_what_its_blocks_cost(tied):
    shape = DataSpec(kind="tokens", vocab=65, sequence=64)
    model = build_model(GptConfig(layers=3, hidden=64, heads=4, tied=tied, dropout=0.1), shape)
    units, costs = measure(model, (torch.randint(0, 65, (4, 64)),))
    assert [cost.path for cost in costs] == [unit.path for unit in units]
    of = {cost.path: cost for cost in costs}
    stream = 4 * 64 * 64 * 4
    assert all(cost.seconds > 0 and cost.can_start for cost in costs)
    assert sum(cost.weight_bytes for cost in costs) == weights_of(model)
    assert of["head"].weight_bytes == (0 if tied else of["embedding"].weight_bytes)
    assert [cost.boundary_bytes for cost in costs] == [0] + [stream] * (len(costs) - 1)
    # The shortest of several measurements: whatever else the machine does makes one longer, and none shorter.
    again = [costs, *(measure(model, (torch.randint(0, 65, (4, 64)),))[1] for _ in range(4))]
    shortest = {cost.path: min(one[number].seconds for one in again) for number, cost in enumerate(costs)}
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        assert shortest[block] > 3 * shortest["embedding_dropout"]
        # The norms, the projections and the feed-forward each keep their inputs: many times the stream, of weights nothing.
        assert 8 * stream < of[block].activation_bytes < 40 * stream
        assert of[block].activation_bytes == of["blocks.1"].activation_bytes
    assert split(costs, 3).starts[1:] != () and set(split(costs, 3).starts[1:]) <= set(range(2, 6))


def test_a_cnn_costs_what_its_convolutions_cost():
    model = build_model(CnnConfig(dropout=0.1), DataSpec(kind="classes", features=(8, 8), classes=10))
    _, costs = measure(model, (torch.randn(64, 8, 8),))
    of = {cost.path: cost for cost in costs}
    assert all(cost.seconds > 0 for cost in costs)
    assert sum(cost.weight_bytes for cost in costs) == weights_of(model)
    again = [costs, *(measure(model, (torch.randn(64, 8, 8),))[1] for _ in range(4))]
    shortest = {cost.path: min(one[number].seconds for one in again) for number, cost in enumerate(costs)}
    assert shortest["conv2"] > shortest["dropout2"]
    image = 64 * 8 * 8 * 4
    # What the norm put out, as relu keeps it, and which places the pool took; the pool's input is relu's output.
    assert of["norm1"].activation_bytes >= 16 * image + 16 * image // 4 * 2
    assert of["conv1"].activation_bytes == image


class Plain(nn.Module):
    """Linear layers with work between them, one of them called twice, a weight of no layer, a buffer that is kept."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.randn(1000, 8))
        self.pause = pause

    def forward(self, x):
        time.sleep(self.pause)
        x = self.one(x * self.scale) * self.table[: len(x)]
        time.sleep(self.pause)
        return self.one(self.norm(self.two(x)).relu())


def test_the_measurement_leaves_nothing_behind():
    model, example = Plain().eval(), (torch.randn(4, 8),)
    units = find_units(model, example, ModuleAnalysis())
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    seed = torch.get_rng_state()
    measure_costs(model, units, example)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), seed) and not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_work_between_units_counts_with_the_unit_before_it_and_shared_weights_count_once():
    model, example = Plain(pause=0.01), (torch.randn(4, 8),)
    costs = measure_costs(model, find_units(model, example, ModuleAnalysis()), example)
    assert [(cost.path, cost.can_start) for cost in costs] == [
        ("one", False), ("two", True), ("norm", True), ("one", False)
    ]  # fmt: skip
    # Both pauses: the one before the first unit, too.
    assert costs[0].seconds >= 0.06 and max(cost.seconds for cost in costs[1:]) < 0.03
    layer = (8 * 8 + 8) * 4
    assert [cost.weight_bytes for cost in costs] == [layer + 8 * 4, layer, 2 * 8 * 4, 0]
    # The input and x * scale; the table is a buffer, and what is multiplied with it is kept by nobody else.
    x = 4 * 8 * 4
    assert costs[0].activation_bytes == 2 * x
    # relu kept it already, between the norm and the last layer.
    assert costs[3].activation_bytes == 0
    assert [cost.boundary_bytes for cost in costs] == [0, x, x, x]


class Skipping(Plain):
    """In training it takes another way."""

    def forward(self, x):
        x = self.one(x)
        return x if self.training else self.two(x)


def test_a_module_that_takes_another_way_in_training_is_refused():
    model, example = Skipping(), (torch.randn(4, 8),)
    with pytest.raises(RequestError, match="in training ends where it called 'two'"):
        measure_costs(model, find_units(model, example, ModuleAnalysis()), example)
