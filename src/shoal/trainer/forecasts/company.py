"""The ranks of a plan rehearsed at once, a process for each: what a rank's passes take in the company that it will have.

A rank that is timed alone has the caches, the memory bus and the other half of its core to itself, and what it loses when the
others come depends on the plan. So the others come: every process rehearses its own rank of the same plan, and goes on computing
until all have been timed. Of a pipeline, whose ranks also wait for each other, the first rank is then timed alone as well.

The processes are those of a ``Pool`` and meet in a store; the first says which plan is next.
"""

import gc
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # torch types this name only there

from shoal.comm.ledger import Traffic
from shoal.comm.rehearsal import rehearsed_world
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.schedules.action import Action, Kind, parse_action
from shoal.telemetry.memory import GrowthMeter
from shoal.trainer.forecasts.forecast import RankForecast, account_rows, read_trace
from shoal.trainer.forecasts.rehearsal import StepTrace, Subject, replace_stages, trace_rank

_WARM = 1
"""Steps that are not timed: the first makes buffers and lets DDP look."""
_TIMED = 4
_ALONE = 2
_POLL_SECONDS = 0.002
_STEP_SECONDS = 120.0
"""The longest that a process waits for the others before or after a step of theirs."""
_IDLE_SECONDS = 3600.0
"""The longest that a process waits for the next plan; it dies with the first one's launcher anyway."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One rank of a plan, timed while the others computed."""

    seconds: float
    """The median step."""
    cells: Mapping[Action, float]
    """With a pipeline: what each action took; empty without."""
    forecast: RankForecast
    grown_bytes: int | None = None
    """Resident memory that the rank took at most, over what it had without a model; None where the system does not say."""
    slow_down: float | None = None
    """Of the first rank of a pipeline: its cells in company over its cells alone."""


class Company:
    """This process among those that rehearse together.

    Args:
        store: where they meet; nobody else uses it.
        rank: of this process.
        size: ranks of every plan.
        threads: of a rank.
    """

    def __init__(self, store: Store, *, rank: int, size: int, threads: int) -> None:
        self.size = size
        self._store, self._rank, self._threads = store, rank, threads
        self._num_plans = 0
        store.set_timeout(timedelta(seconds=_IDLE_SECONDS))

    def rehearse(self, subject: Subject, plan: Plan) -> list[Timed]:
        """All ranks of a plan, in their order. Only the first process asks; the others ``follow``.

        Raises:
            RequestError: the plan is asynchronous, does not fit the model, or has another number of ranks.
            RunError: a process failed in another way, or did not come.
        """
        if plan.world_size != self.size:
            raise RequestError(f"plan {str(plan)!r} has {plan.world_size} ranks, and {self.size} processes rehearse")
        subject = _cut(subject, plan)
        order = {"plan": str(plan), "stages": subject.recipe.pipeline.stages}
        self._store.set(self._key("plan"), json.dumps(order))
        answers = [self._rehearse(subject, plan)]
        answers += [self._answer_of(rank) for rank in range(1, self.size)]
        self._num_plans += 1
        for kind, error in (("refused", RequestError), ("failed", RunError), ("left", RunError)):
            # Who only left because another did is not the one to listen to.
            if told := [answer[kind] for answer in answers if kind in answer]:
                raise error(told[0])
        return [_read_timed(answer) for answer in answers]

    def _answer_of(self, rank: int) -> dict[str, Any]:
        deadline = Deadline(seconds=_STEP_SECONDS)
        while not self._store.check([self._key(f"answer-{rank}")]):
            deadline.check(f"rank {rank} of the rehearsal to answer")
            time.sleep(_POLL_SECONDS)
        found: dict[str, Any] = json.loads(self._store.get(self._key(f"answer-{rank}")))
        return found

    def follow(self, subject: Subject) -> None:
        """Rehearse what the first process asks for, until it is done."""
        while text := self._store.get(self._key("plan")).decode():
            order = json.loads(text)
            answer = self._rehearse(_with_stages(subject, order["stages"]), Plan.parse(order["plan"]))
            self._store.set(self._key(f"answer-{self._rank}"), json.dumps(answer))
            self._num_plans += 1

    def end(self) -> None:
        """Let the others go."""
        self._store.set(self._key("plan"), "")

    def _rehearse(self, subject: Subject, plan: Plan) -> dict[str, Any]:
        pace = _Pace(self, times_alone=self._rank == 0 and plan.pp > 1)
        before, meter = torch.get_num_threads(), GrowthMeter()
        torch.set_num_threads(self._threads)
        try:
            with rehearsed_world(self._rank, self.size) as world:
                trace = trace_rank(subject, plan, world=world, num_steps=_WARM + _TIMED, go_on=pace.go_on)
            grown = meter.read()
        except (RequestError, RunError) as error:
            # The others must not wait for this one.
            self._store.set(self._key("given-up"), "1")
            kind = "refused" if isinstance(error, RequestError) else "left" if isinstance(error, _Left) else "failed"
            return {kind: str(error)}
        finally:
            torch.set_num_threads(before)
            # Models and their hooks refer to each other; the next plan needs the memory.
            gc.collect()
        if self._rank > 0:
            # Only now: whoever is timed alone must not have the others' tidying beside it.
            self.arrive("still")
        timed = trace.steps[_WARM : _WARM + _TIMED]
        cells = _smooth(timed)
        # What is not in a cell: the update, clipping, what is summed at the end.
        rest = statistics.median(step.seconds - step.cell_seconds for step in timed)
        alone = trace.steps[pace.alone_from :] if pace.alone_from is not None else ()
        return {
            "seconds": rest + sum(cells.values()) if cells else statistics.median(step.seconds for step in timed),
            "cells": {str(action): seconds for action, seconds in cells.items()},
            "traffic": account_rows(read_trace(trace).traffic),
            "state": dict(trace.state),
            "grown_bytes": grown,
            "slow_down": sum(cells.values()) / sum(_smooth(alone).values()) if alone else None,
        }

    def _key(self, name: str) -> str:
        return f"{self._num_plans}/{name}"

    def arrive(self, name: str) -> None:
        """Say that this process is there."""
        self._store.add(self._key(name), 1)

    def are_all(self, name: str) -> bool:
        """Whether all are there.

        Raises:
            RunError: one of them has given up.
        """
        if self._store.check([self._key("given-up")]):
            raise _Left("another rank of the rehearsal has given up")
        return self._store.add(self._key(name), 0) >= self.size

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

    def __init__(self, company: Company, *, times_alone: bool) -> None:
        self.alone_from: int | None = None
        """The first step that nobody computed beside; None where there is none."""
        self._company, self._times_alone = company, times_alone
        self._deadline: Deadline | None = None

    def go_on(self, number: int) -> bool:
        """Whether step ``number`` is to be taken."""
        if self.alone_from is not None:
            return number < self.alone_from + _ALONE
        if number == _WARM:
            self._company.arrive("ready")
            self._company.wait_for_all("ready")
        if number == _WARM + _TIMED:
            self._company.arrive("timed")
            self._deadline = Deadline(seconds=_STEP_SECONDS)
        if number < _WARM + _TIMED:
            return True
        if not self._company.are_all("timed"):
            assert self._deadline is not None
            self._deadline.check("the other ranks of the rehearsal to be timed")
            return True
        if not self._times_alone:
            return False
        self._company.arrive("still")
        self._company.wait_for_all("still")
        self.alone_from = number
        return True


def _cut(subject: Subject, plan: Plan) -> Subject:
    """With its stages said by name where they would be measured: every process would find others."""
    pipeline = subject.recipe.pipeline
    if plan.pp == 1 or pipeline.balance != "measured" or pipeline.stages:
        return subject
    return replace(subject, recipe=replace_stages(subject.recipe, subject.stages(plan)))


def _with_stages(subject: Subject, stages: list[str] | None) -> Subject:
    pipeline = subject.recipe.pipeline.model_copy(update={"stages": stages})
    return replace(subject, recipe=subject.recipe.model_copy(update={"pipeline": pipeline}))


def _smooth(steps: tuple[StepTrace, ...]) -> dict[Action, float]:
    """What an action takes: the median over all microbatches of its stage and kind, which do the same."""
    by_kind: dict[tuple[Kind, int], list[float]] = {}
    for step in steps:
        for cell in step.cells:
            by_kind.setdefault((cell.action.kind, cell.action.stage), []).append(cell.seconds)
    return {cell.action: statistics.median(by_kind[cell.action.kind, cell.action.stage]) for cell in steps[0].cells}


def _read_timed(answer: Mapping[str, Any]) -> Timed:
    traffic = {
        (axis, operation): Traffic(calls=calls, num_bytes=num_bytes)
        for (axis, _, operation), (calls, num_bytes) in (
            (key.partition(" "), moved) for key, moved in answer["traffic"].items()
        )
    }
    return Timed(
        seconds=answer["seconds"],
        cells={parse_action(text): seconds for text, seconds in answer["cells"].items()},
        forecast=RankForecast(traffic=traffic, state=answer["state"]),
        grown_bytes=answer["grown_bytes"],
        slow_down=answer["slow_down"],
    )
