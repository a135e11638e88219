"""The book of a run: who does which portion, and which contributions made which update. A deterministic state machine.

Inputs are ``join``, ``leave``, ``take``, ``commit``, ``advance``, ``tick``, ``trim`` and ``rebase``; time comes in as an
argument. The same inputs in the same order give the same book, bit for bit, which is how a backup keeps a copy of it. What it
writes down is a log of rounds: round r is update number r on every shard, so all shards agree on what an update is under every
rule.

A worker's clock does not exist here. A step is done when its shares are, whoever computed them, so a dead worker holds nobody up
and a newcomer begins where the others are.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from shoal.core.errors import RunError
from shoal.core.updates import UpdateRule
from shoal.paramserver import consistency
from shoal.paramserver.consistency import Aggregate, Lateness
from shoal.paramserver.log import queue as members
from shoal.paramserver.log.queue import Member, Portions, member_from_json
from shoal.paramserver.records import (
    NOTHING,
    Answer,
    Change,
    Committed,
    Contribution,
    Dropped,
    Duplicate,
    Entry,
    Finished,
    Identity,
    Portion,
    Refused,
    Round,
    Taken,
    Wait,
    contribution_from_json,
    round_from_json,
    round_to_json,
)


class LogTrimmed(RunError):
    """Someone asks for rounds that are no longer kept; a snapshot of the shard has to take their place."""


class Book:
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
    ) -> None:
        """Open an empty book.

        Args:
            rule: any; it is resolved for these workers.
            workers: shares of a step, however many workers are alive.
            steps: of the whole run.
            lateness: what becomes of old gradients.
            duplicate_after: a portion that is in hand for longer than this many mean step times goes to an idle worker as well,
                and the first commit counts (the backup tasks of Dean et al. 2012, section 4.2). None: never.
            warm_start: portions that must be in a round before anyone but the first worker, by index, may begin (section 4.1
                there).
            aggregate: what the contributions of a round count.
            mean_steps: local steps of a portion, over all workers of the plan.
        """
        self.rule = rule.resolve(workers)
        self.workers = workers
        self.lateness = lateness or Lateness()
        self.duplicate_after = duplicate_after
        self.warm_start = warm_start
        self.aggregate = aggregate
        self.mean_steps = mean_steps
        self.memory = ""
        """What whoever makes the steps from outside has to remember (``advance``)."""
        self.num_duplicates = 0
        self.num_dropped = 0
        self._portions = Portions(workers=workers, steps=steps)
        self._members: dict[str, Member] = {}
        self._gone: list[str] = []
        self._pending: list[Contribution] = []
        self._first_arrival: float | None = None
        self._unused: list[Identity] = []
        self._log: list[Round] = []
        self._trimmed = 0

    @property
    def closed(self) -> int:
        """Rounds that are closed: the newest version."""
        return self._trimmed + len(self._log)

    @property
    def is_finished(self) -> bool:
        """True when every portion is done and in a round."""
        return self._portions.is_over and not self._pending

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
        return self._portions.steps

    @property
    def num_done(self) -> int:
        """Portions that are done, of ``steps * workers``."""
        return self._portions.num_done

    @property
    def num_in_hand(self) -> int:
        """Portions that somebody does."""
        return len(self._portions.in_hand())

    @property
    def num_settled(self) -> int:
        """Portions that are in a round: done, and not waiting for one."""
        return self.num_done - sum(len(one.portions) for one in self._pending)

    @property
    def first_kept(self) -> int:
        """The first round that the log still has."""
        return self._trimmed

    def committed(self, worker: str) -> frozenset[int]:
        """Numbers of a worker's contributions that are in the kept log or wait for their round: what a shard must not discard."""
        in_rounds = [entry.number for record in self._log for entry in record.entries if entry.worker == worker]
        return frozenset(in_rounds + [one.number for one in self._pending if one.worker == worker])

    def log(self, since: int) -> tuple[Round, ...]:
        """Rounds from number ``since`` on.

        Raises:
            LogTrimmed: the log no longer goes so far back.
        """
        if since < self._trimmed:
            raise LogTrimmed(
                f"round {since} is asked for, and the log begins at {self._trimmed}; start from a snapshot of the shard"
            )
        return tuple(self._log[since - self._trimmed :])

    def deadline(self) -> float | None:
        """When ``tick`` has something to do; None: not by time."""
        if self._first_arrival is None:
            return None
        times = [member.step_seconds for member in self._members.values() if member.num_timed]
        return consistency.round_deadline(self.rule, self._first_arrival, times)

    def join(self, worker: str, index: int, now: float) -> Change | Refused:
        """A worker is there; one that is there already stays as it is."""
        if worker in self._gone:
            # What it committed is no longer remembered, so what it sends again could count twice.
            return Refused(reason=f"worker {worker} has left; join again as a new instance")
        self._members.setdefault(worker, Member(index=index))
        return NOTHING

    def leave(self, worker: str, now: float) -> Change:
        """A worker is gone: what it did is todo again, what it committed stays, what it may commit from now on is refused."""
        if self._members.pop(worker, None) is None:
            return NOTHING
        self._gone.append(worker)
        del self._gone[: -members.GONE_KEPT]
        freed = self._portions.release(worker, self._portions.held_by(worker))
        return self._settle(freed=freed)

    def take(self, worker: str, now: float, held: Collection[int] | None = None) -> Taken:
        """The next portion for a worker.

        Args:
            worker: who asks.
            now: the time.
            held: portions that the worker knows it has taken and not committed. One that the book gave it and that is not
                among these was lost on its way, and is given again. None: take the worker to know all of them.
        """
        member = self._members.get(worker)
        if member is None:
            return Refused(reason=f"worker {worker} is not a member; join first")
        own = self._portions.held_by(worker)
        lost = [] if held is None else [portion for portion in own if portion not in held]
        if lost:
            return self._portion(lost[0], member)
        if self.is_finished:
            return Finished()
        if consistency.waits_for_round(self.rule) and any(one.worker == worker for one in self._pending):
            return Wait(reason=self._open_round(), on=self._busy(), until=self.deadline())
        if self.num_settled < self.warm_start and member.index > min(one.index for one in self._members.values()):
            text = (
                f"the warm start: {self.num_settled} of {self.warm_start} portions of the first worker are in a round"
            )
            return Wait(reason=text, must_commit=bool(own))
        step = self._portions.next_step
        if step is not None and consistency.may_take(self.rule, step, self.closed):
            return self._portion(self._portions.give(worker, member.index, now), member)
        return self._nothing_to_take(worker, member, own, now)

    def commit(self, contribution: Contribution, now: float) -> Answer:
        """A worker's contribution is stored on every shard, and is now part of the run or is not: once and for all."""
        worker = contribution.worker
        member = self._members.get(worker)
        if member is None:
            return Refused(
                reason=f"worker {worker} is not a member; its contribution {contribution.number} is discarded"
            )
        known = member.outcome(contribution.number)
        if known is not None:
            return _answer_again(known)
        if contribution.number < member.oldest:
            # It may have been kept or not; so the shards are told nothing of it.
            text = f"its number {contribution.number} is below {member.oldest}, the oldest of this worker that is remembered"
            return Refused(reason=text)
        problem = self._problem(contribution)
        if problem is not None:
            return Refused(reason=problem, change=self._give_up(contribution, members.REFUSED, release=False))
        if any(self._portions.is_done(portion) for portion in contribution.portions):
            self.num_duplicates += 1
            return Duplicate(change=self._give_up(contribution, members.DUPLICATE))
        tau = consistency.age(self.rule, contribution, workers=self.workers, closed=self.closed)
        if not self.rule.is_stepwise and consistency.is_too_old(self.lateness, tau):
            self.num_dropped += 1
            return Dropped(age=tau, change=self._give_up(contribution, members.DROPPED))
        number = consistency.round_of(self.rule, contribution, workers=self.workers, closed=self.closed)
        self._members[worker] = member.timed(self._seconds_each(contribution, now)).remember(
            contribution.number, number
        )
        for portion in contribution.portions:
            self._portions.finish(portion)
        self._pending.append(contribution)
        if self._first_arrival is None:
            self._first_arrival = now
        return Committed(round=number, change=self._settle())

    def advance(self, made: Contribution, memory: str) -> Change:
        """A step was made by programs on the shards (L-BFGS): a round without contributions, and what its maker remembers.

        Args:
            made: its number is the step's, its gradient is nowhere. One that is known changes nothing.
            memory: takes the place of the one before, together with the round.
        """
        if made.number != self.closed or self.is_finished:
            return NOTHING
        self._portions.pass_over()
        self.memory = memory
        record = Round(
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
        """Time has passed: closes the open round if its deadline is over."""
        deadline = self.deadline()
        return self._settle(is_due=True) if deadline is not None and now >= deadline else NOTHING

    def rebase(self, now: float) -> None:
        """The book has a new keeper whose clock shows ``now``: every wait begins again."""
        self._portions.rebase(now)
        if self._first_arrival is not None:
            self._first_arrival = now

    def restart(self, now: float) -> None:
        """Go on from a checkpoint, which has the weights of version ``closed`` and nothing that came after.

        All workers are gone, and so are the gradients that waited for their round: their portions are todo again.
        """
        for one in self._pending:
            for portion in one.portions:
                self._portions.reopen(portion)
        self._pending, self._unused, self._first_arrival = [], [], None
        for worker in list(self._members):
            self.leave(worker, now)

    def trim(self, below: int) -> None:
        """Forget the rounds under this number, which every replica has applied."""
        count = min(max(0, below - self._trimmed), len(self._log))
        del self._log[:count]
        self._trimmed += count

    def export(self) -> dict[str, Any]:
        """The whole book, for ``json``: a checkpoint, or a new backup."""
        return {
            "rule": str(self.rule),
            "lateness": asdict(self.lateness),
            "duplicate_after": self.duplicate_after,
            "warm_start": self.warm_start,
            "aggregate": self.aggregate,
            "mean_steps": self.mean_steps,
            "memory": self.memory,
            "duplicates": self.num_duplicates,
            "dropped": self.num_dropped,
            "portions": self._portions.export(),
            "members": {worker: asdict(member) for worker, member in sorted(self._members.items())},
            "gone": list(self._gone),
            "pending": [asdict(one) for one in self._pending],
            "first_arrival": self._first_arrival,
            "unused": [list(one) for one in self._unused],
            "trimmed": self._trimmed,
            "log": [round_to_json(record) for record in self._log],
        }

    @classmethod
    def restore(cls, data: Mapping[str, Any]) -> "Book":
        """The inverse of ``export``: for a backup. From a checkpoint, ``restart`` it then."""
        portions = Portions.restore(data["portions"])
        book = cls(
            rule=UpdateRule.parse(data["rule"]),
            workers=portions.workers,
            steps=portions.steps,
            lateness=Lateness(**data["lateness"]),
            duplicate_after=data["duplicate_after"],
            warm_start=data["warm_start"],
            aggregate=data["aggregate"],
            mean_steps=data["mean_steps"],
        )
        book.num_duplicates, book.num_dropped = data["duplicates"], data["dropped"]
        book.memory = data["memory"]
        book._portions = portions
        book._members = {worker: member_from_json(member) for worker, member in data["members"].items()}
        book._gone = list(data["gone"])
        book._pending = [contribution_from_json(one) for one in data["pending"]]
        book._first_arrival = data["first_arrival"]
        book._unused = [Identity(*one) for one in data["unused"]]
        book._trimmed = data["trimmed"]
        book._log = [round_from_json(record) for record in data["log"]]
        return book

    def digest(self) -> str:
        """A hash of the whole book: two replicas that got the same inputs have the same."""
        text = json.dumps(self.export(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _portion(self, number: int, member: Member) -> Portion:
        step, share = divmod(number, self.workers)
        bound = consistency.needs(self.rule, step)
        return Portion(number=number, step=step, share=share, need=max(bound, member.need), bound=bound)

    def _open_round(self) -> str:
        return f"round {self.closed} to close: {len(self._pending)} of {self.rule.quorum} contributions are there"

    def _busy(self, below: int | None = None) -> tuple[str, ...]:
        """The workers that have portions in hand (of steps under ``below``)."""
        in_hand = [one for one in self._portions.in_hand() if below is None or one // self.workers < below]
        return tuple(sorted({worker for portion in in_hand for worker in self._portions.holders(portion)}))

    def _nothing_to_take(self, worker: str, member: Member, own: list[int], now: float) -> Taken:
        if own and self.rule.push_every > 1:
            text = f"its {len(own)} portions from {own[0]} on are the last ones and must be committed"
            return Wait(reason=text, must_commit=True)
        until = None
        if self.duplicate_after is not None and not own:
            slow, until = self._slow_portion(worker, self.duplicate_after, now)
            if slow is not None:
                self._portions.share(worker, slow, now)
                return self._portion(slow, member)
        step = self._portions.next_step
        if step is None:
            reason = f"the last portions to be committed: {len(self._portions.in_hand())} are in hand"
            return Wait(reason=reason, on=self._busy(), until=until)
        need = consistency.needs(self.rule, step)
        reason = f"round {need - 1} to close: step {step} needs version {need}, and {self.closed} rounds are closed"
        return Wait(reason=reason, on=self._busy(below=need), until=until)

    def _slow_portion(self, worker: str, multiple: float, now: float) -> tuple[int | None, float | None]:
        """The first portion that one other has had in hand for too long; or when there will be one."""
        times = [member.step_seconds for member in self._members.values() if member.num_timed]
        single = [portion for portion in self._portions.in_hand() if len(self._portions.holders(portion)) == 1]
        if not times or not single:
            return None, None
        patience = multiple * sum(times) / len(times)
        late_at = {portion: max(self._portions.holders(portion).values()) + patience for portion in single}
        slow = [portion for portion in single if now >= late_at[portion]]
        return (slow[0], None) if slow else (None, min(late_at.values()))

    def _problem(self, contribution: Contribution) -> str | None:
        """Why a contribution cannot be right; None when it can."""
        portions, total = contribution.portions, self.workers * self._portions.steps
        if not portions or list(portions) != sorted(set(portions)) or not 0 <= portions[0] <= portions[-1] < total:
            return f"portions {list(portions)} are not distinct ones of 0 to {total - 1}, in order"
        if len(portions) > 1 and self.rule.is_stepwise:
            return (
                f"it covers {len(portions)} portions, and under {self.rule} every portion is a contribution of its own"
            )
        if contribution.odd is not None:
            return contribution.odd
        if contribution.version > self.closed:
            return f"it read version {contribution.version}, and there are only {self.closed}"
        foreign = [
            portion
            for portion in portions
            if contribution.worker not in self._portions.holders(portion) and not self._portions.is_done(portion)
        ]
        if foreign:
            return f"portion {foreign[0]} is not in this worker's hands"
        need = consistency.needs(self.rule, portions[0] // self.workers)
        if contribution.version < need and not self._portions.is_done(portions[0]):
            step = portions[0] // self.workers
            return f"it read version {contribution.version}, and step {step} needs {need} or more under {self.rule}"
        return None

    def _seconds_each(self, contribution: Contribution, now: float) -> float:
        taken = min(self._portions.holders(portion)[contribution.worker] for portion in contribution.portions)
        return max(0.0, now - taken - contribution.waited) / len(contribution.portions)

    def _give_up(self, contribution: Contribution, outcome: int, *, release: bool = True) -> Change:
        """A contribution is not used: the shards will forget it, and what only its worker did is todo again."""
        self._unused.append(contribution.identity)
        worker = contribution.worker
        self._members[worker] = self._members[worker].remember(contribution.number, outcome)
        if not release:
            return NOTHING
        own = self._portions.held_by(worker)
        freed = self._portions.release(worker, [one for one in contribution.portions if one in own])
        return self._settle(freed=freed)

    def _settle(self, *, freed: tuple[int, ...] = (), is_due: bool = False) -> Change:
        """Close every round that can close."""
        closed: list[Round] = []
        while True:
            entries = consistency.next_round(
                self.rule,
                self._pending,
                workers=self.workers,
                closed=self.closed,
                members=len(self._members),
                is_due=is_due or self._portions.is_over,
            )
            if not entries:
                return Change(closed=tuple(closed), freed=freed, is_finished=self.is_finished)
            closed.append(self._close(entries))

    def _close(self, entries: tuple[Contribution, ...]) -> Round:
        number = self.closed
        counted = consistency.factors(self.rule, self.lateness, number, entries, self.aggregate, self.mean_steps)
        weight = sum(one.weight for one in entries)
        steps = [portion // self.workers for one in entries for portion in one.portions]
        record = Round(
            number=number,
            entries=tuple(Entry(one.worker, one.number, factor) for one, factor in zip(entries, counted, strict=True)),
            versions=tuple(one.version for one in entries),
            portions=tuple(one.portions for one in entries),
            loss=sum(one.loss * one.weight for one in entries) / weight
            if weight
            else sum(one.loss for one in entries) / len(entries),
            weight=weight,
            samples=sum(one.samples for one in entries),
            first_step=min(steps),
            last_step=max(steps),
            staleness=max(number - one.version for one in entries),
            dropped=tuple(self._unused),
            settled=self.num_settled + sum(len(one.portions) for one in entries),
        )
        gone = {one.identity for one in entries}
        self._pending = [one for one in self._pending if one.identity not in gone]
        self._first_arrival = None
        self._unused = []
        self._log.append(record)
        for worker in {one.worker for one in entries} & self._members.keys():
            self._members[worker] = replace(self._members[worker], need=number + 1)
        return record


def _answer_again(outcome: int) -> Answer:
    match outcome:
        case members.DUPLICATE:
            return Duplicate()
        case members.DROPPED:
            return Dropped(age=None)
        case members.REFUSED:
            return Refused(reason="it was refused before, and a number is used once")
    return Committed(round=outcome, is_again=True)
