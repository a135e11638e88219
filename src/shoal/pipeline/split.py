"""Where the stages of a chain begin: the best cut for what its units cost, or the one that the recipe names.

The units are a line, so the best cut is found exactly, by dynamic programming over its places. A pipeline is as fast as its
slowest stage; among the cuts that are equally good there, the most even one is taken. Costs are compared as whole numbers,
because floats summed in another order would break the ties.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from shoal.core.errors import RequestError, nearest
from shoal.core.pipelines import write_replicas
from shoal.core.units import format_bytes
from shoal.pipeline.units import Unit

_NUM_NAMED = 4

Cost = Callable[[int, int, int, int], int | None]
"""(ranks used by the stages before, ranks of this stage, first unit, end) -> its cost, None where it may not be.

It never falls, and None stays None, as the first unit moves towards the beginning: that is what the search breaks off on.
"""


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """What one unit of the chain costs per microbatch."""

    path: str
    seconds: float
    """Forward and backward, with what runs between it and the next unit."""
    weight_bytes: int
    activation_bytes: int
    """What is kept between forward and backward."""
    can_start: bool
    """A stage may begin with it."""
    boundary_bytes: int = 0
    """What a stage that begins with it receives."""

    def __post_init__(self) -> None:
        assert 0 <= self.seconds < math.inf and min(self.weight_bytes, self.activation_bytes, self.boundary_bytes) >= 0


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one stage may hold, and what it has to hold several times."""

    limit_bytes: int
    num_microbatches: int = 1
    """Microbatches whose activations it holds at its fullest."""
    num_versions: int = 1
    """Copies of its weights: versions, and gradients and moments where the limit is to cover them."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A chain cut into stages."""

    starts: tuple[int, ...]
    """The index of each stage's first unit; the first is 0."""
    slowest_seconds: float
    """Time per microbatch of the slowest stage, shared by its ranks where several take turns."""
    stage_seconds: tuple[float, ...]
    stage_bytes: tuple[int, ...]
    """Weights times versions and activations times microbatches; each once where no memory was given."""


@dataclass(frozen=True, kw_only=True)
class ReplicatedSplit:
    """A chain cut into stages of which each runs on several ranks, which take turns at the microbatches."""

    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    slowest_seconds: float
    """Time per microbatch, of a stage or of a transfer between two."""


def split(
    costs: Sequence[UnitCost],
    num_stages: int,
    *,
    num_chunks: int = 1,
    memory: Sequence[StageMemory] | None = None,
    replicas: Sequence[int] | None = None,
) -> Split:
    """The cut whose slowest stage is fastest, and among those the one with the least sum of squares.

    What counts is a stage's time per microbatch: its seconds over its ranks, where several take turns.

    Args:
        costs: the chain.
        num_stages: of the whole pipeline.
        num_chunks: stages per rank, which only the message about too many stages tells apart.
        memory: one per stage; no bound without it.
        replicas: ranks of every stage, which take turns at the microbatches; one each when left out.

    Raises:
        RequestError: there are fewer places to begin than stages, or no cut is within memory.
    """
    turns = list(replicas or [1] * num_stages)
    assert num_stages == len(turns) >= 1 and (memory is None or len(memory) == num_stages)
    bounds = _bounds(costs)
    if len(bounds) - 1 < num_stages:
        raise RequestError(_too_many(costs, num_stages, num_chunks, turns))
    (ticks,), per_second = _whole([cost.seconds for cost in costs])
    until = [0, *accumulate(ticks)]
    held = _StageBytes(costs, memory)
    # So that the share of any stage's ranks is a whole number.
    shares = math.lcm(*turns)

    def seconds(stage: int, _: int, first: int, end: int) -> int | None:
        own = (until[end] - until[first]) * (shares // turns[stage])
        return own if held.over(stage, first, end) <= 0 else None

    found = _search(bounds, num_stages, (1,), seconds, max)
    if found is None:
        raise RequestError(held.refusal(bounds, num_stages))
    slowest, _ = found

    # A second search: what comes before a stage is best kept even only once it is known how slow it may be.
    def square(stage: int, ranks: int, first: int, end: int) -> int | None:
        own = seconds(stage, ranks, first, end)
        return None if own is None or own > slowest else own * own

    even = _search(bounds, num_stages, (1,), square, int.__add__)
    assert even is not None
    starts = [first for first, _ in even[1]]
    spans = list(pairwise([*starts, len(costs)]))
    return Split(
        starts=tuple(starts),
        slowest_seconds=slowest / (per_second * shares),
        stage_seconds=tuple((until[end] - until[first]) / per_second for first, end in spans),
        stage_bytes=tuple(held.bytes(stage, *span) for stage, span in enumerate(spans)),
    )


def split_replicated(costs: Sequence[UnitCost], num_ranks: int, transfer_seconds_per_byte: float) -> ReplicatedSplit:
    """The planner of PipeDream (Narayanan et al., SOSP 2019, section 3.1), on one level of network, with all ranks used.

    With m replicas, a stage of seconds T and weights w takes max(T, 2 (m-1) w s) / m per microbatch, the second being what they
    send to sum the gradients up, and a boundary of a bytes takes 2 a s, there and back; s is the seconds per byte. Without the
    second term one stage on all ranks would always be best. Among equally fast cuts: the fewest stages.
    """
    assert num_ranks >= 1 and costs
    (ticks, (per_byte,)), per_second = _whole([cost.seconds for cost in costs], [transfer_seconds_per_byte])
    until, weights = [0, *accumulate(ticks)], [0, *accumulate(cost.weight_bytes for cost in costs)]
    # So that a share of any number of replicas is a whole number.
    shares = math.lcm(*range(1, num_ranks + 1))
    sent = [shares * 2 * cost.boundary_bytes * per_byte for cost in costs] + [0]

    def seconds(_: int, replicas: int, first: int, end: int) -> int:
        summed = 2 * (replicas - 1) * (weights[end] - weights[first]) * per_byte
        return max(max(until[end] - until[first], summed) * (shares // replicas), sent[end])

    every = range(1, num_ranks + 1)
    fastest = _search(_bounds(costs), num_ranks, every, seconds, max)
    assert fastest is not None
    slowest, _ = fastest

    def count(used: int, replicas: int, first: int, end: int) -> int | None:
        return 1 if seconds(used, replicas, first, end) <= slowest else None

    fewest = _search(_bounds(costs), num_ranks, every, count, int.__add__)
    assert fewest is not None
    starts, replicas = zip(*fewest[1], strict=True)
    return ReplicatedSplit(starts=starts, replicas=replicas, slowest_seconds=slowest / (per_second * shares))


def parse_starts(texts: Sequence[str], units: Sequence[Unit], *, key: str = "pipeline.stages") -> tuple[int, ...]:
    """Where stages begin, from the paths of their first units. The chain's own first unit may be left out.

    Raises:
        RequestError: a path is no unit, is called more than once, or does not come after the one before it.
    """
    paths = [unit.path for unit in units]
    starts = [0]
    for place, text in enumerate(texts):
        if text not in paths:
            raise RequestError(f"{key}: {text!r} is no place where a stage can begin; {_advice(text, units)}")
        start = paths.index(text)
        if place == 0 and start == 0:
            continue
        if not units[start].is_once:
            raise RequestError(
                f"{key}: {text!r} is called {paths.count(text)} times in a forward pass, and a stage begins at one call; "
                "name a module that is called once"
            )
        if start <= starts[-1]:
            raise RequestError(
                f"{key}: {text!r} is call {start} of the forward pass and the stage before it begins at call {starts[-1]}, "
                f"{paths[starts[-1]]!r}; name each place once, in the order of calls"
            )
        starts.append(start)
    return tuple(starts)


def _search(
    bounds: Sequence[int], num_ranks: int, steps: Sequence[int], cost: Cost, join: Callable[[int, int], int]
) -> tuple[int, list[tuple[int, int]]] | None:
    """The least joined cost of stages between bounds that use all ranks, and each stage's (first unit, ranks)."""
    # best[used][place]: of the units before bounds[place] on so many ranks; with where its last stage begins and its ranks.
    best: list[dict[int, tuple[int, int, int]]] = [{} for _ in range(num_ranks + 1)]
    for used in range(1, num_ranks + 1):
        for place in range(1, len(bounds)):
            least: tuple[int, int, int] | None = None
            for ranks in (step for step in steps if step <= used):
                before = used - ranks
                for first in range(place - 1, -1, -1):
                    own = cost(before, ranks, bounds[first], bounds[place])
                    if own is None or (least is not None and own >= least[0]):
                        break
                    if before == 0 and first == 0:
                        least = (own, first, ranks)
                    elif first in best[before]:
                        joined = join(best[before][first][0], own)
                        least = (joined, first, ranks) if least is None or joined < least[0] else least
            if least is not None:
                best[used][place] = least
    used, place, stages = num_ranks, len(bounds) - 1, list[tuple[int, int]]()
    if place not in best[used]:
        return None
    while used:
        _, first, ranks = best[used][place]
        stages.append((bounds[first], ranks))
        used, place = used - ranks, first
    return best[num_ranks][len(bounds) - 1][0], stages[::-1]


class _StageBytes:
    """The bytes of any stage, and how they compare with its limit."""

    def __init__(self, costs: Sequence[UnitCost], memory: Sequence[StageMemory] | None) -> None:
        self.costs, self.memory = costs, memory
        self._weights = [0, *accumulate(cost.weight_bytes for cost in costs)]
        self._activations = [0, *accumulate(cost.activation_bytes for cost in costs)]

    def bytes(self, stage: int, first: int, end: int) -> int:
        own = self.memory[stage] if self.memory else StageMemory(limit_bytes=0)
        weights, activations = (
            self._weights[end] - self._weights[first],
            self._activations[end] - self._activations[first],
        )
        return own.num_versions * weights + own.num_microbatches * activations

    def over(self, stage: int, first: int, end: int) -> int:
        """Bytes above the limit, negative below it."""
        return self.bytes(stage, first, end) - self.memory[stage].limit_bytes if self.memory else 0

    def refusal(self, bounds: Sequence[int], num_stages: int) -> str:
        """Says how near the cut comes whose worst stage is least above its limit."""
        found = _search(bounds, num_stages, (1,), lambda stage, _, first, end: self.over(stage, first, end), max)
        assert found is not None and self.memory is not None
        spans = list(pairwise([*(first for first, _ in found[1]), len(self.costs)]))
        stage = max(range(num_stages), key=lambda stage: self.over(stage, *spans[stage]))
        (first, end), own = spans[stage], self.memory[stage]
        return (
            f"no cut into {num_stages} stages is within memory: in the one that comes nearest, stage {stage} "
            f"({self.costs[first].path} to {self.costs[end - 1].path}) holds {format_bytes(self.bytes(stage, first, end))}, "
            f"with activations of {own.num_microbatches} microbatches and {own.num_versions} times its weights, "
            f"and its limit is {format_bytes(own.limit_bytes)}; use more stages or smaller microbatches, or recompute activations"
        )


def _bounds(costs: Sequence[UnitCost]) -> list[int]:
    """Where a stage may begin, and the end."""
    return [place for place, cost in enumerate(costs) if cost.can_start or place == 0] + [len(costs)]


def _whole(*rows: Sequence[float]) -> tuple[list[list[int]], int]:
    """Rows of floats as exact whole numbers of one unit, and how many of it make 1."""
    exact = [[Fraction(value) for value in row] for row in rows]
    unit = math.lcm(*(value.denominator for row in exact for value in row))
    return [[int(value * unit) for value in row] for row in exact], unit


def _too_many(costs: Sequence[UnitCost], num_stages: int, num_chunks: int, turns: Sequence[int]) -> str:
    places = [cost.path for cost in costs[1:] if cost.can_start]
    named = ", ".join(places[:_NUM_NAMED]) + (", ..." if len(places) > _NUM_NAMED else "")
    wants = f"pp={num_stages // num_chunks}" + (f" with {num_chunks} chunks" if num_chunks > 1 else "")
    if max(turns) > 1:
        wants = f"replicas={write_replicas(turns)}"
    count = f"{len(places)} place{'' if len(places) == 1 else 's'}" + (f" ({named})" if named else "")
    return (
        f"{wants} wants {num_stages} stages, and the module can be cut at {count}, which makes {len(places) + 1}; "
        f"{'name fewer stages' if max(turns) > 1 else 'lower pp'}{' or chunks' if num_chunks > 1 else ''}"
    )


def _advice(text: str, units: Sequence[Unit]) -> str:
    around = next((unit.path for unit in units if text.startswith(unit.path + ".")), None)
    if around is not None:
        return f"it lies inside {around!r}, which is not cut: name that"
    within = next((unit.path for unit in units if unit.path.startswith(text + ".")), None)
    close = within or nearest(text, [unit.path for unit in units if unit.is_once])
    return f"the nearest is {close!r}" if close else f"places are such as {', '.join(repr(u.path) for u in units[:3])}"
