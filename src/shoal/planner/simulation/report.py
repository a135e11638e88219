"""What a simulation found, as plain values: for the tables of the command line and for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shoal.planner.simulation.conditions import Array
from shoal.planner.simulation.goodput import (
    Failures,
    Goodput,
    daly_interval,
    expected_goodput,
    expected_loss,
    young_interval,
)
from shoal.planner.simulation.local_sgd import LocalUpdates, Pace, Rounds, pace_of, periods_around, sweep
from shoal.planner.simulation.result import Segment, SimulatedStep


@dataclass(frozen=True, kw_only=True)
class PlaceReport:
    """The ranks of one pipeline place."""

    place: int
    num_ranks: int
    stages: tuple[int, ...]
    busy_seconds: float
    """Of its slowest replica."""
    idle_seconds: float
    """Of the same, within the pipeline's time."""
    mean_busy_seconds: float
    """Over all replicas."""
    mean_idle_seconds: float
    """The same; over all places it is what ``bubble`` is a share of."""
    memory: Mapping[str, float] | None
    """Bytes of weights, gradients, optimizer, other and activations at their fullest; ``peak`` is all of it."""


def report_places(simulated: SimulatedStep) -> tuple[PlaceReport, ...]:
    """Every place of the pipeline."""
    schedule, found = simulated.order.schedule, []
    for place in range(simulated.num_places):
        # An asynchronous pipeline is played for several steps; one of them is reported.
        played = schedule.grid.num_microbatches // simulated.parts.microbatches
        each = [simulated.busy(place, group) / played for group in range(simulated.num_groups)]
        busy, mean = max(each), float(np.average(each, weights=[len(group) for group in simulated.folded.groups]))
        whole = simulated.window[1] - simulated.window[0] if simulated.is_asynchronous else simulated.makespan
        found.append(
            PlaceReport(
                place=place,
                num_ranks=sum(len(simulated.ranks(place, group)) for group in range(simulated.num_groups)),
                stages=schedule.grid.stages_of(place),
                busy_seconds=busy,
                idle_seconds=max(0.0, whole - busy),
                mean_busy_seconds=mean,
                mean_idle_seconds=max(0.0, whole - mean),
                memory=_memory(simulated, place),
            )
        )
    return tuple(found)


def _memory(simulated: SimulatedStep, place: int) -> dict[str, float] | None:
    peak = simulated.peak_bytes(place)
    if simulated.needed is None or peak is None:
        return None
    held = simulated.needed.places[place]
    return {**asdict(held), "activations": peak - held.constant, "peak": peak}


def describe_steps(seconds: Array) -> dict[str, float]:
    """Mean and spread of many steps."""
    return {
        "count": len(seconds),
        "mean": float(seconds.mean()),
        "p50": float(np.quantile(seconds, 0.5)),
        "p90": float(np.quantile(seconds, 0.9)),
        "p99": float(np.quantile(seconds, 0.99)),
        "max": float(seconds.max()),
    }


def describe_path(path: Sequence[Segment]) -> list[dict[str, Any]]:
    """The critical path, neighbours of one kind on one place together."""
    found: list[dict[str, Any]] = []
    for piece in path:
        if found and (found[-1]["what"], found[-1]["place"]) == (piece.what, piece.place):
            found[-1]["end"] = piece.end
        else:
            found.append({"what": piece.what, "place": piece.place, "start": piece.start, "end": piece.end})
    return found


def describe_step(simulated: SimulatedStep, seconds: Array, *, tokens: float) -> dict[str, Any]:
    """The step itself."""
    mean = float(seconds.mean())
    return {
        "plan": str(simulated.plan),
        "world_size": simulated.plan.world_size,
        "schedule": simulated.order.schedule.name if simulated.plan.pp > 1 else None,
        "microbatches": simulated.parts.microbatches,
        "tokens_per_step": tokens,
        "step_seconds": mean,
        "tokens_per_second": tokens / mean if mean else None,
        "steps": describe_steps(seconds),
        "pipeline_seconds": simulated.step_seconds - simulated.parts.fixed
        if simulated.is_asynchronous
        else simulated.makespan,
        "bubble": simulated.bubble,
        "breakdown": simulated.breakdown,
        "exposed": simulated.exposed,
        "places": [asdict(place) for place in report_places(simulated)],
        "replicas": [
            {"replicas": len(group), "first": group[0], "pipeline_seconds": float(simulated.last[:, number].max())}
            for number, group in enumerate(simulated.folded.groups)
        ],
        "critical_path": describe_path(simulated.critical_path),
    }


def describe_goodput(failures: Failures, run: Goodput, *, step_seconds: float) -> dict[str, Any]:
    """A long run with failures: what was played, beside what is expected."""
    work = run.interval_steps * step_seconds
    return {
        "device_mtbf_seconds": failures.device_mtbf,
        "mtbf_seconds": failures.mtbf,
        "restart_seconds_each": failures.restart,
        "checkpoint_seconds_each": failures.checkpoint,
        "interval_steps": run.interval_steps,
        "interval_seconds": work,
        "young_interval_seconds": young_interval(failures),
        "daly_interval_seconds": daly_interval(failures),
        "goodput": run.goodput,
        "expected_goodput": expected_goodput(work, failures),
        "loss_per_failure_seconds": run.loss_per_failure,
        "expected_loss_per_failure_seconds": expected_loss(work, failures),
        "failures": run.num_failures,
        "checkpoints": run.num_checkpoints,
        "wall_seconds": run.wall_seconds,
        "useful_seconds": run.useful_seconds,
        "lost_seconds": run.lost_seconds,
        "restart_seconds": run.restart_seconds,
        "checkpoint_seconds": run.checkpoint_seconds,
    }


def describe_sites(updates: LocalUpdates, played: Pace, *, step_seconds: float, tokens: float) -> dict[str, Any]:
    """Sites that average seldom: as played, and for other periods as they would be if all were alike and steady."""
    return {
        "sites": updates.num_sites,
        "bytes_per_sync": updates.num_bytes,
        "compression": updates.compression,
        "bandwidth": updates.bandwidth,
        "latency": updates.latency,
        "sync_seconds": updates.sync_seconds,
        "tokens_per_second": tokens * played.steps_per_second,
        "steady": asdict(pace_of(step_seconds, updates)),
        "by_period": [asdict(pace) for pace in sweep(step_seconds, updates, periods_around(updates.period))],
        **asdict(played),
    }


def describe_islands(
    rounds: Rounds, played: Pace, *, policy: str, step_seconds: float, tokens: float
) -> dict[str, Any]:
    """Islands that agree by a policy: as played, and, where a round is of the whole model, with other periods.

    Those are for islands that are alike and steady; what islands tell each other between rounds is left out of them.
    """
    largest = max(range(rounds.length), key=lambda at: rounds.sent[at])
    takes = rounds.exchange[largest] + rounds.work[largest] + (rounds.told[largest] if rounds.told else 0.0)
    by_period = []
    if not rounds.delay and rounds.sent.count(rounds.sent[largest]) * played.period <= rounds.length:
        for period in periods_around(played.period):
            whole = period * step_seconds + takes
            pace = Pace(
                period=period,
                steps_per_second=period / whole,
                communication=takes / whole,
                bytes_per_step=rounds.sent[largest] / period,
                longest_seconds=step_seconds + takes,
            )
            by_period.append(asdict(pace))
    return {
        "sites": rounds.num_sites,
        "policy": policy,
        "island_step_seconds": step_seconds,
        "sync_seconds": takes,
        "bytes_per_sync": rounds.sent[largest],
        "delay_steps": rounds.delay,
        "tokens_per_second": tokens * played.steps_per_second,
        "by_period": by_period,
        **asdict(played),
    }
