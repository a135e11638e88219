"""Random histories: a run is started, things go wrong, then they stop going wrong, and the run must finish with nothing amiss."""

from dataclasses import dataclass
from typing import Any

from shoal.core.updaterule import UpdateRule
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.records import Update
from simulation.center import Center, Election, wanted
from simulation.oracles import Checkpoint, Run
from simulation.server import Server
from simulation.worker import Worker
from simulation.world import Message, Process, World

RULES = ("bsp", "ssp:1", "ssp:2", "async", "half:2,0.5")
LONGEST_CUT = 12.0
"""Seconds: a center that hears nobody for longer than ``Wanted.join_seconds`` gives up, as it should. So this is for cuts of
centers; members may be cut from each other for as long as the faults last."""
BOUND = 40.0
"""Virtual seconds from the last fault until the run must be finished: what is left of its work, and every timeout a few times."""


@dataclass(frozen=True)
class Outcome:
    """What became of a history."""

    run: Run
    took: float
    """Seconds from the last fault to the end."""
    epochs: int


class History:
    """One run and its faults."""

    def __init__(
        self,
        seed: int,
        *,
        plants: frozenset[str] = frozenset(),
        is_harsh: bool = False,
        keeps_views: bool = True,
        aim: str = "",
        is_slow: bool = False,
    ) -> None:
        """Set a run up.

        Args:
            seed: of everything.
            plants: bugs that are planted.
            is_harsh: faults follow each other closely.
            keeps_views: a center writes each view down where the next one finds it.
            aim: only processes whose names begin so are killed and paused.
            is_slow: the network is always at its worst.
        """
        world = World(seed)
        draw = world.random
        servers, workers = draw.choice((2, 2, 3)), draw.choice((2, 3))
        self.run = Run(
            world=world,
            rule=UpdateRule.parse(draw.choice(RULES)).resolve(workers),
            workers=workers,
            steps=draw.choice((8, 12)),
            wanted=wanted(servers, backups=draw.choice((1, 1, servers - 1))),
            plants=plants,
            keeps_views=keeps_views,
        )
        self.is_harsh, self.aim, self.is_slow = is_harsh, aim, is_slow
        self.cut_since = 0.0
        self.run.election = Election(self.run)
        update_log = UpdateLog(rule=self.run.rule, workers=workers, steps=self.run.steps)
        self.run.bases[0] = Checkpoint(0, update_log.export())
        self.kinds: dict[str, type] = {f"c{number}": Center for number in range(2)}
        self.kinds |= {f"s{number}": Server for number in range(servers)}
        self.kinds |= {f"w{number}": Worker for number in range(workers)}
        for name in self.kinds:
            world.after(draw.uniform(0, 0.5), lambda name=name: self.start(name))

    @property
    def world(self) -> World:
        return self.run.world

    def start(self, name: str) -> None:
        current = self.world.by_name.get(name)
        if current is None or not current.is_alive:
            self.kinds[name](self.run, name)

    # ---- faults

    def kill(self, process: Process) -> None:
        self.world.tell(f"kill {process.id}")
        process.kill()
        draw = self.world.random
        center = self.run.election.owner
        if draw.random() < 0.5 and center is not None and not isinstance(process, Center):
            # Whoever started it sees it die, and tells.
            word = Message("left", process.id, 0, {"id": process.id})
            self.world.after(0.05, lambda: center.when_awake(lambda: center.receive(word)))
        self.world.after(draw.choice((0.2, 1.0, 4.0)), lambda: self.start(process.name))

    def pause(self, process: Process) -> None:
        seconds = self.world.random.choice((0.3, 1.0, 4.0))
        self.world.tell(f"pause {process.id} for {seconds:g} s")
        process.paused_until = self.world.now + seconds

    def cut(self) -> None:
        draw = self.world.random
        one = draw.choice(list(self.kinds))
        others = draw.sample(list(self.kinds), draw.choice((1, 2, len(self.kinds))))
        self.world.tell(f"cut {one} from {' '.join(others)}")
        if not self.cuts_of_centers():
            self.cut_since = self.world.now
        self.world.cuts |= {frozenset((one, other)) for other in others if other != one}

    def cuts_of_centers(self) -> set[frozenset[str]]:
        return {pair for pair in self.world.cuts if any(self.kinds[name] is Center for name in pair)}

    def heal(self) -> None:
        self.world.tell("heal")
        self.world.cuts = set()
        self.world.loss = 0.2 if self.is_slow else self.world.random.choice((0.0, 0.05, 0.2))
        self.world.late = 0.2 if self.is_slow else self.world.random.choice((0.0, 0.02, 0.1))

    def fault(self) -> None:
        alive = [one for one in self.world.by_name.values() if one.is_alive and one.name.startswith(self.aim)]
        kind = self.world.random.choice(("kill", "kill", "pause", "cut", "heal", "heal"))
        if kind in ("kill", "pause") and alive:
            getattr(self, kind)(self.world.random.choice(alive))
        elif kind == "cut":
            self.cut()
        else:
            self.heal()

    # ---- from the start to the end

    def play(self, faults: int) -> Outcome:
        draw = self.world.random
        self.heal()
        self.world.run(draw.uniform(1.0, 3.0))
        for _ in range(faults):
            self.fault()
            if self.cuts_of_centers() and self.world.now - self.cut_since > LONGEST_CUT:
                self.world.tell("heal the centers")
                self.world.cuts -= self.cuts_of_centers()
            gaps = (0.05, 0.4) if self.is_harsh else (0.4, 1.5, 4.0)
            self.world.run(self.world.now + draw.choice(gaps))
        self.world.loss = self.world.late = 0.0
        self.world.cuts = set()
        self.world.tell("the last fault is over")
        last = self.world.now
        while not self.is_over() and self.world.now < last + BOUND:
            self.world.run(self.world.now + 0.1)
        assert self.is_over(), f"not finished {BOUND:g} s after the last fault"
        leader = self.leaders()[0]
        log = list(leader.update_log.log(0))
        self.check_units(leader.update_log, log)
        self.run.check(self.run.kept.history, log, self.replicas())
        return Outcome(self.run, self.world.now - last, self.run.election.epoch)

    def servers(self) -> list[Server]:
        view = self.run.kept
        found = [] if view is None else [self.world.by_id.get(one.id) for one in view.servers]
        return [one for one in found if isinstance(one, Server) and one.view == view]

    def leaders(self) -> list:
        """The update log at the primary, then at the others."""
        chain = self.run.kept.chains[0]
        return [one.leader for id in chain.synced for one in self.servers() if one.id == id and one.leader is not None]

    def replicas(self) -> dict[str, list[Update]]:
        return {
            f"shard {shard} at {one.id}": one.replicas[shard].applied
            for one in self.servers()
            for shard, chain in enumerate(self.run.kept.chains)
            if one.id in chain.synced
        }

    def is_over(self) -> bool:
        """Every worker has been told that it is finished, and every replica of the newest view has applied everything."""
        view = self.run.kept
        if view is None or not view.workers or len(self.servers()) < len(view.servers):
            return False
        leaders = self.leaders()
        if not leaders or not all(one.update_log.is_finished for one in leaders):
            return False
        closed = leaders[0].update_log.closed
        return all(len(applied) == closed for applied in self.replicas().values())

    def check_units(self, update_log: UpdateLog, log: list[Update]) -> None:
        """Every work unit is done, and is in exactly one update."""
        total = self.run.workers * self.run.steps
        assert update_log.num_done == total, f"{update_log.num_done} of {total} work units are done"
        entries = sum(len(record.entries) for record in log)
        assert entries == total, f"{entries} pushes are in the log, for {total} work units"


def play(seed: int, *, faults: int = 6, **more: Any) -> Outcome:
    """Play the history of this seed; an ``AssertionError`` tells what went wrong, with the story of how."""
    history = History(seed, **more)
    try:
        return history.play(faults)
    except AssertionError as error:
        story = "\n".join(history.world.story)
        raise AssertionError(f"seed {seed}, {history.run.rule}: {error}\n{story}") from error
