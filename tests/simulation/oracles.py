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
    accepted_views: dict[int, View] = field(default_factory=dict)
    acknowledged: dict[int, set[PushId]] = field(default_factory=dict)
    reads: list[tuple[int, int, tuple[PushId, ...]]] = field(default_factory=list)
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
        self.world.tell(
            f"view {view.epoch}: {' '.join(one.id for one in view)} | "
            + " ".join(
                "+".join(chain.synced) + "".join(f"~{one.server}" for one in chain.joining) for chain in view.chains
            )
        )

    def accepted(self, view: View) -> None:
        """A member took a view from a center, or from the next one, which tells the last view of the one before as it was."""
        known = self.accepted_views.setdefault(view.epoch, view)
        assert known == view, f"two centers were accepted in epoch {view.epoch}"

    def committed(self, history: int, push: PushRecord, read: int) -> None:
        """A worker was told that its push is kept."""
        self.acknowledged.setdefault(history, set()).add(push.identity)
        step = push.units[0] // self.workers
        if self.rule.staleness is not None:
            assert step - read <= self.rule.staleness, f"step {step} was computed with version {read} under {self.rule}"
            assert read >= needs(self.rule, step)

    def read(self, history: int, applied: list[Update]) -> None:
        """Weights were given to a worker: with these updates in them."""
        self.reads.append((history, len(applied), identities(applied)))

    # ---- at the end

    def check(self, history: int, log: list[Update], replicas: dict[str, list[Update]]) -> None:
        """The run is finished."""
        entries = identities(log)
        assert len(set(entries)) == len(entries), "a push is in two updates"
        for name, applied in replicas.items():
            assert identities(applied) == entries, f"{name} did not apply what the log says, each once and in order"
        base = self.bases.get(history)
        kept = set(entries)
        lost = self.acknowledged.get(history, set()) - kept
        assert not lost, f"acknowledged and not in the log: {sorted(lost)}"
        if base is not None and history:
            before = {(entry[0], entry[1]) for record in base.update_log["log"] for entry in record["entries"]}
            assert before <= {tuple(one) for one in kept}, "the checkpoint is not in the log"
        for at, version, seen in self.reads:
            if at == history:
                assert seen == identities(log[:version]), f"version {version} that was read is not a version of the log"
        self.final = log


def identities(updates: list[Update]) -> tuple[PushId, ...]:
    return tuple(entry.identity for record in updates for entry in record.entries)
