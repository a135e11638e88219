"""What a pipeline should send in one step, from the schedule and the shapes of the plain model, beside what is counted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.core.axes import Axis
from shoal.costs.tracer import ModuleCall, Tracer, preserved_state
from shoal.data.batchform import arguments_of
from shoal.pipeline.build import Stages
from shoal.pipeline.share import SHARE, places_of
from shoal.schedules.schedule import Grid, Point, Schedule, made_by, receiver_of


@dataclass(frozen=True)
class Crossing:
    """One tensor that goes from a stage to the next."""

    num_bytes: int
    has_gradient: bool


Boundaries = Mapping[int, Sequence[Crossing]]
"""What each stage but the first receives of one microbatch."""


def trace_boundaries(
    plain: nn.Module, stages: Stages, messages: Sequence[Sequence[int]], inputs: Sequence[Tensor]
) -> Boundaries:
    """Run a plain model and look at the arguments of every stage's first unit.

    Args:
        plain: as one process builds it; nothing of the pass stays.
        stages: where it is cut.
        messages: of each stage, which of those arguments come from the stage before.
        inputs: of one microbatch.
    """
    first_units = {stages.units[start].path: stage for stage, start in enumerate(stages.starts) if stage > 0}
    tracer = Tracer(plain, paths=first_units)
    with preserved_state(plain, training=True), torch.enable_grad():
        tracer.run(*arguments_of(plain, inputs))
    found: dict[int, list[Crossing]] = {}
    for event in tracer.record.events:
        if isinstance(event, ModuleCall):
            stage, leaves = first_units[event.path], tree_leaves((event.args, event.kwargs))
            found[stage] = [Crossing(leaves[at].nbytes, leaves[at].requires_grad) for at in messages[stage]]
    return found


def expected_sends(schedule: Schedule, rank: int, microbatches: Sequence[Boundaries]) -> TrafficCounts:
    """Activations and gradients that one rank sends in the cells of its row.

    Args:
        schedule: of the step.
        rank: along ``pp``.
        microbatches: the boundaries of each.
    """
    grid, calls, num_bytes = schedule.grid, 0, 0
    for result in (result for action in schedule.actions(rank) for result in made_by(action)):
        if receiver_of(result, grid) is None:
            continue
        point, stage, microbatch = result
        goes_on = point is Point.OUTPUT
        crossings = microbatches[microbatch][stage + 1 if goes_on else stage]
        sent = [crossing for crossing in crossings if goes_on or crossing.has_gradient]
        calls += len(sent)
        num_bytes += sum(crossing.num_bytes for crossing in sent)
    return _sends(calls, num_bytes)


def expected_exchange(
    trained: Mapping[str, Tensor], holders: Mapping[str, frozenset[int]], *, grid: Grid, rank: int
) -> TrafficCounts:
    """Sums of weights that several stages hold: one message to every rank that holds one of them too.

    Args:
        trained: parameters, of which only sizes are read; a sum has one number more, which says whether there is a gradient.
        holders: their stages.
        grid: where stages lie.
        rank: along ``pp``.
    """
    all_counts: list[TrafficCounts] = []
    for peer in (other for other in range(grid.num_ranks) if other != rank):
        sent = 0
        for name, parameter in trained.items():
            ranks = [where for *_, where in places_of(grid, holders[name])]
            if peer in ranks:
                sent += (parameter.nbytes + parameter.element_size()) * ranks.count(rank)
        if sent:
            all_counts.append({(Axis.PIPELINE.value, SHARE): Traffic(calls=1, num_bytes=sent)})
    return add_traffic(*all_counts)


def _sends(calls: int, num_bytes: int) -> TrafficCounts:
    return {(Axis.PIPELINE.value, "send"): Traffic(calls=calls, num_bytes=num_bytes)} if calls else {}
