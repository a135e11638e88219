"""Ranks of an elastic run: they assemble under a view, choose the step to go on from, move state, and take steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.elastic import commit, groupview
from shoal.elastic.commit import Holding, Resumption, Shard
from shoal.elastic.groupview import GroupView, copy_holder
from simulation.group.oracles import NUM_CELLS, Cells, Run, advance
from simulation.world import Call, Message, Process, Sleep, Task

if TYPE_CHECKING:
    from simulation.group.hosts import Agent

DEADLINE = 0.8
"""Seconds that a collective may take."""
SAVE_EVERY = 4


def cells_of(shard: int, num_shards: int) -> range:
    size = NUM_CELLS // num_shards
    return range(shard * size, (shard + 1) * size)


class Rank(Process):
    def __init__(self, run: Run, agent: "Agent", replica: str, position: int, *, spare: bool) -> None:
        super().__init__(run.world, f"{replica}/{position}.{agent.id}.{len(run.world.host_of)}")
        run.world.host_of[self.name] = agent.host
        self.run, self.agent, self.replica, self.position = run, agent, replica, position
        self.step = self.data_position = 0
        self.cells: Cells = {}
        self.own: dict[Shard, tuple[Cells, int]] = {}
        """What it holds: the cells and the position in the data."""
        self.copies: dict[Shard, tuple[Cells, int]] = {}
        self.came: dict[Shard, int] = {}
        """Under which epoch each copy was made."""
        self.copied = -1
        """The newest version that its peer has."""
        self.history = 0
        self.inbox: dict[tuple[int, str, int], dict[str, Any]] = {}
        self.slowness = 1.0
        self.ready = 0
        """The last epoch under which it had its state."""
        self.spawn(self._live(spare))

    # ---- waiting

    def _await(self, view: GroupView, is_there: Callable[[], bool], missing: Callable[[], set[str]]) -> Any:
        """Wait until something is there; False when a newer view came first, or when it took too long and was told of."""
        end = self.world.now + DEADLINE
        while not is_there():
            if self.agent.newest > view.epoch:
                return False
            if self.world.now > end:
                hosts = {one.host for one in view.replicas if missing() & set(one.members)}
                self.agent.report("failed", member=self.id, epoch=view.epoch, suspects=tuple(sorted(hosts)))
                return False
            yield Sleep(0.04)
        return True

    def _gather(self, view: GroupView, kind: str, number: int, body: Any) -> Any:
        """Every member tells every other: what all told, by member, or None."""
        key = (view.epoch, kind, number)
        for member in view.members:
            if member != self.id:
                self.tell(member, "told", key=key, body=body)
        told = self.inbox.setdefault(key, {})
        told[self.id] = body
        enough = len(view.members) - (
            "do not wait for the last" in self.run.plants and kind == "sum" and len(view.members) > 2
        )
        is_done = yield from self._await(view, lambda: len(told) >= enough, lambda: set(view.members) - told.keys())
        return dict(told) if is_done else None

    def on_told(self, message: Message) -> None:
        epoch, kind, number = message.body["key"]
        if "sum over epochs" in self.run.plants and kind == "sum" and epoch < self.epoch:
            epoch = self.epoch
        if epoch >= self.epoch:
            self.inbox.setdefault((epoch, kind, number), {})[message.sender] = message.body["body"]

    # ---- from the start to the end

    def _live(self, spare: bool) -> Task:
        yield Sleep(self.world.random.uniform(0.05, 0.3))
        self.agent.report(
            "joined", member=self.id, replica=self.replica, host=self.agent.host, position=self.position, spare=spare
        )
        yield Sleep(self.world.random.uniform(0.05, 0.5))
        self.agent.report("ready", member=self.id)
        seen = 0
        while True:
            while self.agent.newest <= seen and "take the view that comes last" not in self.run.plants:
                yield Sleep(0.04)
            while self.agent.view is None or self.agent.newest == seen:
                yield Sleep(0.04)
            view = self.agent.view
            if self.id in view.members:
                self.run.entered(self, seen, view)
                self.epoch = view.epoch
                self.inbox = {key: told for key, told in self.inbox.items() if key[0] >= view.epoch}
                if (yield from self._reload(view)):
                    yield from self._train(view)
            elif self.epoch:
                # It was in one, and is not in a later one: its time is over.
                self.agent.end(self, "left out")
                return
            seen = view.epoch

    # ---- a new view

    def _layout(self, view: GroupView) -> tuple[int, int, int]:
        """The place of its replica, its shard, and how many there are."""
        place = next(at for at, one in enumerate(view.replicas) if self.id in one.members)
        size = self.run.wanted.replica_size
        if not self.run.zero:
            return place, self.position, size
        return place, self.position * len(view.replicas) + place, size * len(view.replicas)

    def _reload(self, view: GroupView) -> Any:
        holding = Holding(member=self.id, own=tuple(self.own), copies=tuple(self.copies), history=self.history)
        reports = yield from self._gather(view, "holding", 0, holding)
        if reports is None:
            return False
        found = commit.choose_step(list(reports.values()))
        self.run.chose(self, view, list(reports.values()), found)
        _, shard, num_shards = self._layout(view)
        wanted = set(cells_of(shard, num_shards))
        if found is None:
            step, cells = self.run.newest_checkpoint()
            position = step * self.run.num_logical
            history = max(one.history for one in reports.values()) + 1
            # What was held before belongs to another history, and could be taken for this one's.
            self.own = {}
            self.copies = {one: held for one, held in self.copies.items() if self.came.get(one) == view.epoch}
            loaded = {cell: cells[cell] for cell in wanted}
        else:
            taken = yield from self._take(view, found, wanted)
            if taken is None:
                return False
            loaded, position = taken
            step, history = found.step, found.history
        if "the data go on when a step fails" in self.run.plants and self.ready:
            position = self.data_position
        mine = Shard(step=step, index=shard, num_shards=num_shards)
        if "drop the old before all have loaded" in self.run.plants:
            self.own = {}
            self.copies = {one: held for one, held in self.copies.items() if self.came.get(one) == view.epoch}
        self.own[mine] = (loaded, position)
        self.history, self.copied = history, -1
        if not (yield from self._copy(view, mine)):
            return False
        everybody = yield from self._gather(view, "loaded", 0, step)
        if everybody is None:
            return False
        self.own = {mine: self.own[mine]}
        self.copies = {
            one: held for one, held in self.copies.items() if (one.step, one.num_shards) == (step, num_shards)
        }
        self.step, self.cells, self.data_position = step, dict(loaded), position
        self.ready = view.epoch
        self.run.is_ready(self, view)
        self.run.check_cells(self)
        return True

    def _take(self, view: GroupView, found: Resumption, wanted: set[int]) -> Any:
        """The cells that it needs of the step to go on from, and the position in the data."""
        loaded: Cells = {}
        position = 0
        for index in range(found.num_shards):
            shard = Shard(step=found.step, index=index, num_shards=found.num_shards)
            if not wanted & set(cells_of(index, found.num_shards)):
                continue
            held = self.own.get(shard) or self.copies.get(shard)
            if held is None:
                source = found.source(index, view.members.index(self.id))
                answer = yield Call(source, "fetch", {"epoch": view.epoch, "shard": shard}, timeout=DEADLINE)
                held = None if answer is None else answer.body["held"]
                if held is None or self.agent.newest > view.epoch:
                    hosts = tuple(one.host for one in view.replicas if source in one.members)
                    self.agent.report("failed", member=self.id, epoch=view.epoch, suspects=hosts)
                    return None
            loaded |= {cell: value for cell, value in held[0].items() if cell in wanted}
            position = held[1]
        return loaded, position

    def on_fetch(self, message: Message) -> None:
        if message.body["epoch"] == self.epoch:
            shard = message.body["shard"]
            self.answer(message, held=self.own.get(shard) or self.copies.get(shard))

    # ---- copies

    def _copy(self, view: GroupView, shard: Shard) -> Any:
        """Keep a copy at home and one at the peer; wait for the peer."""
        self._send_copy(view, shard)
        return (yield from self._await(view, lambda: self.copied >= shard.step, lambda: self._peer(view)))

    def _send_copy(self, view: GroupView, shard: Shard) -> None:
        peers = self._peer(view)
        cells, position = self.own[shard]
        if self.run.zero and self.run.copies:
            self._store(shard, (dict(cells), position), view.epoch)
        if not peers:
            self.copied = shard.step
            return
        body = {"epoch": view.epoch, "shard": shard, "held": (dict(cells), position)}
        for peer in peers:
            self.tell(peer, "copy", **body)

    def _peer(self, view: GroupView) -> set[str]:
        place = self._layout(view)[0]
        holder = copy_holder(view, place)
        if holder is None or not (self.run.zero and self.run.copies):
            return set()
        return {view.replicas[holder].members[self.position]}

    def _store(self, shard: Shard, held: tuple[Cells, int], epoch: int) -> None:
        kept = 1 if "one buffer instead of two" in self.run.plants else 2
        self.copies[shard], self.came[shard] = held, epoch
        same = (shard.index, shard.num_shards)
        for one in [
            one for one in self.copies if (one.index, one.num_shards) == same and one.step <= shard.step - kept
        ]:
            del self.copies[one]

    def on_copy(self, message: Message) -> None:
        body = message.body
        if body["epoch"] >= self.epoch:
            self._store(body["shard"], body["held"], body["epoch"])
            self.tell(message.sender, "copied", epoch=body["epoch"], step=body["shard"].step)

    def on_copied(self, message: Message) -> None:
        if message.body["epoch"] == self.epoch:
            self.copied = max(self.copied, message.body["step"])

    # ---- steps

    @property
    def _agrees(self) -> bool:
        """Whether nobody applies an update before all have the sum: needed where members of a replica hold different parts of
        it and there are no copies."""
        is_split = self.run.wanted.replica_size > 1 and not self.run.zero
        return is_split and "apply before all have the sum" not in self.run.plants

    def _train(self, view: GroupView) -> Any:
        place, shard, num_shards = self._layout(view)
        shares = groupview.deal(view.num_logical, len(view.replicas))[place]
        while self.step < self.run.steps:
            yield Sleep(0.15 * len(shares) * self.slowness * self.world.random.uniform(0.8, 1.2))
            if self.agent.newest > view.epoch:
                return
            if "sum before the copy is there" not in self.run.plants and not (
                yield from self._await(view, lambda: self.copied >= self.step, lambda: self._peer(view))
            ):
                return
            samples = tuple(self.data_position + logical for logical in shares)
            if "the data go on when a step fails" in self.run.plants:
                self.data_position += self.run.num_logical
            told = yield from self._gather(view, "sum", self.step + 1, samples)
            if told is None:
                return
            after = Shard(step=self.step + 1, index=shard, num_shards=num_shards)
            held = self._after(view, told)
            if self._agrees:
                # The parts of a replica apply the same updates: one that has the sum can still apply it under the next view.
                self.own[after] = held[:2]
                if (yield from self._gather(view, "agreed", self.step + 1, ())) is None:
                    return
            while not self.agent.may_apply(view.epoch):
                if self.agent.newest > view.epoch:
                    return
                yield Sleep(0.04)
            self._apply(view, held, after)
        while self.agent.newest <= view.epoch:
            yield Sleep(0.1)

    def _after(self, view: GroupView, told: dict[str, tuple[int, ...]]) -> tuple[Cells, int, tuple[int, ...]]:
        """What it would hold after the update."""
        first = {one.members[0] for one in view.replicas}
        samples = tuple(sorted(sample for member, shares in told.items() if member in first for sample in shares))
        cells = {cell: advance(cell, value, self.step + 1, samples) for cell, value in self.cells.items()}
        is_on = "the data go on when a step fails" in self.run.plants
        return cells, self.data_position + (0 if is_on else self.run.num_logical), samples

    def _apply(self, view: GroupView, held: tuple[Cells, int, tuple[int, ...]], after: Shard) -> None:
        self.step += 1
        self.cells, self.data_position, samples = held
        self.own = {after: (self.cells, self.data_position)}
        self.run.applied(self, view, samples)
        self._send_copy(view, after)
        if self.step % SAVE_EVERY == 0:
            self.run.saved(self.step, view.epoch, self.cells)
