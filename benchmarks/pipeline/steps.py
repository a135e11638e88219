"""Step times beside torch's, and bubbles beside their prediction, from the same steps."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from bubble import Bubble, bubble_of
from workload import MICROBATCHES, TORCH_SCHEDULES, shoal_step, torch_step

from shoal.comm.world import World
from shoal.schedules.catalogue import make_schedule

NAMES = (*TORCH_SCHEDULES, "zb-h1", "zbv", "v-min", "chimera")


def race(world: World, rounds: int, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Seconds per step of each contender, taking turns, and every action of ours."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        ours, record = shoal_step(world, make_schedule(name, ranks=world.size, microbatches=MICROBATCHES))
        contenders = {"shoal": ours}
        if name in TORCH_SCHEDULES:
            contenders["torch"] = torch_step(world, name)
        for step in contenders.values():
            step()
            step()
        record.give()
        seconds: dict[str, list[float]] = {who: [] for who in contenders}
        taken = []
        for turn in range(rounds):
            order = list(contenders.items())
            for who, step in order if turn % 2 else reversed(order):
                world.barrier()
                started = time.perf_counter()
                step()
                world.barrier()
                seconds[who].append(time.perf_counter() - started)
            taken.append(record.give())
        found[name] = {"seconds": seconds, "taken": taken}
    return found


def summarise(answers: list[dict[str, Any]], names: Sequence[str] = NAMES) -> dict[str, Any]:
    """One row for each schedule."""
    rows: dict[str, Any] = {}
    for name in names:
        schedule = make_schedule(name, ranks=len(answers), microbatches=MICROBATCHES)
        steps = zip(*(answer[name]["taken"] for answer in answers), strict=True)
        rows[name] = _times(answers[0][name]["seconds"]) | _bubbles([bubble_of(schedule, list(step)) for step in steps])
    return rows


def _times(seconds: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"ms": _ms(seconds["shoal"])}
    if "torch" in seconds:
        ratios = [one / other for one, other in zip(seconds["shoal"], seconds["torch"], strict=True)]
        row |= {"torch_ms": _ms(seconds["torch"]), "to_torch": round(statistics.median(ratios), 3)}
        row |= {"to_torch_by_round": [round(ratio, 3) for ratio in ratios]}
    return row


def _bubbles(bubbles: list[Bubble]) -> dict[str, Any]:
    def middle(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    return {
        "bubble": middle([one.measured for one in bubbles]),
        "predicted_bubble": middle([one.predicted for one in bubbles]),
        "difference": middle([one.measured - one.predicted for one in bubbles]),
        "difference_by_round": [round(one.measured - one.predicted, 4) for one in bubbles],
        "difference_by_rank": [middle(list(values)) for values in zip(*(one.by_rank for one in bubbles), strict=True)],
        "jitter": middle([one.jitter for one in bubbles]),
        "rest": middle([one.rest for one in bubbles]),
        "makespan_ms": _ms([one.makespan for one in bubbles]),
        "priced_ms": _ms([one.priced for one in bubbles]),
        "transfer_ms": _ms([one.transfer for one in bubbles]),
    }


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)
