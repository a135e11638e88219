"""Candidates for the center, an election that keeps what ``Elector`` promises, and the part that every member has in both."""

from dataclasses import dataclass
from typing import Any

from shoal.elastic import membership
from shoal.elastic.changes import (
    Ask,
    Collect,
    Elected,
    Event,
    Failed,
    GiveUp,
    Heard,
    Joined,
    Left,
    Publish,
    Refuse,
    Remind,
    Synced,
    Ticked,
)
from shoal.elastic.membership import State, Wanted
from shoal.elastic.view import Member, View
from simulation.oracles import Run
from simulation.world import Message, Process, Sleep, Task

LEASE = 1.0
BEAT = 0.4


class Election:
    """A lease on one machine: free at once when its owner is dead, and after a while when it is only silent."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.epoch = 0
        self.owner: Process | None = None
        self.until = 0.0

    def campaign(self, candidate: Process) -> int | None:
        now = self.run.world.now
        if self.owner is not None and self.owner.is_alive and now < self.until:
            return None
        self.owner = candidate
        if "give an epoch twice" in self.run.plants:
            self.epoch = max(0, self.epoch - 2)
        return self._next()

    def advance(self, candidate: Process, epoch: int) -> int | None:
        return self._next() if self._leads(candidate, epoch) else None

    def renew(self, candidate: Process, epoch: int) -> bool:
        if not self._leads(candidate, epoch):
            return False
        self.until = self.run.world.now + LEASE
        return True

    def _leads(self, candidate: Process, epoch: int) -> bool:
        return self.owner is candidate and self.epoch == epoch and self.run.world.now < self.until

    def _next(self) -> int:
        self.epoch += 1
        self.until = self.run.world.now + LEASE
        return self.epoch


class Center(Process):
    """A candidate; while it leads, the state machine with hands."""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__(run.world, name)
        self.run = run
        self.state = State(wanted=run.wanted)
        self.until = 0.0
        self.spawn(self._stand())

    @property
    def is_valid(self) -> bool:
        return self.world.now < self.until

    def _stand(self) -> Task:
        while True:
            if not self.is_valid or not self.run.election.renew(self, self.state.epoch):
                self.state, self.until = State(wanted=self.run.wanted), 0.0
                epoch = self.run.election.campaign(self)
                if epoch is not None:
                    self.until = self.world.now + LEASE * 0.9
                    self.epoch = epoch
                    self.world.tell(f"{self.id} leads under {epoch}")
                    kept = self.run.kept if self.run.keeps_views else None
                    self._step(Elected(epoch=epoch, now=self.world.now, kept=kept))
            else:
                self.until = self.world.now + LEASE * 0.9
            if self.is_valid:
                self._step(Ticked(now=self.world.now))
            yield Sleep(0.2)

    def _step(self, event: Event) -> None:
        if not self.is_valid:
            return
        self.state, instructions = membership.step(self.state, event)
        for instruction in instructions:
            match instruction:
                case Publish(view=view):
                    epoch = self.run.election.advance(self, view.epoch - 1)
                    if epoch is None:
                        self.until = 0.0
                        return
                    assert epoch == view.epoch
                    self.until = self.world.now + LEASE * 0.9
                    self.run.kept = view
                    self.run.published(view)
                    self.epoch = epoch
                    for member in view:
                        self.tell(member.id, "view", view=view)
                case Remind(id=id, view=view):
                    self.tell(id, "view", view=view)
                case Refuse(id=id, code=code):
                    self.tell(id, "refused", code=code)
                case Ask(id=id):
                    self.tell(id, "ask")
                case GiveUp(reason=reason):
                    raise AssertionError(f"the center gave up: {reason}")
                case Collect():
                    pass
                # Sync, Release and Restore: members see the same in the view, and act on that.

    def on_join(self, message: Message) -> None:
        body = message.body
        self._step(Joined(member=body["member"], view=body["view"], now=self.world.now))

    def on_beat(self, message: Message) -> None:
        self._step(Heard(id=message.sender, epoch=message.body["epoch"], now=self.world.now))

    def on_left(self, message: Message) -> None:
        self._step(Left(id=message.body["id"], reason="it was seen to die", now=self.world.now))

    def on_synced(self, message: Message) -> None:
        self._step(Synced(**message.body))

    def on_failed(self, message: Message) -> None:
        self._step(Failed(**message.body, reporter=message.sender, now=self.world.now, reason="no answer"))


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered as it was asked."""

    why: str


class Participant(Process):
    """What servers and workers share: they join, give signs of life, and take the views of the newest epoch."""

    role: Any = ""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__(run.world, name)
        self.run = run
        self.view: View | None = None
        self.carried: View | None = None
        """The last view it accepted, whatever its id was: a new center learns from it that there was a run."""
        self.spawn(self._beat())

    @property
    def member(self) -> Member:
        return Member(id=self.id, name=self.name, role=self.role, started=self.started)

    @property
    def is_member(self) -> bool:
        return self.view is not None and self.view.find(self.id) is not None

    def _beat(self) -> Task:
        while True:
            center = self.run.election.owner
            if center is not None:
                if self.view is None:
                    self.tell(center.id, "join", member=self.member, view=self.carried)
                else:
                    self.tell(center.id, "beat", epoch=self.view.epoch)
            yield Sleep(BEAT * self.world.random.uniform(0.9, 1.1))

    def on_ask(self, message: Message) -> None:
        self.tell(message.sender, "join", member=self.member, view=self.carried)

    def on_view(self, message: Message) -> None:
        view = message.body["view"]
        if view.find(self.id) is None or (view.epoch <= self.epoch and "accept old epochs" not in self.run.plants):
            return
        if self.view is not None and view.epoch == self.view.epoch:
            return
        self.run.accepted(view, self.id)
        before, self.view, self.epoch = self.view, view, view.epoch
        if "tell a new center of no view" not in self.run.plants:
            self.carried = view
        self.changed(before, view)

    def on_refused(self, message: Message) -> None:
        if message.epoch < self.epoch:
            return
        if message.body["code"] == "replaced":
            self.kill()
            return
        self.world.tell(f"{self.id} comes again")
        self.change_id()
        self.view = None
        self.epoch = 0
        self.forget()

    def changed(self, before: View | None, view: View) -> None:
        """A new view was accepted."""

    def forget(self) -> None:
        """It was taken for dead: what it held is worth nothing any more."""

    def fenced(self, message: Message) -> bool:
        """True when a request may not be heard: it is of another epoch, and its sender must ask again."""
        if message.epoch < self.epoch and "hear old epochs" in self.run.plants:
            return False
        return message.epoch != self.epoch or self.view is None


def wanted(servers: int, backups: int) -> Wanted:
    """With times that fit the beats here."""
    return Wanted(servers=servers, backups=backups, dead_seconds=1.5, join_seconds=20.0)
