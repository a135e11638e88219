"""What an elastic run must never do, as seen by somebody who knows everything at every moment.

The weights are 24 cells, each the end of a chain of hashes over (step, samples): a sample that is left out, repeated or in
another step, an update that is applied twice or to older weights, and a mixture of two steps all give another cell than the
undisturbed run has.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.elastic.commit import Holding, Resumption
from shoal.elastic.groupstate import Wanted
from shoal.elastic.groupview import GroupView, copy_holder
from simulation.world import Message, World

if TYPE_CHECKING:
    from simulation.group.hosts import Agent, Coordinator
    from simulation.group.ranks import Rank

NUM_CELLS = 24
"""A number that every count of shards here divides."""
Cells = dict[int, int]


class HostWorld(World):
    """A world whose network is cut between hosts. Inside a host nothing is lost."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.host_of: dict[str, str] = {}
        self.cut_hosts: set[frozenset[str]] = set()

    def _arrive(self, source: str, target: str, message: Message) -> None:
        process = self.by_id.get(target)
        if process is None or frozenset((self.host_of[source], self.host_of[process.name])) in self.cut_hosts:
            return
        super()._arrive(source, target, message)


def advance(cell: int, value: int, step: int, samples: tuple[int, ...]) -> int:
    """One cell after an update."""
    return hash((cell, value, step, samples))


@dataclass
class Run:
    """One run in one world: what was asked for, and what happened."""

    world: HostWorld
    wanted: Wanted
    steps: int
    zero: bool
    copies: bool
    plants: frozenset[str] = frozenset()
    coordinator: "Coordinator" = None  # type: ignore[assignment]
    agents: "dict[str, Agent]" = field(default_factory=dict)
    views: dict[int, GroupView] = field(default_factory=dict)
    truths: list[Cells] = field(default_factory=lambda: [{cell: cell for cell in range(NUM_CELLS)}])
    checkpoints: dict[int, dict[int, Cells]] = field(default_factory=dict)
    """For each step the cells that were written, by epoch."""
    established: GroupView | None = None
    """The last view whose members all had their state, and a copy of it."""
    resumed: dict[int, tuple[float, int]] = field(default_factory=dict)
    """When somebody first took a step under an epoch, and from which step."""
    num_checkpoint_loads: int = 0
    num_live_resumptions: int = 0
    gave_up: str = ""

    @property
    def num_logical(self) -> int:
        return self.wanted.num_logical

    def samples(self, step: int) -> tuple[int, ...]:
        return tuple(range((step - 1) * self.num_logical, step * self.num_logical))

    def truth(self, step: int) -> Cells:
        """The cells of the undisturbed run after this many updates."""
        while len(self.truths) <= step:
            number, last = len(self.truths), self.truths[-1]
            self.truths.append({c: advance(c, v, number, self.samples(number)) for c, v in last.items()})
        return self.truths[step]

    # ---- membership

    def published(self, view: GroupView, cause: str) -> None:
        names = " ".join(one.name for one in view.replicas)
        self.world.tell(f"view {view.epoch}: {names} ({cause})")
        assert view.epoch not in self.views, f"two memberships in epoch {view.epoch}"
        assert view.epoch > max(self.views, default=0), f"epoch {view.epoch} was published after a later one"
        assert len(view.replicas) >= self.wanted.min_dp, (
            f"{len(view.replicas)} replicas, and min_dp {self.wanted.min_dp}"
        )
        self.views[view.epoch] = view

    def entered(self, rank: "Rank", before: int, view: GroupView) -> None:
        """A rank left the view of an epoch and takes part in another."""
        assert self.views.get(view.epoch) == view, f"{rank.id} is in another membership than epoch {view.epoch} has"
        assert view.epoch > before, f"{rank.id} went from epoch {before} to {view.epoch}"

    # ---- where a view goes on from

    def chose(self, rank: "Rank", view: GroupView, reports: list[Holding], found: Resumption | None) -> None:
        """The members of a view go on from a step that they hold, or from the checkpoint."""
        self.num_live_resumptions += found is not None
        self.num_checkpoint_loads += found is None
        live = max((one.step for report in reports for one in report.own), default=0)
        before = self.established
        # One that slept comes to its answer when others are in a later view already: nobody follows it.
        if before is None or before.epoch > view.epoch or live == 0 or self._is_lost(before, reports):
            return
        assert found is not None, f"{rank.id}: nothing whole is left in epoch {view.epoch}, and enough is there"
        is_split = self.zero or self.wanted.replica_size > 1
        allowed = live - 1 if is_split else live
        assert found.step >= allowed, f"{rank.id} goes back from step {live} to {found.step}"

    def _is_lost(self, before: GroupView, reports: list[Holding]) -> bool:
        """Whether more died since the last view that had its state than the promise is for."""
        there = {report.member for report in reports}
        lost = {place for place, one in enumerate(before.replicas) if not there.issuperset(one.members)}
        if not self.zero:
            return len(lost) == len(before.replicas)
        if not self.copies:
            return bool(lost)
        return any(copy_holder(before, place) in (None, *lost) for place in lost)

    def is_ready(self, rank: "Rank", view: GroupView) -> None:
        """Everybody in a view has loaded its part, and a copy of it is at its peer."""
        if self.established is None or view.epoch > self.established.epoch:
            self.established = view
        self.resumed.setdefault(view.epoch, (self.world.now, rank.step))

    # ---- updates

    def applied(self, rank: "Rank", view: GroupView, samples: tuple[int, ...]) -> None:
        """A rank applied an update under a view."""
        wanted = self.samples(rank.step)
        assert samples == wanted, f"{rank.id}: step {rank.step} has the samples {samples}, and {wanted} are its own"
        self.check_cells(rank)
        for epoch, (at, start) in self.resumed.items():
            if epoch > view.epoch and at < self.world.now:
                shares = set(self.views[epoch].members) & set(view.members)
                assert shares, (
                    f"two lineages: {rank.id} took step {rank.step} under {view.epoch}, and {epoch} had begun"
                )
                assert rank.step <= start + 1, (
                    f"{rank.id} took step {rank.step} under {view.epoch}, {epoch} began at {start}"
                )
        cause = self.coordinator.state.departed.get(rank.id, "")
        assert "silent" not in cause, f"{rank.id} took step {rank.step} after its host had lost its lease"

    def check_cells(self, rank: "Rank") -> None:
        truth = self.truth(rank.step)
        wrong = [cell for cell, value in rank.cells.items() if truth[cell] != value]
        assert not wrong, f"{rank.id} after step {rank.step}: cells {wrong} are not those of the undisturbed run"

    def saved(self, step: int, epoch: int, cells: Cells) -> None:
        self.checkpoints.setdefault(step, {}).setdefault(epoch, {}).update(cells)

    def newest_checkpoint(self) -> tuple[int, Cells]:
        """The newest one that is whole."""
        for step in sorted(self.checkpoints, reverse=True):
            for cells in self.checkpoints[step].values():
                if len(cells) == NUM_CELLS:
                    return step, cells
        return 0, self.truth(0)

    # ---- the end

    def members(self) -> "list[Any]":
        view = self.coordinator.state.view
        return [] if view is None else [self.world.by_id.get(member) for member in view.members]

    def check_end(self) -> None:
        ranks = self.members()
        for rank in ranks:
            assert rank.step == self.steps
            self.check_cells(rank)
        held = {cell for rank in ranks for cell in rank.cells}
        assert len(held) == NUM_CELLS, f"{len(held)} of {NUM_CELLS} cells are left at the end"
