"""Workers that follow the protocol: take a work unit, pull, compute, push to every shard, commit."""

from typing import Any

from shoal.elastic.view import View
from shoal.paramserver.records import Finished, PushId, PushRecord, WorkUnit
from simulation.center import Participant
from simulation.oracles import Run
from simulation.world import Call, Message, Sleep, Task


class Worker(Participant):
    role = "worker"

    def __init__(self, run: Run, name: str) -> None:
        self.number = 0
        self.is_finished = False
        self.life = 0
        """Counts the times it had to forget what it was doing."""
        super().__init__(run, name)
        self.seconds = self.world.random.choice((0.3, 0.5, 1.0))
        self.spawn(self._work())

    def forget(self) -> None:
        self.life += 1
        self.number = 0

    def changed(self, before: View | None, view: View) -> None:
        if before is not None and before.history != view.history:
            # Everything went back: what it computes belongs to another time.
            self.life += 1
            self.is_finished = False

    def _ask(self, shard: int, kind: str, body: dict[str, Any], life: int) -> Any:
        """Ask the primary of a shard, whoever that is, until it answers; None when there is no more point in it."""
        while self.life == life:
            if not self.is_member:
                yield Sleep(0.1)
                continue
            answer: Message | None = yield Call(self.view.chains[shard].primary, kind, body, timeout=0.4)
            if self.life == life and answer is not None:
                return answer.body
        return None

    def _work(self) -> Task:
        while True:
            life = self.life
            body = {"what": "take", "arguments": (self.id, self.world.now, ())}
            given = yield from self._ask(0, "ask_update_log", body, life)
            unit = None if given is None else given["answer"]
            if isinstance(unit, WorkUnit):
                yield from self._do(unit, life)
            else:
                self.is_finished = isinstance(unit, Finished)
                yield Sleep(0.3)

    def _do(self, unit: WorkUnit, life: int) -> Task:
        shards = range(self.run.wanted.servers)
        versions, true_versions = [], []
        for shard in shards:
            pulled = yield from self._ask(shard, "pull", {"shard": shard, "need": unit.need}, life)
            if pulled is None:
                return
            versions.append(pulled["version"])
            true_versions.append(pulled["true_version"])
        yield Sleep(self.seconds * self.world.random.uniform(0.8, 1.2))
        if self.life != life:
            return
        identity = PushId(self.id, self.number)
        self.number += 1
        for shard in shards:
            if (yield from self._ask(shard, "push", {"shard": shard, "identity": identity}, life)) is None:
                return
        push = PushRecord(
            worker=self.id,
            number=identity.number,
            units=(unit.number,),
            samples=1,
            weight=1.0,
            loss=1.0,
            version=min(versions),
        )
        body = {"what": "commit", "arguments": (push, self.world.now), "read": min(true_versions)}
        yield from self._ask(0, "ask_update_log", body, life)
