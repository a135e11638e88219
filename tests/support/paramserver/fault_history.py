"""A seeded history of a parameter-server run without a process: workers, replicas of the update log and of the shards, and
faults.

Every message can be late, lost or doubled: takes and commits whose answers get lost, pushes that reach one replica and not the
other, replicas that lag behind the log. Workers die and join at any moment, primaries die and their backups take over. What is
acknowledged, and only that, is taken for kept.
"""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.core.updaterule import UpdateRule
from shoal.optim.build import decide_groups
from shoal.optim.config import OptimConfig
from shoal.paramserver.consistency import Lateness
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.records import Committed, Finished, PushId, PushRecord, Refused, Update, Wait, WorkUnit
from shoal.paramserver.server.gradients import WorkerGone
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.sharding import TensorSpec, cut_model
from support.paramserver.torch_oracle import SHAPES, Read, gradient, initial_weights, summed

MODEL = {name: TensorSpec(shape, "float32") for name, shape in SHAPES.items()}
NUM_SHARDS = 2


def rate(number: int) -> float:
    """The learning rate of an update."""
    return 0.05 / (1 + 0.1 * number)


@dataclass
class Worker:
    """One instance of a worker."""

    name: str
    held: list[int] = field(default_factory=list)
    needs: int = 0
    parts: list[tuple[Read, dict[str, torch.Tensor]]] = field(default_factory=list)
    number: int = 0
    pushing: bool = False
    since_fetch: int = 0
    cache: tuple[tuple[tuple[str, int, int, int], ...], dict[str, torch.Tensor]] | None = None


class History:
    """One run. ``run`` goes on until the update log is finished; the rest is what tests look at."""

    def __init__(
        self,
        update: str,
        seed: int,
        *,
        workers: int = 3,
        steps: int = 5,
        optimizer: str = "momentum",
        faults: bool = True,
        deaths: bool = True,
        crashes: bool = False,
        alive: int | None = None,
        lateness: Lateness | None = None,
    ) -> None:
        self.random = random.Random(f"{update} {seed}")
        self.update, self.seed, self.steps, self.workers = update, seed, steps, workers
        self.faults, self.deaths, self.crashes = faults, faults and deaths, crashes
        self.saved: tuple[str, list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]] | None = None
        self.num_crashes = 0
        self.optim = OptimConfig(name=optimizer, lr=0.05)
        rule = UpdateRule.parse(update)
        spare = 0.5 if seed % 3 == 0 else None
        self.update_logs = [
            UpdateLog(rule=rule, workers=workers, steps=steps, lateness=lateness, duplicate_after=spare)
            for _ in range(2)
        ]
        self.rule = self.update_logs[0].rule
        self.map = cut_model(MODEL, NUM_SHARDS)
        self.shards = [[self._replica(number) for _ in range(2)] for number in range(NUM_SHARDS)]
        self.log: list[Update] = []
        self.reads: dict[tuple[str, int], list[Read]] = {}
        self.kept: dict[tuple[str, int], PushRecord] = {}
        self.now = 0.0
        self.alive: dict[str, Worker] = {}
        self.discards: list[tuple[int, int, str, frozenset[int]]] = []
        self.straying: list[PushId] = []
        self.num_refused = 0
        self.num_born = 0
        self.num_events = 0
        for _ in range(workers if alive is None else alive):
            self._join()

    @property
    def update_log(self) -> UpdateLog:
        """The one that answers."""
        return self.update_logs[0]

    def run(self, most: int = 20000) -> "History":
        """Until all work is done and every replica has applied it."""
        while not (
            self.update_log.is_finished
            and all(one.version == self.update_log.closed for pair in self.shards for one in pair)
        ):
            self.num_events += 1
            assert self.num_events < most, f"{self.update}, seed {self.seed}: no end after {most} events"
            self.now += self.random.expovariate(10.0)
            self._happen()
        for _ in range(len(self.discards)):
            self._discard()
        return self

    def whole(self, replica: int) -> dict[str, torch.Tensor]:
        """The weights that one set of replicas holds."""
        found = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
        for pair in self.shards:
            for piece in pair[replica].shard.pieces:
                part = pair[replica].weights[piece.offset : piece.offset + piece.numel]
                found[piece.name].view(-1)[piece.start : piece.stop] = part
        return found

    def _happen(self) -> None:
        kinds: list[tuple[Callable[[], None], float]] = [(self._work, 10.0), (self._follow, 6.0), (self._tick, 1.0)]
        if self.deaths:
            kinds += [(self._die, 0.25), (self._join, 0.25), (self._lose_server, 0.15), (self._lose_update_log, 0.15)]
        if self.crashes:
            kinds += [(self._save, 1.0), (self._crash, 0.1)]
        if self.discards:
            kinds.append((self._discard, 3.0))
        if self.straying:
            kinds.append((self._stray, 1.0))
        chosen = self.random.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
        chosen()

    def _both(self, act: Callable[[UpdateLog], object]) -> object:
        """An input of the update log: the backup has it before the answer goes out."""
        answers = [act(update_log) for update_log in self.update_logs]
        assert answers[0] == answers[1], f"two replicas of the update log answer {answers}"
        return answers[0]

    def _input(self, act: Callable[[UpdateLog], object]) -> object:
        before = self.update_log.closed
        answer = self._both(act)
        self.log += self.update_log.log(before)
        return answer

    def _join(self) -> None:
        if len(self.alive) <= self.workers:
            name = f"{self.num_born:016x}"
            self.num_born += 1
            self.alive[name] = Worker(name)
            self._input(lambda update_log: update_log.join(name, self.num_born % self.workers, self.now))

    def _die(self) -> None:
        if len(self.alive) > 1:
            name = self.random.choice(sorted(self.alive))
            worker = self.alive.pop(name)
            self._input(lambda update_log: update_log.leave(name, self.now))
            keep = self.update_log.committed(name)
            self.discards += [(shard, replica, name, keep) for shard in range(NUM_SHARDS) for replica in range(2)]
            if worker.pushing and self.random.random() < 0.5:
                self.straying.append(PushId(name, worker.number))

    def _stray(self) -> None:
        """A push of a dead worker arrives after all, or one that was committed comes once more."""
        identity = self.straying.pop()
        number = self.random.randrange(NUM_SHARDS)
        replica = self.random.choice(self.shards[number])
        try:
            replica.store(identity, torch.ones_like(replica.weights), 0)
        except WorkerGone:
            self.num_refused += 1

    def _discard(self) -> None:
        shard, replica, name, keep = self.discards.pop(self.random.randrange(len(self.discards)))
        self.shards[shard][replica].discard(name, keep)

    def _tick(self) -> None:
        self._input(lambda update_log: update_log.tick(self.now))
        if self.random.random() < 0.1:
            lowest = min(one.version for pair in self.shards for one in pair)
            self._both(lambda update_log: update_log.trim(lowest))

    def _lose_update_log(self) -> None:
        data = json.loads(json.dumps(self.update_logs[1].export()))
        self.update_logs = [self.update_logs[1], UpdateLog.restore(data)]
        assert self.update_logs[0].digest() == self.update_logs[1].digest()

    def _save(self) -> None:
        """A checkpoint at a consistent cut: the update log, weights and optimizer state, no gradient that waits."""
        primaries = [pair[0] for pair in self.shards]
        if all(primary.version == self.update_log.closed for primary in primaries):
            moments = [{key: one.clone() for key, one in primary.optimizer_state().items()} for primary in primaries]
            weights = self.whole(0)
            self.saved = json.dumps(self.update_log.export()), [(weights, state) for state in moments]

    def _crash(self) -> None:
        """Everything dies and begins again from the checkpoint."""
        if self.saved is None or self.num_crashes == 3:
            return
        self.num_crashes += 1
        text, tensors = self.saved
        self.update_logs = [UpdateLog.restore(json.loads(text)) for _ in range(2)]
        self._both(lambda update_log: update_log.restart(self.now))
        for number, (weights, moments) in enumerate(tensors):
            self.shards[number] = [self._replica(number) for _ in range(2)]
            for replica in self.shards[number]:
                replica.load_weights(weights)
                replica.load_optimizer_state(moments)
                replica.version = self.update_log.closed
        del self.log[self.update_log.closed :]
        used = {entry.identity for record in self.log for entry in record.entries}
        self.kept = {key: one for key, one in self.kept.items() if key in used}
        self.alive, self.discards, self.straying = {}, [], []
        for _ in range(self.workers):
            self._join()

    def _lose_server(self) -> None:
        """A replica dies; the other is the primary now, and a new backup is made from it."""
        number, dead = self.random.randrange(NUM_SHARDS), self.random.randrange(2)
        left = self.shards[number][1 - dead]
        fresh = self._replica(number)
        tensors, values = left.export()
        fresh.restore(tensors, json.loads(json.dumps(values)))
        self.shards[number] = [left, fresh]
        # What the cleaner still owed to either of them, it owes to both: the new one was made from the old.
        owed = {(name, keep) for shard, _, name, keep in self.discards if shard == number}
        self.discards = [one for one in self.discards if one[0] != number]
        self.discards += [(number, replica, name, keep) for name, keep in sorted(owed, key=str) for replica in range(2)]

    def _follow(self) -> None:
        replica = self.random.choice([one for pair in self.shards for one in pair])
        if replica.version < self.update_log.closed:
            record = self.update_log.log(replica.version)[0]
            assert not replica.missing(record), f"acknowledged and lost: {replica.missing(record)}"
            replica.apply(record, rate(record.number))

    def _replica(self, number: int) -> ShardState:
        whole = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(one) for name, one in initial_weights().items()})
        state = ShardState(
            self.map.shards[number], model=MODEL, optim=self.optim, groups=decide_groups(self.optim, whole)
        )
        state.load_weights(initial_weights())
        return state

    def _work(self) -> None:
        worker = self.alive[self.random.choice(sorted(self.alive))]
        if worker.pushing:
            self._push(worker)
        elif len(worker.parts) < len(worker.held):
            self._compute(worker)
        elif len(worker.held) >= self.rule.push_every:
            worker.pushing = True
        else:
            self._take(worker)

    def _take(self, worker: Worker) -> None:
        held = tuple(worker.held)
        answer = self._input(lambda update_log: update_log.take(worker.name, self.now, held))
        if self.faults and self.random.random() < 0.1:
            return  # the answer is lost; it asks again
        match answer:
            case WorkUnit():
                worker.held.append(answer.number)
                worker.needs = answer.need
            case Wait(must_commit=True):
                worker.pushing = True
            case Wait():
                assert answer.reason
            case Finished():
                assert self.update_log.is_finished
            case _:
                raise AssertionError(answer)

    def _compute(self, worker: Worker) -> None:
        if worker.cache is None or worker.since_fetch >= self.rule.fetch_every:
            primaries = [pair[0] for pair in self.shards]
            if any(primary.version < worker.needs for primary in primaries):
                return  # the pull is parked
            spans, weights = [], {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
            for primary in primaries:
                for piece in primary.shard.pieces:
                    spans.append((piece.name, piece.start, piece.stop, primary.version))
                    part = primary.weights[piece.offset : piece.offset + piece.numel]
                    weights[piece.name].view(-1)[piece.start : piece.stop] = part
            worker.cache, worker.since_fetch = (tuple(spans), weights), 0
        worker.since_fetch += 1
        read, weights = worker.cache
        unit = worker.held[len(worker.parts)]
        worker.parts.append((Read(unit, read), gradient(unit, weights)))

    def _push(self, worker: Worker) -> None:
        identity = PushId(worker.name, worker.number)
        replicas = [one for pair in self.shards for one in pair]
        # Also to one that has it already: pushes are sent again.
        replica = self.random.choice(replicas)
        whole = summed([part for _, part in worker.parts])
        flat = torch.cat([whole[piece.name].reshape(-1)[piece.start : piece.stop] for piece in replica.shard.pieces])
        version = min(one[3] for read, _ in worker.parts for one in read.spans)
        replica.store(identity, flat, version)
        if all(identity in one._gradients for one in replicas):
            self._commit(worker, version)

    def _commit(self, worker: Worker, version: int) -> None:
        push = PushRecord(
            worker=worker.name,
            number=worker.number,
            units=tuple(sorted(worker.held)),
            samples=1 + worker.held[0] % 3,
            weight=1.0,
            loss=float(worker.held[0]),
            version=version,
        )
        answer = self._input(lambda update_log: update_log.commit(push, self.now))
        assert not isinstance(answer, Refused), answer.reason
        if self.faults and self.random.random() < 0.2:
            again = self._input(lambda update_log: update_log.commit(push, self.now))
            assert type(again) is type(answer), f"{answer}, and when it was sent again {again}"
        if isinstance(answer, Committed):
            self.kept[worker.name, worker.number] = push
            self.reads[worker.name, worker.number] = [read for read, _ in worker.parts]
        if self.faults and self.random.random() < 0.3:
            self.straying.append(PushId(worker.name, worker.number))
        worker.number += 1
        worker.held, worker.parts, worker.pushing = [], [], False
        if worker.since_fetch >= self.rule.fetch_every:
            worker.cache = None


def check_staleness(history: History) -> None:
    """No worker read older weights than the rule allows, and every update says how old its oldest were."""
    if history.rule.staleness is None:
        return
    for (worker, number), push in history.kept.items():
        step = push.units[0] // history.workers
        read = min(one[3] for one in history.reads[worker, number][0].spans)
        assert step - read <= history.rule.staleness, (
            f"step {step} was computed with version {read} under {history.update}"
        )
    assert all(record.staleness <= history.rule.staleness for record in history.log)


def check_accounting(history: History) -> None:
    """Every work unit is in exactly one update, every acknowledged push too, and nothing waits for nobody."""
    used = [entry.identity for record in history.log for entry in record.entries]
    assert sorted(used) == sorted(history.kept), "a commit was acknowledged and is in no update, or in two"
    done = sorted(unit for push in history.kept.values() for unit in push.units)
    assert done == list(range(history.steps * history.workers)), "a work unit was lost or done twice"
    assert [record.number for record in history.log] == list(range(len(history.log)))
    if history.rule.is_stepwise:
        orders = [[history.kept[entry.identity].units[0] for entry in record.entries] for record in history.log]
        assert list(itertools.chain(*orders)) == done, "an update is not the shares of its step in their order"
    # No update came after these: answered as not used, or of a worker that is still pushing what another has done.
    unused = {PushId(*one) for one in history.update_log.export()["unused"]}
    unused |= {PushId(worker.name, worker.number) for worker in history.alive.values() if worker.pushing}
    for pair in history.shards:
        for replica in pair:
            assert set(replica._gradients.stored) <= unused, "a gradient waits for an update that never comes"
