"""Servers that follow the protocol: a push is answered when every replica has it, and so is what the update log is told."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.elastic.view import Chain, View
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.records import Committed, PushId, Update
from simulation.center import Participant
from simulation.oracles import Checkpoint, Run
from simulation.world import Call, Message, Sleep, Task

PATIENCE = 1.0
"""How long a primary asks a replica before it tells the center."""
CHECKPOINT_SECONDS = 2.0


@dataclass
class Replica:
    """One shard: gradients that wait, and updates that were applied. The weights are the updates."""

    stored: set[PushId] = field(default_factory=set)
    applied: list[Update] = field(default_factory=list)
    is_whole: bool = True
    """False until what joins has got its snapshot."""

    def store(self, identity: PushId) -> None:
        """Twice is once, also when it was applied in the meantime."""
        if not any(entry.identity == identity for record in self.applied for entry in record.entries):
            self.stored.add(identity)


class Keeper:
    """The update log at one of the replicas of shard 0."""

    def __init__(self, update_log: UpdateLog) -> None:
        self.update_log = update_log
        self.stream: tuple[int, str] = (0, "")
        """The epoch under which its primary began to write, and who that was."""
        self.position = 0
        self.inputs: list[tuple[str, tuple[Any, ...]]] = []
        """As primary: what it was told since it began, number 1 first."""
        self.confirmed: dict[str, int] = {}
        """As primary: how far each other replica is."""
        self.closed_at: dict[int, int] = {}
        """As primary: updates that were closed after each input."""

    def confirmed_by(self, others: list[str]) -> int:
        return min((self.confirmed.get(one, -1) for one in others), default=self.position)

    def visible(self, others: list[str]) -> int:
        """Updates that all replicas of the update log know: only these may be applied anywhere."""
        return self.closed_at.get(self.confirmed_by(others), 0)


class Server(Participant):
    role = "server"

    def __init__(self, run: Run, name: str) -> None:
        self.history = -1
        self.replicas: dict[int, Replica] = {}
        self.leader: Keeper | None = None
        self.failing: dict[tuple[int, str], float] = {}
        super().__init__(run, name)
        self.spawn(self._follow())
        self.spawn(self._watch_update_log())

    # ---- views

    def forget(self) -> None:
        self.history = -1
        self.replicas.clear()
        self.leader = None

    def changed(self, before: View | None, view: View) -> None:
        if view.history != self.history:
            self._begin(view)
        self.failing.clear()
        for shard, chain in enumerate(view.chains):
            if self.id not in chain.replicas:
                self.replicas.pop(shard, None)
                continue
            if shard not in self.replicas:
                assert self.id not in chain.synced, f"{self.id} should have shard {shard} and has nothing"
                self.replicas[shard] = Replica(is_whole=False)
            if chain.primary == self.id:
                for one in chain.joining:
                    self.spawn(self._sync(shard, one.server, one.order))
        self._change_update_log(view)

    def _begin(self, view: View) -> None:
        """Everything starts from the same weights: the first ones, or those of a checkpoint."""
        self.history = view.history
        base = self.run.choose_base(view.history)
        update_log = UpdateLog.restore(base.update_log)
        updates = msgspec.convert(base.update_log["log"], list[Update])
        waiting = {PushId(one["worker"], one["number"]) for one in base.update_log["pending"]}
        mine = [shard for shard, chain in enumerate(view.chains) if self.id in chain.synced]
        self.replicas = {shard: Replica(stored=set(waiting), applied=list(updates)) for shard in mine}
        self.leader = Keeper(update_log) if 0 in mine else None

    def _chain(self, shard: int) -> Chain:
        assert self.view is not None
        return self.view.chains[shard]

    def _others(self, shard: int) -> list[str]:
        """Who must have something before it is acknowledged: what joins as well, so that it is whole when it is a backup."""
        chain = self._chain(shard)
        return [one for one in chain.replicas if one != self.id]

    # ---- pushes

    def on_push(self, message: Message) -> None:
        self.spawn(self._push(message))

    def _push(self, message: Message) -> Task:
        shard, identity = message.body["shard"], message.body["identity"]
        if self.fenced(message) or self._chain(shard).primary != self.id:
            return
        if self.view.find(identity.worker) is None:
            return
        epoch = self.epoch
        self.replicas[shard].store(identity)
        if "answer a push before the backup has it" in self.run.plants:
            for other in self._others(shard):
                self.tell(other, "forward", shard=shard, identity=identity)
        else:
            for other in self._others(shard):
                while True:
                    call = Call(other, "forward", {"shard": shard, "identity": identity}, timeout=0.2)
                    answer = yield call
                    if self.epoch != epoch:
                        return
                    self._note_answer(shard, other, answer is not None)
                    if answer is not None:
                        break
        self.answer(message, is_stored=True)

    def on_forward(self, message: Message) -> None:
        shard = message.body["shard"]
        if not self.fenced(message) and self.id in self._chain(shard).replicas:
            self.replicas[shard].store(message.body["identity"])
            self.answer(message)

    def _note_answer(self, shard: int, other: str, is_there: bool) -> None:
        """Tell the center of a replica that does not follow."""
        if is_there:
            self.failing.pop((shard, other), None)
            return
        since = self.failing.setdefault((shard, other), self.world.now)
        center = self.run.election.owner
        if self.world.now - since > PATIENCE and center is not None:
            self.tell(center.id, "failed", shard=shard, server=other, epoch=self.epoch)

    # ---- pulls

    def on_pull(self, message: Message) -> None:
        shard, need = message.body["shard"], message.body["need"]
        if self.fenced(message) or self._chain(shard).primary != self.id:
            return
        applied = self.replicas[shard].applied
        if len(applied) >= need or "give weights that are too old" in self.run.plants:
            self.run.read(self.history, self.epoch, applied)
            self.answer(message, version=max(need, len(applied)), true_version=len(applied))

    # ---- new replicas

    def _sync(self, shard: int, target: str, order: int) -> Task:
        def is_wanted() -> bool:
            if self.view is None or shard not in self.replicas or self._chain(shard).primary != self.id:
                return False
            return any((one.server, one.order) == (target, order) for one in self._chain(shard).joining)

        while is_wanted():
            replica = self.replicas[shard]
            body = {
                "shard": shard,
                "order": order,
                "stored": frozenset(replica.stored),
                "applied": tuple(replica.applied),
                "history": self.history,
            }
            answer = yield Call(target, "snapshot", body)
            if answer is not None and shard == 0 and is_wanted():
                # The update log of a joining replica goes the same way as to every other.
                leader = self.leader
                if leader.confirmed.get(target, -1) < leader.position:
                    yield from self._replicate(target, leader.position, self.epoch)
                    continue
            while answer is not None and is_wanted():
                center = self.run.election.owner
                if center is not None:
                    self.tell(center.id, "synced", shard=shard, server=target, order=order)
                yield Sleep(0.5)

    def on_snapshot(self, message: Message) -> None:
        body = message.body
        shard = body["shard"]
        if self.fenced(message):
            return
        if not any((one.server, one.order) == (self.id, body["order"]) for one in self._chain(shard).joining):
            return
        replica = self.replicas[shard]
        self.history = body["history"]
        if not replica.is_whole or len(replica.applied) < len(body["applied"]):
            self.replicas[shard] = Replica(stored=replica.stored | body["stored"], applied=list(body["applied"]))
        else:
            replica.stored |= body["stored"]
        self.answer(message)

    # ---- the update log

    def _change_update_log(self, view: View) -> None:
        chain = view.chains[0]
        if self.id not in chain.replicas:
            self.leader = None
            return
        if self.leader is None:
            self.leader = Keeper(self._empty_update_log())
            self.leader.position = -1
        leader = self.leader
        if chain.primary != self.id:
            leader.inputs.clear()
            return
        if leader.stream[1] != self.id or not leader.inputs:
            # A new primary: what it has is the truth from now on, and the others get it whole.
            leader.stream, leader.position = (view.epoch, self.id), 0
            leader.confirmed, leader.inputs = {}, []
            leader.closed_at = {0: leader.update_log.closed}
            self._tell_update_log("rebase", self.world.now)
        for index, worker in enumerate(view.workers):
            if worker.id not in leader.update_log.members:
                self._tell_update_log("join", worker.id, index, self.world.now)
        if "a dead worker keeps its work units" not in self.run.plants:
            for worker in list(leader.update_log.members):
                if view.find(worker) is None:
                    self._tell_update_log("leave", worker, self.world.now)

    def _empty_update_log(self) -> UpdateLog:
        return UpdateLog(rule=self.run.rule, workers=self.run.workers, steps=self.run.steps)

    def _tell_update_log(self, what: str, *arguments: Any) -> Any:
        """An input of the update log, as primary."""
        leader = self.leader
        answer = getattr(leader.update_log, what)(*arguments)
        leader.inputs.append((what, arguments))
        leader.position = len(leader.inputs)
        leader.closed_at[leader.position] = leader.update_log.closed
        return answer

    def _replicate(self, other: str, position: int, epoch: int) -> Task:
        """Bring another replica's update log up to a position, or stop when the view changed."""
        while self.epoch == epoch and self.leader is not None and self.leader.confirmed.get(other, -1) < position:
            leader = self.leader
            reached = leader.confirmed.get(other, -1)
            body: dict[str, Any] = {"stream": leader.stream, "position": leader.position, "history": self.history}
            if reached < 0:
                body["update_log"] = leader.update_log.export()
            else:
                body |= {"since": reached, "inputs": tuple(leader.inputs[reached:])}
            answer = yield Call(other, "note", body, timeout=0.2)
            if self.epoch != epoch:
                return
            self._note_answer(0, other, answer is not None)
            if answer is not None:
                # Not always further on: one that left the chain and joined again begins with nothing.
                is_ours = leader.stream == answer.body["stream"]
                leader.confirmed[other] = answer.body["position"] if is_ours else -1

    def on_note(self, message: Message) -> None:
        body = message.body
        if self.fenced(message) or self.id not in self._chain(0).replicas or self._chain(0).primary == self.id:
            return
        leader = self.leader
        if "update_log" in body and (leader.stream != body["stream"] or leader.position < body["position"]):
            leader.update_log = UpdateLog.restore(body["update_log"])
            leader.stream, leader.position = body["stream"], body["position"]
        elif "inputs" in body and leader.stream == body["stream"] and leader.position >= body["since"]:
            for what, arguments in body["inputs"][leader.position - body["since"] :]:
                getattr(leader.update_log, what)(*arguments)
                leader.position += 1
        self.answer(message, stream=leader.stream, position=leader.position)

    def _keeps_update_log(self) -> bool:
        return self.view is not None and self.leader is not None and self._chain(0).primary == self.id

    def on_ask_update_log(self, message: Message) -> None:
        self.spawn(self._ask_update_log(message))

    def _ask_update_log(self, message: Message) -> Task:
        """take, commit: answered when every replica of the update log knows of it."""
        if self.fenced(message) or not self._keeps_update_log():
            return
        epoch, history = self.epoch, self.history
        body = message.body
        answer = self._tell_update_log(body["what"], *body["arguments"])
        position = self.leader.position
        if "answer a commit before the backup has it" not in self.run.plants:
            for other in self._others(0):
                yield from self._replicate(other, position, epoch)
            if self.epoch != epoch:
                return
        if isinstance(answer, Committed):
            self.run.committed(history, epoch, body["arguments"][0], body["read"])
        self.answer(message, answer=answer)

    def on_log(self, message: Message) -> None:
        if self.fenced(message) or not self._keeps_update_log():
            return
        leader = self.leader
        visible = leader.visible(self._others(0))
        if "show updates before the backup has them" in self.run.plants:
            visible = leader.update_log.closed
        self.answer(
            message, updates=leader.update_log.log(message.body["since"])[: max(0, visible - message.body["since"])]
        )

    def _watch_update_log(self) -> Task:
        """Keep the other replicas of the update log close, and write checkpoints, while this is the primary."""
        saved_at = self.world.now
        while True:
            yield Sleep(0.3)
            if not self._keeps_update_log():
                continue
            if self.leader.update_log.tick(self.world.now):
                self._tell_update_log("tick", self.world.now)
            for other in self._others(0):
                if self._keeps_update_log():
                    yield from self._replicate(other, self.leader.position, self.epoch)
            if not self._keeps_update_log() or self.world.now < saved_at + CHECKPOINT_SECONDS:
                continue
            if self.leader.confirmed_by(self._others(0)) >= self.leader.position:
                self.run.checkpoints.append(Checkpoint(self.history, self.leader.update_log.export()))
                saved_at = self.world.now

    def _follow(self) -> Task:
        """Apply the updates of the log, in their order, at every replica."""
        while True:
            yield Sleep(0.1)
            whole = [one for one in self.replicas.values() if one.is_whole]
            if self.view is None or not whole:
                continue
            epoch = self.epoch
            since = min(len(one.applied) for one in whole)
            answer = yield Call(self._chain(0).primary, "log", {"since": since}, timeout=0.3)
            if answer is None or self.epoch != epoch:
                continue
            for record in answer.body["updates"]:
                for shard, replica in self.replicas.items():
                    if replica.is_whole and len(replica.applied) == record.number:
                        self._apply(shard, replica, record)

    def _apply(self, shard: int, replica: Replica, record: Update) -> None:
        wanted = {entry.identity for entry in record.entries}
        missing = wanted - replica.stored
        assert not missing, f"{self.id} has not got {sorted(missing)} of update {record.number} for shard {shard}"
        replica.applied.append(record)
        replica.stored -= wanted
