"""What a rank holds of activations at its fullest: counted by torch's allocator in a real step, beside the schedule's prediction.

Measured: the CPU allocator tells the profiler of every allocation and release. Its sum at the end of each action, less what it
was before the step, is what the rank holds between actions: saved tensors, messages and all else. The gradients' memory
is there before, because a step has been taken and they are not let go of. The resident set is too coarse: it moves by arenas.

Predicted: each stage is run once, alone, and what it saves is counted (``parallel.recompute``). Then the schedule says which
stages of which microbatches are alive after each action, and which tensors between stages are held: as the output of one, as the
input of the next (the same memory when both are here), on their way here, or by ``p2p``, which lets go of what it sent when it
has sent eight more.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from workload import MICROBATCHES, Feed, build_rank, cut

from shoal.comm.world import World
from shoal.costs.saved import SavedActivations, measure_saved
from shoal.pipeline.deferred import DeferredGradients, defer_weight_gradients
from shoal.pipeline.runtime import Runtime, receives_by_cell, row_places
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.player import peak_activations
from shoal.schedules.schedule import Action, Kind, Point, Result, Schedule, needs_of

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-min", "chimera")
MARK = "end of "


@dataclass(frozen=True)
class StageBytes:
    """Bytes that a stage holds of one microbatch, without its input and output."""

    saved: int
    """From its forward pass to its backward pass."""
    deferred: int
    """From there until its weights' gradient is made."""
    output: int
    """The tensors for the next stage."""


class _CountedGradients(DeferredGradients):
    """Counts what it puts off."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SavedActivations()

    def note(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        self.count.keep(grad)
        self.count.keep(x)
        super().note(weight, grad, x)


def stages_alone(schedule: Schedule) -> list[StageBytes]:
    """Every stage's forward and backward pass of one microbatch, by itself."""
    chain, feed, found = cut(schedule), Feed(), []
    received: list[Tensor] = []
    for stage in range(chain.num_stages):
        later = _CountedGradients() if schedule.splits_backward else None
        with measure_saved(chain.model, *received) as count:
            if later is None:
                output = chain.run(stage, feed.inputs(0), received)
            else:
                with defer_weight_gradients(later):
                    output = chain.run(stage, feed.inputs(0), received)
            is_last = stage == chain.num_stages - 1
            outputs = [feed.loss(output, 0)] if is_last else list(output)
            del output
            for tensor in outputs:
                count.keep(tensor)
        num_output = sum(tensor.nbytes for tensor in outputs)
        torch.autograd.backward(outputs, None if is_last else [torch.ones_like(tensor) for tensor in outputs])
        found.append(StageBytes(count.num_bytes - num_output, later.count.num_bytes if later else 0, num_output))
        received = [tensor.detach().requires_grad_() for tensor in outputs]
    return found


def predict(schedule: Schedule, rank: int, stages: list[StageBytes], *, keeps_sent: bool) -> Iterator[int]:
    """What a rank holds after each of its actions; with what it has sent, until the other rank shows that it has taken it."""
    grid, row = schedule.grid, list(schedule.actions(rank))
    held: dict[tuple[int, int], int] = {}
    between: dict[Result, set[str]] = defaultdict(set)
    """Tensors between stages that are here, and what holds them."""
    sent: list[tuple[Result, int]] = []
    made, needed = row_places(schedule)
    posted = receives_by_cell(schedule, rank)

    def give(result: Result, target: int) -> None:
        if target == rank:
            between[result].add("here")
            return
        if keeps_sent:
            between[result].add("sent")
            sent.append((result, target))

    def take(result: Result) -> None:
        source = grid.rank_of(result[1], result[2])
        for message, target in list(sent):
            if target == source and needed[message] <= made[result]:
                sent.remove((message, target))
                between[message].discard("sent")

    for place, action in enumerate(row):
        for result in posted[place]:
            between[result].add("on its way")
        for result in _from_afar(schedule, action):
            take(result)
        stage, microbatch = action.stage, action.microbatch
        own, before = (Point.OUTPUT, stage, microbatch), (Point.OUTPUT, stage - 1, microbatch)
        if action.kind is Kind.FORWARD:
            held[stage, microbatch] = stages[stage].saved
            between[own].add("output")
            if stage > 0:
                between[before].add("input")
            if stage < grid.num_stages - 1:
                give(own, grid.rank_of(stage + 1, microbatch))
        elif action.kind is not Kind.WEIGHT:
            held[stage, microbatch] = stages[stage].deferred
            between[own].discard("output")
            between[before].discard("input")
            if stage > 0:
                give((Point.GRADIENT, stage, microbatch), grid.rank_of(stage - 1, microbatch))
        if action.kind in (Kind.WEIGHT, Kind.BACKWARD):
            del held[stage, microbatch]
        for result in needs_of(action, grid.num_stages):
            between[result] -= {"on its way", "here"}
        # A gradient has the shape of the output that it belongs to.
        sources = [at - (point is Point.GRADIENT) for (point, at, _), holders in between.items() if holders]
        yield sum(held.values()) + sum(stages[source].output for source in sources)


def _from_afar(schedule: Schedule, action: Action) -> list[Result]:
    grid = schedule.grid
    own = grid.rank_of(action.stage, action.microbatch)
    needs = needs_of(action, grid.num_stages)
    return [result for result in needs if grid.rank_of(result[1], result[2]) != own]


def measure(world: World) -> dict[str, Any]:
    """Bytes at the end of each action of a step, and the most in between, by schedule."""
    torch.set_num_threads(1)
    found = {}
    for name in NAMES:
        schedule = make_schedule(name, ranks=world.size, microbatches=MICROBATCHES)
        rank, feed = build_rank(world, schedule), Feed()

        def mark(action: Action, begin: float, waited: float, end: float) -> None:
            with record_function(f"{MARK}{action}"):
                pass

        runtime = Runtime(rank.chain, schedule, rank=world.rank, p2p=rank.p2p, observe=mark)
        runtime.step(feed)
        world.barrier()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            runtime.step(feed)
        found[name] = read(profiler)
        world.barrier()
    return found


def read(profiler: profile) -> dict[str, Any]:
    """The allocator's sum at every mark, its peak, and what is left of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]" or event.get("name", "").startswith(MARK)]
    total = peak = 0
    at_ends = []
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["name"] == "[memory]":
            total += event["args"]["Bytes"]
            peak = max(peak, total)
        else:
            at_ends.append(total)
    return {"at_ends": at_ends, "within": peak, "left": total}


def summarise(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for each schedule."""
    rows = {}
    for name in NAMES:
        schedule = make_schedule(name, ranks=len(answers), microbatches=MICROBATCHES)
        stages = stages_alone(schedule)
        predicted, without_sent = (
            [max(predict(schedule, rank, stages, keeps_sent=keeps)) for rank in range(len(answers))]
            for keeps in (True, False)
        )
        measured = [max(answer[name]["at_ends"]) for answer in answers]
        rows[name] = {
            "microbatches_of_a_stage": list(peak_activations(schedule)),
            "mb": [_mb(value) for value in measured],
            "predicted_mb": [_mb(value) for value in predicted],
            "to_predicted": [round(one / other, 4) for one, other in zip(measured, predicted, strict=True)],
            "to_predicted_without_sent": [round(a / b, 4) for a, b in zip(measured, without_sent, strict=True)],
            "within_actions_mb": [_mb(answer[name]["within"]) for answer in answers],
            "left_mb": [_mb(answer[name]["left"]) for answer in answers],
        }
    return rows


def _mb(num_bytes: int) -> float:
    return round(num_bytes / 1e6, 3)
