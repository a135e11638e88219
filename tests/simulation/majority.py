"""Voters under a virtual clock: messages are lost, doubled, late and out of order; voters crash, pause, and are cut off.

Each voter has a clock of its own that runs a little fast or slow. What may never happen is checked at every event, by somebody
who sees the true time: two leaders of one term, or two leases that hold at one moment.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.elastic.election import majority
from shoal.elastic.election.majority import Ballot, State, Terms

LEASE = 1.0


@dataclass
class Voter:
    name: str
    rate: float
    offset: float
    disk: Ballot = field(default_factory=Ballot)
    state: State | None = None
    paused_until: float = 0.0
    starts: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def clock(self, now: float) -> float:
        return self.offset + self.rate * now


class Simulation:
    """One history."""

    def __init__(self, seed: int, *, voters: int = 3, drift: float = 0.02, plant: str = "") -> None:
        self.random = random.Random(seed)
        self.plant = plant
        names = tuple(f"v{number}" for number in range(voters))
        self.terms = Terms(voters=names, lease_seconds=LEASE, drift=drift, seed=seed)
        # Rates within sqrt(1 + drift) of one, so that no two differ by more than the drift.
        reach = (1 + drift) ** 0.5
        self.voters = {
            name: Voter(name, rate=self.random.uniform(1 / reach, reach), offset=self.random.uniform(0, 1000))
            for name in names
        }
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.cut: set[frozenset[str]] = set()
        self.loss = 0.0
        self.leaders: dict[int, str] = {}
        self.led_at = 0.0
        self.elected: list[tuple[float, int, str]] = []
        for voter in self.voters.values():
            self.start(voter)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), action))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, action = heapq.heappop(self.events)
            action()
            self.check()
        self.now = until

    # ---- voters

    def start(self, voter: Voter) -> None:
        voter.starts += 1
        now = voter.clock(self.now)
        state = majority.begin(voter.name, address=voter.name, terms=self.terms, ballot=voter.disk, now=now)
        voter.state = majority.stand(state)
        self.tick(voter, voter.starts)

    def tick(self, voter: Voter, start: int) -> None:
        def turn() -> None:
            if voter.state is None or voter.starts != start:
                return
            local = voter.clock(self.now)
            self.step(voter, majority.tick(voter.state, local))
            if voter.state.is_valid(local):
                draw = self.random.random()
                if draw < 0.03:
                    self.step(voter, majority.advance(voter.state, local))
                elif draw < 0.04:
                    self.step(voter, majority.resign(voter.state, local))
                    voter.state = majority.stand(voter.state)
                elif draw < 0.7:
                    self.step(voter, majority.extend(voter.state, local))

        def again() -> None:
            if voter.state is None or voter.starts != start:
                return
            self.when_awake(voter, turn)
            self.after(self.random.uniform(0.05, 0.2), again)

        self.after(self.random.uniform(0, 0.05), again)

    def when_awake(self, voter: Voter, action: Callable[[], None]) -> None:
        if self.now < voter.paused_until:
            self.after(
                voter.paused_until - self.now + self.random.uniform(0, 0.001), lambda: self.when_awake(voter, action)
            )
        else:
            action()

    def step(self, voter: Voter, step: majority.Step) -> None:
        voter.state, messages = step
        if self.plant != "ballot is not kept":
            voter.disk = voter.state.ballot
        for name, message in messages:
            self.send(voter.name, name, message)

    def send(self, source: str, target: str, message: object) -> None:
        copies = 2 if self.random.random() < 0.1 else 1
        for _ in range(copies):
            if self.random.random() < self.loss:
                continue
            late = self.random.random() < 0.05
            self.after(self.random.uniform(0.3, 2.0) if late else self.random.uniform(0.001, 0.03), lambda: arrive())

        def arrive() -> None:
            voter = self.voters[target]
            if frozenset((source, target)) not in self.cut:
                self.when_awake(voter, take)

        def take() -> None:
            voter = self.voters[target]
            if voter.state is not None:
                self.step(voter, majority.receive(voter.state, message, voter.clock(self.now)))

    # ---- faults

    def crash(self) -> None:
        voter = self.random.choice(list(self.voters.values()))
        voter.state = None
        voter.paused_until = 0.0
        self.after(self.random.choice((0.01, 0.1, 1.0)), lambda: self.start(voter) if voter.state is None else None)

    def pause(self) -> None:
        self.random.choice(list(self.voters.values())).paused_until = self.now + self.random.uniform(0.05, 2.0)

    def partition(self) -> None:
        names = list(self.terms.voters)
        self.random.shuffle(names)
        size = self.random.randint(1, len(names) - 1)
        self.cut = {frozenset((a, b)) for a in names[:size] for b in names[size:]}

    def heal(self) -> None:
        self.cut = set()
        self.loss = self.random.choice((0.0, 0.0, 0.1, 0.3))

    # ---- what must hold

    def check(self) -> None:
        valid = [
            one for one in self.voters.values() if one.state is not None and one.state.is_valid(one.clock(self.now))
        ]
        assert len(valid) <= 1, f"at {self.now:.3f} s two leases hold: {[(one.name, one.state.epoch) for one in valid]}"
        for one in valid:
            self.led_at = self.now
            owner = self.leaders.setdefault(one.state.epoch, one.name)
            assert owner == one.name, f"term {one.state.epoch} has two leaders, {owner} and {one.name}"
            if not self.elected or self.elected[-1][1:] != (one.state.epoch, one.name):
                self.elected.append((self.now, one.state.epoch, one.name))


def run_history(seed: int, *, faults: int = 12, plant: str = "") -> Simulation:
    """A random history with faults, then a quiet time in which somebody must lead."""
    simulation = Simulation(seed, voters=random.Random(seed).choice((3, 3, 5)), plant=plant)
    for _ in range(faults):
        simulation.run(simulation.now + simulation.random.choice((0.05, 0.4, 1.2)))
        fault = simulation.random.choice(("crash", "pause", "partition", "heal"))
        getattr(simulation, fault)()
    simulation.heal()
    simulation.loss = 0.0
    quiet = simulation.now
    # Those that crashed are back after 1 s and keep still for a lease; pauses last up to 2 s; then a few tries.
    simulation.run(quiet + 8.0)
    assert simulation.led_at > quiet + 4.0, f"nobody leads 8 s after the last fault, at {quiet:.1f} s"
    assert [epoch for _, epoch, _ in simulation.elected] == sorted(epoch for _, epoch, _ in simulation.elected)
    return simulation
