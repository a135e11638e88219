"""What a run must never do, and how it is seen from outside: by somebody who knows everything at every moment."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.core.updaterule import UpdateRule
from shoal.elastic.membership import Wanted
from shoal.elastic.view import View
from shoal.paramserver.consistency import needs
from shoal.paramserver.records import PushId, PushRecord, Update
from simulation.world import World

if TYPE_CHECKING:
    from simulation.center import Election


@dataclass(frozen=True)
class Checkpoint:
    """The update log at a moment when all of it was replicated. The shards follow from its log."""

    history: int
    update_log: dict[str, Any]


@dataclass
class Run:
    """One run in one world: what was asked for, and what happened."""

    world: World
    rule: UpdateRule
    workers: int
    steps: int
    wanted: Wanted
    keeps_views: bool = True
    plants: frozenset[str] = frozenset()
    kept: View | None = None
    election: "Election" = None  # type: ignore[assignment]
    checkpoints: list[Checkpoint] = field(default_factory=list)
    bases: dict[int, Checkpoint] = field(default_factory=dict)
    """What each history began with: chosen once, by whoever needs it first, like a file that is made only once."""
    views: list[View] = field(default_factory=list)
    """All that were published."""
    accepted_views: dict[int, View] = field(default_factory=dict)
    led: dict[int, View] = field(default_factory=dict)
    """For each shard the newest view that its primary accepted, under which alone it acknowledges; or that forgot that one."""
    forgotten: int = 0
    """The epoch of the last view that was made by somebody who did not know the one before; see ``published``."""
    acknowledged: list[tuple[int, int, PushId]] = field(default_factory=list)
    """History, epoch, and the push."""
    reads: list[tuple[int, int, int, tuple[PushId, ...]]] = field(default_factory=list)
    """History, epoch, version, and what was in it."""
    num_restores: int = 0
    final: list[Update] | None = None

    def choose_base(self, history: int) -> Checkpoint:
        if history not in self.bases:
            of_last = [one for one in self.checkpoints if one.history == history - 1]
            # Without one the history before was over before anything was saved in it.
            self.bases[history] = of_last[-1] if of_last else self.choose_base(history - 1)
            self.num_restores += 1
            self.world.tell(f"history {history} begins at version {len(self.bases[history].update_log['log'])}")
        return self.bases[history]

    # ---- at every moment

    def published(self, view: View) -> None:
        """A center made a view.

        Where views are not written down, one is forgotten when all that had accepted it died: the next center goes on from an
        earlier one, or begins anew. What was acknowledged is lost by that, and may be: the promise (docs/guarantees.md) is for
        the death of one copy of a shard at a time. So it must be true that a shard had no copy left.
        """
        self.world.tell(
            f"view {view.epoch}: {' '.join(one.id for one in view)} | "
            + " ".join(
                "+".join(chain.synced) + "".join(f"~{one.server}" for one in chain.joining) for chain in view.chains
            )
        )
        if self.led and view.history > self.views[-1].history:
            here = {one.id for one in view.servers}
            is_lost = any(here.isdisjoint(one.chains[shard].synced) for shard in self.led for one in self._since(shard))
            assert is_lost, f"in view {view.epoch} all went back to the checkpoint, and every shard had a copy"
        if not all(self._follows(view, shard) for shard in self.led):
            self._forget(view)
        self.views.append(view)

    def _follows(self, view: View, shard: int) -> bool:
        """Whether a copy of a shard is one that had everything under the last view that mattered to the shard, or since."""
        led = self.led[shard]
        if view.history != led.history:
            return view.history > led.history
        return any(set(view.chains[shard].synced) & set(one.chains[shard].synced) for one in self._since(shard))

    def _since(self, shard: int) -> list[View]:
        """The last view that mattered to a shard, and what was published since: a center knows of one of these."""
        led = self.led[shard]
        return [led, *(one for one in self.views if one.epoch > led.epoch and one.history == led.history)]

    def _forget(self, view: View) -> None:
        newest = max(self.led.values(), key=lambda one: one.epoch)
        assert not self.keeps_views, f"view {newest.epoch} was written down, and view {view.epoch} was made without it"
        copies = {
            shard: [one for one in led.chains[shard].synced if one in self.world.by_id]
            for shard, led in self.led.items()
        }
        assert not all(copies.values()), f"view {newest.epoch} was forgotten, and every shard had a copy: {copies}"
        self.world.tell(f"view {newest.epoch} is forgotten")
        self.forgotten, self.led = view.epoch, dict.fromkeys(self.led, view)
        holders = [self.world.by_id.get(one) for chain in view.chains for one in chain.synced]
        if not any(getattr(one, "history", -1) == view.history for one in holders):
            # Servers that are started again, and those that go back, read the newest checkpoint, whichever history wrote it.
            saved = self.checkpoints[-1] if self.checkpoints else self.bases[0]
            base = Checkpoint(view.history, saved.update_log)
            self.checkpoints.append(base)
            self.bases = {at: one for at, one in self.bases.items() if at < view.history} | {view.history: base}
            self.num_restores += 1
            self.world.tell(f"everything begins anew at version {len(base.update_log['log'])}")

    def accepted(self, view: View, id: str) -> None:
        """A member took a view from a center, or from the next one, which tells the last view of the one before as it was.

        Not an equal one: what two centers made under one epoch is wrong even where it is the same.
        """
        known = self.accepted_views.setdefault(view.epoch, view)
        assert known is view, f"two centers were accepted in epoch {view.epoch}"
        for shard, chain in enumerate(view.chains):
            led = self.led.get(shard)
            if chain.primary == id and (led is None or view.epoch > led.epoch):
                self.led[shard] = view

    def committed(self, history: int, epoch: int, push: PushRecord, read: int) -> None:
        """A worker was told that its push is kept."""
        self.acknowledged.append((history, epoch, push.identity))
        step = push.units[0] // self.workers
        if self.rule.staleness is not None:
            assert step - read <= self.rule.staleness, f"step {step} was computed with version {read} under {self.rule}"
            assert read >= needs(self.rule, step)

    def read(self, history: int, epoch: int, applied: list[Update]) -> None:
        """Weights were given to a worker: with these updates in them."""
        self.reads.append((history, epoch, len(applied), identities(applied)))

    # ---- at the end

    def check(self, history: int, log: list[Update], replicas: dict[str, list[Update]]) -> None:
        """The run is finished."""
        entries = identities(log)
        assert len(set(entries)) == len(entries), "a push is in two updates"
        for name, applied in replicas.items():
            assert identities(applied) == entries, f"{name} did not apply what the log says, each once and in order"
        base = self.bases.get(history)
        kept = set(entries)
        lost = {one for at, epoch, one in self.acknowledged if at == history and epoch >= self.forgotten} - kept
        assert not lost, f"acknowledged and not in the log: {sorted(lost)}"
        if base is not None:
            before = {(entry[0], entry[1]) for record in base.update_log["log"] for entry in record["entries"]}
            assert before <= {tuple(one) for one in kept}, "the checkpoint is not in the log"
        for at, epoch, version, seen in self.reads:
            if at == history and epoch >= self.forgotten:
                assert seen == identities(log[:version]), f"version {version} that was read is not a version of the log"
        self.final = log


def identities(updates: list[Update]) -> tuple[PushId, ...]:
    return tuple(entry.identity for record in updates for entry in record.entries)
