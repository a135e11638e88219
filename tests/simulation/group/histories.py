"""Random histories of an elastic run: it is started, things go wrong at any message, then they stop, and it must finish."""

from dataclasses import dataclass, replace
from typing import Any

from shoal.elastic.groupstate import Wanted
from simulation.group.hosts import Agent, Coordinator
from simulation.group.oracles import HostWorld, Run
from simulation.group.ranks import Rank

BOUND = 60.0
"""Virtual seconds from the last fault until the run must be finished."""
LONGEST_CUT = 4.0
"""Seconds: a coordinator that hears nobody for longer than ``Wanted.join_seconds`` gives up, as it should."""


@dataclass(frozen=True)
class Outcome:
    """What became of a history."""

    run: Run
    took: float
    epochs: int


class History:
    """One run and its faults."""

    def __init__(
        self,
        seed: int,
        *,
        plants: frozenset[str] = frozenset(),
        is_harsh: bool = False,
        is_single: bool = False,
        aim: str = "",
        zero: bool | None = None,
        is_late: bool = False,
        is_dealt: bool = False,
    ) -> None:
        """Set a run up.

        Args:
            seed: of everything.
            plants: bugs that are planted.
            is_harsh: faults follow each other closely.
            is_single: one failure at a time: the next comes when the run has recovered.
            aim: the only kind of fault, if not all.
            zero: whether the state is sharded; drawn if left out.
            is_late: some messages are always late.
            is_dealt: there are more logical replicas than may be present.
        """
        world = HostWorld(seed)
        draw = world.random
        num_hosts, num_logical = draw.choice((2, 3, 4)), draw.choice((2, 3, 4))
        self.hosts = [f"h{number}" for number in range(num_hosts)]
        self.slots = draw.choice((1, 2)) + -(-num_logical // num_hosts)
        self.is_dealt = is_dealt
        self.is_harsh, self.is_single, self.aim, self.is_late = is_harsh, is_single, aim, is_late
        world.late = 0.1 if is_late else 0.0
        wanted = Wanted(
            num_logical=num_logical,
            replica_size=draw.choice((1, 1, 2)),
            min_dp=draw.choice((1, 1, 2)),
            spares=draw.choice((0, 0, 1)),
            drops_slow=True,
            lease_seconds=1.5,
            join_seconds=8.0,
            settle_seconds=0.15,
            max_failures=1000,
        )
        if is_dealt:
            wanted = replace(wanted, num_logical=2 * num_logical, max_dp=num_logical)
        is_sharded = draw.random() < 0.6
        self.run = Run(
            world=world,
            wanted=wanted,
            steps=draw.choice((24, 36)),
            zero=is_sharded if zero is None else zero,
            copies=True,
            plants=plants,
        )
        self.run.coordinator = Coordinator(self.run, draw.choice(("hc", "h0")))
        for host in self.hosts:
            Agent(self.run, host, self.slots)
        for number in range(wanted.at_start):
            self.run.agents[self.hosts[number % num_hosts]].start(f"replica-{number}")

    @property
    def world(self) -> HostWorld:
        return self.run.world

    # ---- faults

    def fault(self) -> None:
        kinds = ("kill", "kill", "host", "pause", "freeze", "cut", "cut", "isolate", "heal", "slow", "leave", "blame")
        kind = self.aim or self.world.random.choice(kinds)
        getattr(self, f"_{kind}")()

    def _rank(self) -> Rank | None:
        ranks = [rank for host in self.hosts for rank in self.run.agents[host].ranks.values()]
        return self.world.random.choice(ranks) if ranks else None

    def _kill(self) -> None:
        rank = self._rank()
        if rank is not None:
            self.world.tell(f"kill {rank.id}")
            rank.agent.end(rank, "killed by signal 9")

    def _host(self) -> None:
        """A host loses its power, and comes back later, with nothing."""
        host = self.world.random.choice(self.hosts)
        agent = self.run.agents[host]
        if not agent.is_alive or (self.is_single and self.run.coordinator.world.host_of["coordinator"] == host):
            return
        self.world.tell(f"power off {host}")
        for rank in list(agent.ranks.values()):
            agent.end(rank, "power", is_told=False)
        agent.kill()
        self.world.after(self.world.random.choice((0.5, 3.0)), lambda: Agent(self.run, host, self.slots))

    def _pause(self) -> None:
        rank = self._rank()
        if rank is not None:
            self._sleep(rank, f"pause {rank.id}")

    def _freeze(self) -> None:
        """A whole host stands still, or only its agent, or the coordinator."""
        draw = self.world.random
        agent = self.run.agents[draw.choice(self.hosts)]
        seconds = draw.choice((0.3, 1.0, 3.0))
        everything = draw.choice(([agent], [agent, *agent.ranks.values()], [self.run.coordinator]))
        for process in everything:
            self._sleep(process, f"freeze {process.id}", seconds)

    def _sleep(self, process: Any, line: str, seconds: float | None = None) -> None:
        seconds = self.world.random.choice((0.3, 1.0, 3.0)) if seconds is None else seconds
        self.world.tell(f"{line} for {seconds:g} s")
        process.paused_until = self.world.now + seconds

    def _cut(self) -> None:
        places = [*self.hosts, self.world.host_of["coordinator"]]
        one, other = self.world.random.sample(sorted(set(places)), 2)
        self.world.tell(f"cut {one} from {other}")
        self.world.cut_hosts.add(frozenset((one, other)))

    def _isolate(self) -> None:
        """Some hosts are cut off from all others; they still see each other."""
        draw = self.world.random
        places = sorted({*self.hosts, self.world.host_of["coordinator"]})
        some = draw.sample(places, draw.randrange(1, len(places)))
        self.world.tell(f"isolate {' '.join(some)}")
        self.world.cut_hosts |= {frozenset((one, other)) for one in some for other in places if other not in some}

    def _heal(self) -> None:
        self.world.tell("heal")
        self.world.cut_hosts = set()
        self.world.late = 0.1 if self.is_late else self.world.random.choice((0.0, 0.0, 0.05))

    def _slow(self) -> None:
        rank = self._rank()
        if rank is not None:
            rank.slowness = self.world.random.choice((1.5, 3.0))
            self.world.tell(f"slow {rank.id}")
            self.world.after(3.0, lambda: setattr(rank, "slowness", 1.0))

    def _blame(self) -> None:
        rank = self._rank()
        if rank is not None:
            self.world.tell(f"{rank.id} is told to be slow")
            rank.agent.report("slow", member=rank.id, reason="compute")

    def _leave(self) -> None:
        rank = self._rank()
        if rank is not None:
            self.world.tell(f"{rank.id} leaves")
            rank.agent.report("left", member=rank.id, replica=rank.replica, reason="SIGTERM")

    # ---- from the start to the end

    def play(self, faults: int) -> Outcome:
        draw = self.world.random
        self.world.run(draw.uniform(0.5, 3.0))
        since: float | None = None
        for _ in range(faults):
            if self.is_single:
                self.settle()
            self.fault()
            since = since if self.world.cut_hosts and since is not None else self.world.now
            gaps = (0.03, 0.3) if self.is_harsh else (0.3, 1.0, 2.5)
            self.world.run(self.world.now + draw.choice(gaps))
            if self.world.cut_hosts and (draw.random() < 0.4 or self.world.now - since > LONGEST_CUT):
                self._heal()
                if self.is_dealt:
                    # Two long cuts in a row without a word between them are one that is longer than a run survives.
                    self.world.run(self.world.now + 0.3)
        self._heal()
        self.world.late = 0.0
        self.world.tell("the last fault is over")
        last = self.world.now
        while not self.is_over() and self.world.now < last + BOUND:
            assert not self.run.gave_up, f"the coordinator gave up: {self.run.gave_up}"
            self.world.run(self.world.now + 0.2)
        assert self.is_over(), f"not finished {BOUND:g} s after the last fault"
        self.run.check_end()
        return Outcome(self.run, self.world.now - last, self.run.coordinator.state.epoch)

    def settle(self) -> None:
        """Let the run recover: the newest view has its state, and its copies."""
        for _ in range(200):
            epoch, done = self.run.coordinator.state.epoch, self.run.established
            is_there = all(rank is not None and rank.epoch == epoch for rank in self.run.members())
            if is_there and done is not None and done.epoch == epoch and not self.world.cut_hosts:
                return
            if self.world.random.random() < 0.1:
                self._heal()
            self.world.run(self.world.now + 0.1)

    def is_over(self) -> bool:
        ranks, epoch, done = self.run.members(), self.run.coordinator.state.epoch, self.run.established
        return (
            done is not None
            and done.epoch == epoch
            and all(rank is not None and rank.step == self.run.steps and rank.ready == epoch for rank in ranks)
        )


def play(seed: int, *, faults: int = 8, **more: Any) -> Outcome:
    """Play the history of this seed; an ``AssertionError`` tells what went wrong, with the story of how."""
    history = History(seed, **more)
    try:
        return history.play(faults)
    except AssertionError as error:
        story = "\n".join(history.world.story)
        raise AssertionError(f"seed {seed}, {history.run.wanted}: {error}\n{story}") from error
