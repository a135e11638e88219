"""The ranks of a plan rehearsed together, a process for each, so that each is timed beside the others.

A rank that is timed alone has the caches, the memory bus and the other half of its core to itself, and what it loses when the
others come depends on the plan. So the others come: every process rehearses its own rank of the same plan, and goes on computing
until all have been timed. Of a pipeline, whose ranks also wait for each other, the first rank is then timed alone as well.

The processes are those of a ``RehearsalPool``, which gives all of them the same plan; they meet in a store. Every one answers
with a page of JSON, and the pool makes a prediction of all answers together.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # torch types this name only there

from shoal.comm.rehearsal import rehearsed_world
from shoal.comm.trafficcounter import traffic_rows
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.schedules.schedule import Action, Kind
from shoal.telemetry.memory import GrowthMeter, is_out_of_memory
from shoal.tuning.rehearsal import StepTrace, Subject, replace_stages, trace_rank

_WARM = 1
"""Steps that are not timed: the first makes buffers and lets DDP look."""
_ALONE = 2
_POLL_SECONDS = 0.002
_GIVEN_UP = "given-up"
_STEP_SECONDS = 120.0
"""The longest that a process waits for the others before or after a step of theirs."""


class JointRehearsal:
    """This process among those that rehearse one plan together.

    Args:
        store: where they meet; nobody else uses it.
        rank: of this process.
        size: ranks of the plan.
        threads: of a rank.
        num_timed: steps that are timed.
    """

    def __init__(self, store: Store, *, rank: int, size: int, threads: int, num_timed: int) -> None:
        self.size = size
        self.num_timed = num_timed
        self._store, self._rank, self._threads = store, rank, threads
        store.set_timeout(timedelta(seconds=_STEP_SECONDS))

    def rehearse(self, subject: Subject, plan: Plan) -> dict[str, Any]:
        """What this rank of a plan took, moved and held; all processes call it.

        Where it could not be done the answer has one word, and why: ``refused`` (the plan does not fit the model), ``no_memory``,
        ``failed``, or ``left``, when it was another rank that gave up.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._rehearse(self._cut(subject, plan), plan)
        except (RequestError, RunError, RuntimeError, MemoryError) as error:
            # The others must not wait for this one.
            self._store.set(_GIVEN_UP, "1")
            if isinstance(error, RequestError):
                return {"refused": str(error)}
            if is_out_of_memory(error):
                return {"no_memory": str(error).splitlines()[0]}
            if isinstance(error, RunError):
                return {"left" if isinstance(error, _Left) else "failed": str(error)}
            raise
        finally:
            torch.set_num_threads(before)

    def _rehearse(self, subject: Subject, plan: Plan) -> dict[str, Any]:
        pace = _Pace(self, times_alone=self._rank == 0 and plan.pp > 1)
        meter = GrowthMeter()
        with rehearsed_world(self._rank, self.size) as world:
            trace = trace_rank(subject, plan, world=world, num_steps=_WARM + self.num_timed, go_on=pace.go_on)
        grown = meter.read()
        if self._rank > 0:
            # Only now: the rank that is timed alone must not have the others' tidying beside it.
            self.arrive("still")
        timed = trace.steps[_WARM : _WARM + self.num_timed]
        cells = _smooth(timed)
        # What is not in a cell: the update, clipping, what is summed at the end.
        rest = statistics.median(step.seconds - step.cell_seconds for step in timed)
        alone = trace.steps[pace.alone_from :] if pace.alone_from is not None else ()
        return {
            "seconds": rest + sum(cells.values()) if cells else statistics.median(step.seconds for step in timed),
            "cells": {str(action): seconds for action, seconds in cells.items()},
            "traffic": traffic_rows(trace.traffic),
            "state": dict(trace.state),
            "grown_bytes": grown,
            "slow_down": sum(cells.values()) / sum(_smooth(alone).values()) if alone else None,
        }

    def _cut(self, subject: Subject, plan: Plan) -> Subject:
        """With its stages said by name, by the first process, where they would be measured: every process would find others."""
        pipeline = subject.recipe.pipeline
        if plan.pp == 1 or pipeline.balance != "measured" or pipeline.stages:
            return subject
        if self._rank == 0:
            recipe = replace_stages(subject.recipe, subject.stages(plan))
            self._store.set("stages", json.dumps(recipe.pipeline.stages))
            return replace(subject, recipe=recipe)
        deadline = Deadline(seconds=_STEP_SECONDS)
        while not self._store.check(["stages"]):
            self._check_that_none_left()
            deadline.check("the first process to measure where stages begin")
            time.sleep(_POLL_SECONDS)
        pipeline = pipeline.model_copy(update={"stages": json.loads(self._store.get("stages"))})
        return replace(subject, recipe=subject.recipe.model_copy(update={"pipeline": pipeline}))

    def arrive(self, name: str) -> None:
        """Say that this process is there."""
        self._store.add(name, 1)

    def are_all(self, name: str) -> bool:
        """Whether all are there.

        Raises:
            RunError: one of them has given up.
        """
        self._check_that_none_left()
        return self._store.add(name, 0) >= self.size

    def _check_that_none_left(self) -> None:
        if self._store.check([_GIVEN_UP]):
            raise _Left("another rank of the rehearsal has given up")

    def wait_for_all(self, name: str) -> None:
        """Wait until all are there, without computing."""
        deadline = Deadline(seconds=_STEP_SECONDS)
        while not self.are_all(name):
            deadline.check(f"the other {self.size - 1} processes of the rehearsal to be {name}")
            time.sleep(_POLL_SECONDS)


class _Left(RunError):
    """This rank stopped because another did."""


class _Pace:
    """Says after every step whether there is another: all begin together, and none stops before all were timed."""

    def __init__(self, rehearsal: JointRehearsal, *, times_alone: bool) -> None:
        self.alone_from: int | None = None
        """The first step that nobody computed beside; None where there is none."""
        self._rehearsal, self._times_alone = rehearsal, times_alone
        self._last = _WARM + rehearsal.num_timed
        self._deadline: Deadline | None = None

    def go_on(self, number: int) -> bool:
        """Whether step ``number`` is to be taken."""
        if self.alone_from is not None:
            return number < self.alone_from + _ALONE
        if number == _WARM:
            self._rehearsal.arrive("ready")
            self._rehearsal.wait_for_all("ready")
        if number == self._last:
            self._rehearsal.arrive("timed")
            self._deadline = Deadline(seconds=_STEP_SECONDS)
        if number < self._last:
            return True
        if not self._rehearsal.are_all("timed"):
            assert self._deadline is not None
            self._deadline.check("the other ranks of the rehearsal to be timed")
            return True
        if not self._times_alone:
            return False
        self._rehearsal.arrive("still")
        self._rehearsal.wait_for_all("still")
        self.alone_from = number
        return True


def _smooth(steps: Sequence[StepTrace]) -> dict[Action, float]:
    """What an action takes: the median over all microbatches of its stage and kind, which do the same."""
    by_kind: dict[tuple[Kind, int], list[float]] = {}
    for step in steps:
        for cell in step.cells:
            by_kind.setdefault((cell.action.kind, cell.action.stage), []).append(cell.seconds)
    return {cell.action: statistics.median(by_kind[cell.action.kind, cell.action.stage]) for cell in steps[0].cells}
