"""The coordinator and the agents of hosts: the real state machines with hands, and messages between them."""

from typing import Any

from shoal.elastic import group
from shoal.elastic.groupchanges import (
    Died,
    Event,
    Expel,
    Failed,
    GiveUp,
    Heard,
    Joined,
    Left,
    Order,
    Publish,
    Ready,
    Remind,
    Slow,
    Ticked,
)
from shoal.elastic.groupstate import State
from shoal.elastic.groupview import GroupView
from shoal.elastic.lease import Lease
from simulation.group.oracles import Run
from simulation.group.ranks import Rank
from simulation.world import Message, Process, Sleep, Task

BEAT = 0.25
KINDS = {"joined": Joined, "ready": Ready, "died": Died, "left": Left, "failed": Failed, "slow": Slow}


class Coordinator(Process):
    """Brings events to ``group.step`` and makes what comes out true."""

    def __init__(self, run: Run, host: str) -> None:
        super().__init__(run.world, "coordinator")
        run.world.host_of[self.name] = host
        self.run = run
        self.state = State(wanted=run.wanted)
        self.seen: dict[str, int] = {}
        """The last report of each agent that was heard."""
        self.spawn(self._tick())

    def _tick(self) -> Task:
        while True:
            self._step(Ticked(now=self.world.now))
            yield Sleep(0.2)

    def _step(self, event: Event) -> None:
        self.state, instructions = group.step(self.state, event)
        for instruction in instructions:
            match instruction:
                case Publish(view=view, cause=cause):
                    self.run.published(view, cause)
                    for agent in list(self.run.agents.values()):
                        self.tell(agent.id, "view", view=view)
                case Remind(host=host, view=view):
                    self._to(host, "view", view=view)
                case Order(replica=replica, host=host, spare=spare):
                    self.world.tell(f"order {replica} on {host}")
                    self._to(host, "order", replica=replica, spare=spare)
                case Expel(member=member, host=host, reason=reason):
                    self.world.tell(f"expel {member}: {reason}")
                    self._to(host, "expel", member=member)
                case GiveUp(reason=reason):
                    self.world.tell(f"give up: {reason}")
                    self.run.gave_up = reason

    def _to(self, host: str, kind: str, **body: Any) -> None:
        agent = self.run.agents.get(host)
        if agent is not None:
            self.tell(agent.id, kind, **body)

    def on_beat(self, message: Message) -> None:
        body = message.body
        heard = {key: body[key] for key in ("host", "slots", "epoch", "members", "replicas")}
        self._step(Heard(agent=message.sender, now=self.world.now, **heard))
        for number, kind, fields in body["reports"]:
            if number == self.seen.get(message.sender, 0) + 1:
                self.seen[message.sender] = number
                self._step(KINDS[kind](now=self.world.now, **fields))
        seen = self.seen.get(message.sender, 0)
        is_planted = "a view that is over has a lease" in self.run.plants
        epoch = self.state.epoch if is_planted else self.state.lease_epoch
        self.tell(message.sender, "ack", sent=body["sent"], epoch=epoch, seen=seen)


class Agent(Process):
    """The supervisor of a host: starts ranks, sees them die, gives signs of life for all of them, and holds the lease."""

    def __init__(self, run: Run, host: str, slots: int) -> None:
        super().__init__(run.world, f"agent-{host}")
        run.world.host_of[self.name] = host
        self.run, self.host, self.slots = run, host, slots
        self.lease = Lease(seconds=run.wanted.lease_seconds)
        self.view: GroupView | None = None
        """What ranks here see: a word in shared memory."""
        self.ranks: dict[str, Rank] = {}
        self.started: list[str] = []
        self.reports: list[tuple[int, str, dict[str, Any]]] = []
        """Those that were not acknowledged. They arrive in order, each once."""
        self.num_reports = 0
        run.agents[host] = self
        self.spawn(self._beat())

    @property
    def newest(self) -> int:
        return 0 if self.view is None else self.view.epoch

    def may_apply(self, epoch: int) -> bool:
        if "steps without a lease" in self.run.plants:
            return True
        return self.lease.is_valid(self.world.now, epoch=epoch)

    def _beat(self) -> Task:
        while True:
            self.send_beat()
            yield Sleep(BEAT)

    def send_beat(self) -> None:
        self.tell(
            self.run.coordinator.id,
            "beat",
            host=self.host,
            slots=self.slots,
            epoch=self.newest,
            members=tuple(self.ranks),
            replicas=tuple(self.started),
            sent=self.world.now,
            reports=tuple(self.reports),
        )

    def report(self, kind: str, **fields: Any) -> None:
        """Tell the coordinator, now and until it says that it knows."""
        self.num_reports += 1
        self.reports.append((self.num_reports, kind, fields))
        self.when_awake(self.send_beat)

    def start(self, replica: str, *, spare: bool = False) -> None:
        self.started.append(replica)
        for position in range(self.run.wanted.replica_size):
            rank = Rank(self.run, self, replica, position, spare=spare)
            self.ranks[rank.id] = rank

    def end(self, rank: Rank, cause: str, *, is_told: bool = True) -> None:
        """A process here is killed, or ends; the agent sees it at once."""
        rank.kill()
        if self.ranks.pop(rank.id, None) is not None and is_told and self.is_alive:
            fields = {"member": rank.id, "replica": rank.replica, "cause": cause}
            self.world.after(0.005, lambda: self.when_awake(lambda: self.report("died", **fields)))

    def on_ack(self, message: Message) -> None:
        body = message.body
        self.reports = [one for one in self.reports if one[0] > body["seen"]]
        self.lease = self.lease.answered(sent=body["sent"], epoch=body["epoch"])

    def on_view(self, message: Message) -> None:
        view = message.body["view"]
        if view.epoch > self.newest or "take the view that comes last" in self.run.plants:
            self.view = view

    def on_order(self, message: Message) -> None:
        replica = message.body["replica"]
        if replica not in self.started and len({rank.replica for rank in self.ranks.values()}) < self.slots:
            self.start(replica, spare=message.body["spare"])

    def on_expel(self, message: Message) -> None:
        rank = self.ranks.get(message.body["member"])
        if rank is not None:
            self.end(rank, "expelled")
