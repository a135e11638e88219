"""A simulated run as a run directory: the events, plan and summary that a real run leaves, so that one reader reads both.

Nothing is trained: losses, norms and rates are NaN in events and null in the summary, which says ``"simulated": true``. Times
are simulated too and count from 0. There is a file for one rank of those that are alike, or for every rank where that is asked
for.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.core.errors import RequestError, RunError
from shoal.core.events import (
    CheckpointSaved,
    Event,
    MemoryMeasured,
    RankFailed,
    RoundDone,
    RunEnded,
    RunStarted,
    StepDone,
)
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir, replace_text
from shoal.planner.simulation.conditions import Array, place_of
from shoal.planner.simulation.goodput import Goodput
from shoal.planner.simulation.result import SimulatedStep
from shoal.planner.simulation.run_times import SimulatedTimes, times_of
from shoal.planner.simulation.trace import streams_of
from shoal.telemetry.eventlog import encode_event
from shoal.telemetry.measurements import Forecast

Timed = tuple[float, Event]
_EVENTS_AT_MOST = 5_000_000


@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """What the events of a run say, beyond its times."""

    samples: int
    """Of a step."""
    tokens: int
    weight_bytes: float = 0.0
    """Of the whole model, in a checkpoint."""
    checkpoint_every: int = 0
    """Steps; 0 for none. A run with failures has its own."""
    checkpoint_seconds: float = 0.0
    memory_every: int = 0
    """Steps between readings of memory, beside the one at the end; 0 for none."""
    spans_every: int = 0
    """Steps between those whose spans are written, and the second; 0 for none."""
    plan: Plan | None = None
    """Of the whole run, where the simulated step is one island's; None: the step's."""
    rounds: Mapping[int, float] = field(default_factory=dict)
    """Rounds of islands: seconds, by the steps that were done when they were held."""


def write_run(
    folder: Path,
    simulated: SimulatedStep,
    seconds: Array,
    *,
    numbers: RunNumbers,
    goodput: Goodput | None = None,
    expand: bool = False,
) -> int:
    """Write the events, the plan and the summary of a run, and say how many ranks have a file.

    Args:
        folder: the run directory; must not hold a run.
        simulated: a step of it.
        seconds: of every step.
        numbers: the rest.
        goodput: its failures, where it has any.
        expand: a file for every rank.

    Raises:
        RequestError: a run is there already, or there would be too many events.
        RunError: the disk refused.
    """
    run_dir = RunDir(folder)
    if not run_dir.is_empty or run_dir.summary.exists() or (folder / "events").exists():
        raise RequestError(f"{folder} holds a run already; name another folder, or remove that one")
    ranks = _ranks(simulated, expand=expand)
    # Steps that are lost are written twice: those of the run's whole time are counted.
    num_steps = len(seconds) if goodput is None else round(goodput.wall_seconds / float(seconds.mean()))
    if len(ranks) * num_steps > _EVENTS_AT_MOST:
        raise RequestError(
            f"{len(ranks)} ranks with {num_steps} steps each are {len(ranks) * num_steps} events, and at most "
            f"{_EVENTS_AT_MOST} are written; play fewer steps, or write one rank of those that are alike"
        )
    events = list(_run_events(simulated, seconds, numbers=numbers, goodput=goodput, run_dir=run_dir))
    try:
        run_dir.events(0).parent.mkdir(parents=True, exist_ok=True)
        lanes = {(lane.place, lane.group): times_of(simulated, lane) for lane in streams_of(simulated)}
        told = _forecast(simulated)
        for rank, place, group in ranks:
            own = _with_memory(events, simulated, place, every=numbers.memory_every)
            own = _with_times(own, lanes.get((place, group)), told if rank == 0 else None, every=numbers.spans_every)
            lines = (encode_event(event, rank=rank, wall_time=at) for at, event in own)
            run_dir.events(rank).write_bytes(b"".join(lines))
        failed = list(_failures(goodput)) if goodput is not None else []
        if failed:
            lines = (encode_event(event, rank=None, wall_time=at) for at, event in failed)
            run_dir.supervisor_events.write_bytes(b"".join(lines))
        whole = numbers.plan or simulated.plan
        plan = {"plan": str(whole), **whole.as_dict()}
        replace_text(run_dir.plan, json.dumps(plan, indent=2) + "\n")
        replace_text(run_dir.summary, json.dumps(_summary(simulated, events, len(seconds), numbers), indent=2) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror}; name another folder") from error
    return len(ranks)


def _ranks(simulated: SimulatedStep, *, expand: bool) -> list[tuple[int, int, int]]:
    """Rank, pipeline place and group of replicas of each that gets a file."""
    found = []
    for place in range(simulated.num_places):
        for group in range(simulated.num_groups):
            ranks = simulated.ranks(place, group)
            found += [(rank, place, group) for rank in (ranks if expand else ranks[:1])]
    return sorted(found)


def _run_events(
    simulated: SimulatedStep, seconds: Array, *, numbers: RunNumbers, goodput: Goodput | None, run_dir: RunDir
) -> Iterator[Timed]:
    """What happens to a rank, in order."""
    plan = numbers.plan or simulated.plan
    number_of = {at: number for number, at in enumerate(sorted(numbers.rounds))}
    now, attempts = 0.0, _attempts(goodput, len(seconds))
    every = numbers.checkpoint_every if goodput is None else goodput.interval_steps
    for generation, (start, first, done, end) in enumerate(attempts):
        now = start
        yield now, _started(plan, first, generation)
        at = first
        while at < len(seconds):
            taken = float(seconds[at])
            # Work after the last checkpoint is lost, and done all the same: until the failure, or until the next save began.
            if end is not None and at >= done and (now + taken > end or at >= done + every):
                break
            now, at = now + taken, at + 1
            if at in numbers.rounds:
                # As in a run, whose steps end with their rounds.
                took = numbers.rounds[at]
                yield now, RoundDone(step=at, round=number_of[at], policy=plan.sync, islands=plan.islands, seconds=took)
            yield now, _stepped(at, taken, numbers)
            if every and at <= done and (at % every == 0 or at == len(seconds)):
                now += numbers.checkpoint_seconds
                yield now, _saved(at, numbers, run_dir)
    yield now, RunEnded(status="completed", step=len(seconds), seconds=now)


def _attempts(goodput: Goodput | None, num_steps: int) -> Sequence[tuple[float, int, int, float | None]]:
    """Start, steps done then, steps that last, and end where a failure ends it."""
    if goodput is None:
        return [(0.0, 0, num_steps, None)]
    return [
        (each.start, each.first_step, each.first_step + each.num_steps, None if each.failed_rank is None else each.end)
        for each in goodput.attempts
    ]


def _failures(goodput: Goodput) -> Iterator[Timed]:
    for generation, attempt in enumerate(goodput.attempts):
        if attempt.failed_rank is not None:
            yield (
                attempt.end,
                RankFailed(
                    culprit_rank=attempt.failed_rank,
                    step=attempt.first_step + attempt.num_steps,
                    phase="simulated",
                    cause="a simulated failure",
                    generation=generation,
                    restarting=True,
                ),
            )


def _started(plan: Plan, step: int, generation: int) -> RunStarted:
    # Nobody runs: 0 is no process's id.
    return RunStarted(plan=str(plan), world_size=plan.world_size, step=step, generation=generation, pid=0)


def _stepped(step: int, seconds: float, numbers: RunNumbers) -> StepDone:
    return StepDone(
        step=step,
        loss=math.nan,
        lr=math.nan,
        grad_norm=math.nan,
        samples=numbers.samples,
        tokens=numbers.tokens,
        seconds=seconds,
        data_seconds=0.0,
    )


def _saved(step: int, numbers: RunNumbers, run_dir: RunDir) -> CheckpointSaved:
    return CheckpointSaved(
        step=step,
        path=str(run_dir.checkpoints / f"step-{step:08d}"),
        num_bytes=round(numbers.weight_bytes),
        stall_seconds=numbers.checkpoint_seconds,
        write_seconds=numbers.checkpoint_seconds,
    )


def _with_memory(events: Sequence[Timed], simulated: SimulatedStep, place: int, *, every: int) -> Iterator[Timed]:
    """The events of a rank of a place with its memory, as real runs read it (``trainer/loop.py``).

    That is after the first step, at every so many steps, and at the end, which a run of one step reads too: by then it has
    saved and evaluated.
    """
    memory = _memory(simulated, place)
    for at, event in events:
        if memory is not None and isinstance(event, RunEnded):
            yield at, replace(memory, step=event.step)
        yield at, event
        if memory is None or not isinstance(event, StepDone) or not every:
            continue
        if event.step == 1 or event.step % every == 0:
            yield at, replace(memory, step=event.step)


def _with_times(
    events: Iterable[Timed], times: SimulatedTimes | None, told: Forecast | None, *, every: int
) -> Iterator[Timed]:
    """The events of a rank with where its time goes; ``told`` is what the run should cost, after its start."""
    for at, event in events:
        done = event if times is None or not isinstance(event, StepDone) else times.put_into(event)
        yield at, done
        if told is not None and isinstance(event, RunStarted):
            yield at, told
        if times is not None and every and isinstance(done, StepDone) and (done.step == 2 or done.step % every == 0):
            yield at, times.spans(done, begin=at - done.seconds)


def _forecast(simulated: SimulatedStep) -> Forecast:
    """What was played is what is foretold; bytes by a place's first rank."""
    memory = {
        str(simulated.ranks(place, 0)[0]): {
            "weights": event.weights_bytes,
            "gradients": event.gradient_bytes,
            "optimizer": event.optimizer_bytes,
            "other": event.other_bytes,
        }
        for place in range(simulated.num_places)
        if (event := _memory(simulated, place)) is not None
    }
    return Forecast(
        source="simulation",
        step_seconds=float(simulated.step_seconds),
        bubble=float(simulated.bubble) if simulated.num_places > 1 else None,
        memory_bytes=memory or None,
    )


def _memory(simulated: SimulatedStep, place: int) -> MemoryMeasured | None:
    """A reading on a rank of a place, the same at every step; None where no bytes were given."""
    peak = simulated.peak_bytes(place)
    if simulated.needed is None or peak is None:
        return None
    held = simulated.needed.places[place]
    known = held.weights + held.gradients + held.optimizer
    return MemoryMeasured(
        step=0,
        weights_bytes=round(held.weights),
        gradient_bytes=round(held.gradients),
        optimizer_bytes=round(held.optimizer),
        other_bytes=round(peak - known),
        rss_bytes=round(peak),
        peak_rss_bytes=round(peak),
    )


def _summary(
    simulated: SimulatedStep, events: Sequence[Timed], num_steps: int, numbers: RunNumbers
) -> dict[str, object]:
    wall = events[-1][0]
    plan, inside = numbers.plan or simulated.plan, simulated.plan.world_size
    peaks = [simulated.peak_bytes(place) for place in range(simulated.num_places)]
    # Islands are the outermost axis: their ranks follow each other.
    by_rank = [peaks[place_of(simulated.plan, rank % inside)[0]] for rank in range(plan.world_size)]
    return {
        "simulated": True,
        "status": "completed",
        "stopped_by": None,
        "steps": num_steps,
        "skipped_steps": 0,
        "first_loss": None,
        "final_loss": None,
        "validation_loss": None,
        "validation_accuracy": None,
        "baseline_loss": None,
        "tokens_per_s": num_steps * numbers.tokens / wall if wall else None,
        "samples_per_s": num_steps * numbers.samples / wall if wall else None,
        "wall_s": wall,
        "world_size": plan.world_size,
        "plan": str(plan),
        "peak_rss_bytes": [round(peak) for peak in by_rank if peak is not None],
        "weights_sha256": None,
        "checkpoint_error": None,
    }
