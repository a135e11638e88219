"""The update log of a run: who does which work unit, and which pushes made which update. A deterministic state machine.

Inputs are ``join``, ``leave``, ``take``, ``commit``, ``advance``, ``tick``, ``trim`` and ``rebase``; time comes in as an
argument. The same inputs in the same order give the same update log, bit for bit, which is how a backup keeps a copy of it. What
it writes down is a log of updates: update r is update number r on every shard, so all shards agree on what an update is under
every rule.

A worker's clock does not exist here. A step is done when its shares are, whoever computed them, so a dead worker holds nobody up
and a newcomer begins where the others are.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from shoal.core.errors import RunError
from shoal.core.updaterule import UpdateRule
from shoal.paramserver import consistency
from shoal.paramserver.consistency import Aggregate, Lateness
from shoal.paramserver.log import queue as members
from shoal.paramserver.log.ownshares import OwnShares
from shoal.paramserver.log.queue import Member, WorkQueue
from shoal.paramserver.receipts import UnitReceipts
from shoal.paramserver.records import (
    NOTHING,
    Answer,
    Change,
    Committed,
    Dropped,
    Duplicate,
    Entry,
    Finished,
    PushId,
    PushRecord,
    Refused,
    Taken,
    Update,
    Wait,
    WorkUnit,
)


class LogTrimmed(RunError):
    """Someone asks for updates that are no longer kept; a snapshot of the shard has to take their place."""


class UpdateLog:
    """See the module. Not for two threads at once."""

    def __init__(
        self,
        *,
        rule: UpdateRule,
        workers: int,
        steps: int,
        lateness: Lateness | None = None,
        duplicate_after: float | None = None,
        warm_start: int = 0,
        aggregate: Aggregate = "average",
        mean_steps: float = 1.0,
        own_seconds: float = 0.0,
        units_per_epoch: int = 0,
    ) -> None:
        """Open an empty update log.

        Args:
            rule: any; it is resolved for these workers.
            workers: shares of a step, however many workers are alive.
            steps: of the whole run.
            lateness: what becomes of old gradients.
            duplicate_after: a work unit that is in hand for longer than this many mean step times goes to an idle worker as well,
                and the first commit counts (the backup tasks of Dean et al. 2012, section 4.2). None: never.
            warm_start: work units that must be in an update before anyone but the first worker, by index, may begin (section 4.1
                there).
            aggregate: what the pushes of an update count.
            mean_steps: local steps of a work unit, over all workers of the plan.
            own_seconds: how long the shares of workers wait for those that have not come; 0: nobody has own ones.
            units_per_epoch: work units whose rows are an epoch, of which there is a receipt; 0: of none.
        """
        self.rule = rule.resolve(workers)
        self.workers = workers
        self.lateness = lateness or Lateness()
        self.duplicate_after = duplicate_after
        self.warm_start = warm_start
        self.aggregate = aggregate
        self.mean_steps = mean_steps
        self.own_shares = OwnShares(workers=workers, seconds=own_seconds)
        self.receipts = UnitReceipts(units_per_epoch=units_per_epoch)
        self.memory = ""
        """What whoever makes the steps from outside has to remember (``advance``)."""
        self.num_duplicates = 0
        self.num_dropped = 0
        self.units = WorkQueue(workers=workers, steps=steps)
        """Changed here alone."""
        self._members: dict[str, Member] = {}
        self._gone: list[str] = []
        self._pending: list[PushRecord] = []
        self._first_arrival: float | None = None
        self._unused: list[PushId] = []
        self._log: list[Update] = []
        self._trimmed = 0

    @property
    def closed(self) -> int:
        """Updates that are closed: the newest version."""
        return self._trimmed + len(self._log)

    @property
    def is_finished(self) -> bool:
        """True when every work unit is done and in an update."""
        return self.units.is_over and not self._pending

    @property
    def members(self) -> Mapping[str, Member]:
        """The workers that are alive."""
        return self._members

    @property
    def gone(self) -> tuple[str, ...]:
        """The workers that have left, in the order in which they did, as far as they are remembered."""
        return tuple(self._gone)

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.units.steps

    @property
    def num_done(self) -> int:
        """Work units that are done, of ``steps * workers``."""
        return self.units.num_done

    @property
    def num_in_hand(self) -> int:
        """Work units that somebody does."""
        return len(self.units.in_hand())

    @property
    def num_settled(self) -> int:
        """Work units that are in an update: done, and not waiting for one."""
        return self.num_done - sum(len(one.units) for one in self._pending)

    @property
    def first_kept(self) -> int:
        """The first update that the log still has."""
        return self._trimmed

    def committed(self, worker: str) -> frozenset[int]:
        """Numbers of a worker's pushes that are in the kept log or wait for their update: what a shard must not discard."""
        in_updates = [entry.number for record in self._log for entry in record.entries if entry.worker == worker]
        return frozenset(in_updates + [one.number for one in self._pending if one.worker == worker])

    def log(self, since: int) -> tuple[Update, ...]:
        """Updates from number ``since`` on.

        Raises:
            LogTrimmed: the log no longer goes so far back.
        """
        if since < self._trimmed:
            raise LogTrimmed(
                f"update {since} is asked for, and the log begins at {self._trimmed}; start from a snapshot of the shard"
            )
        return tuple(self._log[since - self._trimmed :])

    def deadline(self) -> float | None:
        """When ``tick`` has something to do; None: not by time."""
        if self._first_arrival is None:
            return None
        times = [member.step_seconds for member in self._members.values() if member.num_timed]
        return consistency.update_deadline(self.rule, self._first_arrival, times)

    def join(self, worker: str, index: int, now: float) -> Change | Refused:
        """A worker is there; one that is there already stays as it is."""
        if worker in self._gone:
            # What it committed is no longer remembered, so what it sends again could count twice.
            return Refused(reason=f"worker {worker} has left; join again as a new instance")
        self._members.setdefault(worker, Member(index=index))
        self.own_shares.join(index, now)
        return NOTHING

    def leave(self, worker: str, now: float) -> Change:
        """A worker is gone: what it did is todo again, what it committed stays, what it may commit from now on is refused."""
        if self._members.pop(worker, None) is None:
            return NOTHING
        self._gone.append(worker)
        del self._gone[: -members.GONE_KEPT]
        freed = self.units.release(worker, self.units.held_by(worker))
        return self._settle(freed=freed)

    def take(self, worker: str, now: float, held: Collection[int] | None = None) -> Taken:
        """The next work unit for a worker.

        Args:
            worker: who asks.
            now: the time.
            held: work units that the worker knows it has taken and not committed. One that the update log gave it and that is not
                among these was lost on its way, and is given again. None: take the worker to know all of them.
        """
        member = self._members.get(worker)
        if member is None:
            return Refused(reason=f"worker {worker} is not a member; join first")
        own = self.units.held_by(worker)
        lost = [] if held is None else [unit for unit in own if unit not in held]
        if lost:
            return self._unit(lost[0], member)
        if self.is_finished:
            return Finished()
        if consistency.waits_for_update(self.rule) and any(one.worker == worker for one in self._pending):
            return Wait(reason=self._open_update(), on=self._busy(), until=self.deadline())
        if self.num_settled < self.warm_start and member.index > min(one.index for one in self._members.values()):
            text = f"the warm start: {self.num_settled} of {self.warm_start} work units of the first worker are in an update"
            return Wait(reason=text, must_commit=bool(own))
        step = self.units.next_step
        if step is not None and consistency.may_take(self.rule, step, self.closed):
            reserved = self.own_shares.reserved([one.index for one in self._members.values()], now)
            unit = self.units.give(worker, member.index, now, reserved)
            text = f"the workers that the rest of step {step} belongs to"
            return Wait(reason=text, until=self.own_shares.until(now)) if unit is None else self._unit(unit, member)
        return self._nothing_to_take(worker, member, own, now)

    def commit(self, push: PushRecord, now: float) -> Answer:
        """A worker's push is stored on every shard, and is now part of the run or is not: once and for all."""
        worker = push.worker
        member = self._members.get(worker)
        if member is None:
            return Refused(reason=f"worker {worker} is not a member; its push {push.number} is discarded")
        known = member.outcome(push.number)
        if known is not None:
            return members.answer_again(known)
        if push.number < member.oldest:
            # It may have been kept or not; so the shards are told nothing of it.
            text = f"its number {push.number} is below {member.oldest}, the oldest of this worker that is remembered"
            return Refused(reason=text)
        problem = self._problem(push)
        if problem is not None:
            return Refused(reason=problem, change=self._give_up(push, members.REFUSED, release=False))
        if any(self.units.is_done(unit) for unit in push.units):
            self.num_duplicates += 1
            return Duplicate(change=self._give_up(push, members.DUPLICATE))
        tau = consistency.age(self.rule, push, workers=self.workers, closed=self.closed)
        if not self.rule.is_stepwise and consistency.is_too_old(self.lateness, tau):
            self.num_dropped += 1
            return Dropped(age=tau, change=self._give_up(push, members.DROPPED))
        number = consistency.update_of(self.rule, push, workers=self.workers, closed=self.closed)
        self._members[worker] = member.timed(self._seconds_each(push, now)).remember(push.number, number)
        for unit in push.units:
            self.units.finish(unit)
        self._pending.append(push)
        if self._first_arrival is None:
            self._first_arrival = now
        return Committed(update=number, change=self._settle())

    @property
    def has_units_under_way(self) -> bool:
        """Steps are made of work units here, or some are still to do: no program on the shards can make the next step."""
        return self.rule.kind != "lbfgs" or not self.units.is_idle

    def advance(self, made: PushRecord, memory: str) -> Change:
        """A step was made by programs on the shards (L-BFGS): an update without pushes, and what its maker remembers.

        Args:
            made: its number is the step's, its gradient is nowhere. One that is known changes nothing.
            memory: takes the place of the one before, together with the update.
        """
        if made.number != self.closed or self.is_finished:
            return NOTHING
        self.units.pass_over()
        self.memory = memory
        record = Update(
            number=made.number,
            entries=(),
            loss=made.loss,
            weight=made.weight,
            samples=made.samples,
            first_step=made.number,
            last_step=made.number,
            staleness=0,
            settled=(made.number + 1) * self.workers,
            num_duplicates=made.num_duplicates,
        )
        self._log.append(record)
        return Change(closed=(record,), is_finished=self.is_finished)

    def tick(self, now: float) -> Change:
        """Time has passed: closes the open update if its deadline is over."""
        deadline = self.deadline()
        return self._settle(is_due=True) if deadline is not None and now >= deadline else NOTHING

    def rebase(self, now: float) -> None:
        """The update log has a new log leader whose clock shows ``now``: every wait begins again."""
        self.units.rebase(now)
        if self._first_arrival is not None:
            self._first_arrival = now
        self.own_shares.rebase(now)

    def restart(self, now: float) -> None:
        """Go on from a checkpoint, which has the weights of version ``closed`` and nothing that came after.

        All workers are gone, and so are the gradients that waited for their update: their work units are todo again.
        """
        for one in self._pending:
            for unit in one.units:
                self.units.reopen(unit)
        self._pending, self._unused, self._first_arrival = [], [], None
        for worker in list(self._members):
            self.leave(worker, now)

    def trim(self, below: int) -> None:
        """Forget the updates under this number, which every replica has applied."""
        count = min(max(0, below - self._trimmed), len(self._log))
        del self._log[:count]
        self._trimmed += count

    def export(self) -> dict[str, Any]:
        """The whole update log, for ``json``: a checkpoint, or a new backup."""
        return {
            "rule": str(self.rule),
            "lateness": msgspec.to_builtins(self.lateness),
            "duplicate_after": self.duplicate_after,
            "warm_start": self.warm_start,
            "aggregate": self.aggregate,
            "mean_steps": self.mean_steps,
            "own_shares": self.own_shares.export(),
            "receipts": self.receipts.export(),
            "memory": self.memory,
            "duplicates": self.num_duplicates,
            "dropped": self.num_dropped,
            "portions": self.units.export(),
            "members": msgspec.to_builtins(dict(sorted(self._members.items()))),
            "gone": list(self._gone),
            "pending": msgspec.to_builtins(self._pending),
            "first_arrival": self._first_arrival,
            "unused": [list(one) for one in self._unused],
            "trimmed": self._trimmed,
            "log": msgspec.to_builtins(self._log),
        }

    @classmethod
    def restore(cls, data: Mapping[str, Any]) -> "UpdateLog":
        """The inverse of ``export``: for a backup. From a checkpoint, ``restart`` it then."""
        units = WorkQueue.restore(data["portions"])
        update_log = cls(
            rule=UpdateRule.parse(data["rule"]),
            workers=units.workers,
            steps=units.steps,
            lateness=Lateness(**data["lateness"]),
            duplicate_after=data["duplicate_after"],
            warm_start=data["warm_start"],
            aggregate=data["aggregate"],
            mean_steps=data["mean_steps"],
        )
        update_log.num_duplicates, update_log.num_dropped = data["duplicates"], data["dropped"]
        update_log.memory = data["memory"]
        update_log.own_shares = OwnShares.restore(data.get("own_shares", {}), units.workers)
        if "receipts" in data:
            update_log.receipts = UnitReceipts.restore(data["receipts"])
        update_log.units = units
        update_log._members = msgspec.convert(data["members"], dict[str, Member])
        update_log._gone = list(data["gone"])
        update_log._pending = msgspec.convert(data["pending"], list[PushRecord])
        update_log._first_arrival = data["first_arrival"]
        update_log._unused = [PushId(*one) for one in data["unused"]]
        update_log._trimmed = data["trimmed"]
        update_log._log = msgspec.convert(data["log"], list[Update])
        return update_log

    def digest(self) -> str:
        """A hash of the whole update log: two replicas that got the same inputs have the same."""
        return hashlib.blake2b(json.dumps(self.export(), sort_keys=True).encode(), digest_size=16).hexdigest()

    def _unit(self, number: int, member: Member) -> WorkUnit:
        step, share = divmod(number, self.workers)
        bound, data = consistency.needs(self.rule, step), self.receipts.read_at(step)
        return WorkUnit(number=number, step=step, share=share, need=max(bound, member.need), bound=bound, data=data)

    def _open_update(self) -> str:
        return f"update {self.closed} to close: {len(self._pending)} of {self.rule.quorum} pushes are there"

    def _busy(self, below: int | None = None) -> tuple[str, ...]:
        """The workers that have work units in hand (of steps under ``below``)."""
        in_hand = [one for one in self.units.in_hand() if below is None or one // self.workers < below]
        return tuple(sorted({worker for unit in in_hand for worker in self.units.holders(unit)}))

    def _nothing_to_take(self, worker: str, member: Member, own: list[int], now: float) -> Taken:
        if own and self.rule.push_every > 1:
            text = f"its {len(own)} work units from {own[0]} on are the last ones and must be committed"
            return Wait(reason=text, must_commit=True)
        until = None
        if self.duplicate_after is not None and not own:
            slow, until = self._slow_unit(worker, self.duplicate_after, now)
            if slow is not None:
                self.units.share(worker, slow, now)
                return self._unit(slow, member)
        step = self.units.next_step
        if step is None:
            reason = f"the last work units to be committed: {len(self.units.in_hand())} are in hand"
            return Wait(reason=reason, on=self._busy(), until=until)
        need = consistency.needs(self.rule, step)
        reason = f"update {need - 1} to close: step {step} needs version {need}, and {self.closed} updates are closed"
        return Wait(reason=reason, on=self._busy(below=need), until=until)

    def _slow_unit(self, worker: str, multiple: float, now: float) -> tuple[int | None, float | None]:
        """The first work unit that one other has had in hand for too long; or when there will be one."""
        times = [member.step_seconds for member in self._members.values() if member.num_timed]
        single = [unit for unit in self.units.in_hand() if len(self.units.holders(unit)) == 1]
        if not times or not single:
            return None, None
        patience = multiple * sum(times) / len(times)
        late_at = {unit: max(self.units.holders(unit).values()) + patience for unit in single}
        slow = [unit for unit in single if now >= late_at[unit]]
        return (slow[0], None) if slow else (None, min(late_at.values()))

    def _problem(self, push: PushRecord) -> str | None:
        """Why a push cannot be right; None when it can."""
        units, total = push.units, self.workers * self.units.steps
        if not units or list(units) != sorted(set(units)) or not 0 <= units[0] <= units[-1] < total:
            return f"work units {list(units)} are not distinct ones of 0 to {total - 1}, in order"
        if len(units) > 1 and self.rule.is_stepwise:
            return f"it covers {len(units)} work units, and under {self.rule} every work unit is a push of its own"
        if push.odd is not None:
            return push.odd
        if self.receipts.units_per_epoch and len(push.rows) != len(units):
            return f"it says the rows of {len(push.rows)} of its {len(units)} work units"
        if push.version > self.closed:
            return f"it read version {push.version}, and there are only {self.closed}"
        foreign = [
            unit for unit in units if push.worker not in self.units.holders(unit) and not self.units.is_done(unit)
        ]
        if foreign:
            return f"work unit {foreign[0]} is not in this worker's hands"
        need = consistency.needs(self.rule, units[0] // self.workers)
        if push.version < need and not self.units.is_done(units[0]):
            step = units[0] // self.workers
            return f"it read version {push.version}, and step {step} needs {need} or more under {self.rule}"
        return None

    def _seconds_each(self, push: PushRecord, now: float) -> float:
        taken = min(self.units.holders(unit)[push.worker] for unit in push.units)
        return max(0.0, now - taken - push.waited) / len(push.units)

    def _give_up(self, push: PushRecord, outcome: int, *, release: bool = True) -> Change:
        """A push is not used: the shards will forget it, and what only its worker did is todo again."""
        self._unused.append(push.identity)
        worker = push.worker
        self._members[worker] = self._members[worker].remember(push.number, outcome)
        if not release:
            return NOTHING
        own = self.units.held_by(worker)
        freed = self.units.release(worker, [one for one in push.units if one in own])
        return self._settle(freed=freed)

    def _settle(self, *, freed: tuple[int, ...] = (), is_due: bool = False) -> Change:
        """Close every update that can close."""
        closed: list[Update] = []
        while True:
            entries = consistency.next_update(
                self.rule,
                self._pending,
                workers=self.workers,
                closed=self.closed,
                members=len(self._members),
                is_due=is_due or self.units.is_over,
            )
            if not entries:
                return Change(closed=tuple(closed), freed=freed, is_finished=self.is_finished)
            closed.append(self._close(entries))

    def _close(self, entries: tuple[PushRecord, ...]) -> Update:
        number, weight = self.closed, sum(one.weight for one in entries)
        counted = consistency.factors(self.rule, self.lateness, number, entries, self.aggregate, self.mean_steps)
        steps = [unit // self.workers for one in entries for unit in one.units]
        record = Update(
            number=number,
            entries=tuple(Entry(one.worker, one.number, factor) for one, factor in zip(entries, counted, strict=True)),
            versions=tuple(one.version for one in entries),
            units=tuple(one.units for one in entries),
            loss=sum(one.loss * one.weight for one in entries) / weight
            if weight
            else sum(one.loss for one in entries) / len(entries),
            weight=weight,
            samples=sum(one.samples for one in entries),
            first_step=min(steps),
            last_step=max(steps),
            staleness=max(number - one.version for one in entries),
            dropped=tuple(self._unused),
            settled=self.num_settled + sum(len(one.units) for one in entries),
            epochs=tuple(closed for one in entries for closed in self.receipts.add(one.units, one.rows)),
        )
        gone = {one.identity for one in entries}
        self._pending = [one for one in self._pending if one.identity not in gone]
        self._first_arrival = None
        self._unused = []
        self._log.append(record)
        for worker in {one.worker for one in entries} & self._members.keys():
            self._members[worker] = replace(self._members[worker], need=number + 1)
        return record
