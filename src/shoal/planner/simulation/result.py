"""A simulated step: its length, who was busy, what it waited for. Times of single cells are worked out when they are asked for.

Kept are the factors of every kind of replica and when each rank ends; a cell's start and end take another run through the
schedule, which is cheaper than to keep the cells of ten thousand ranks.

Before and after its pipeline a step has gathers of sharded weights, sums of gradients and the update. A collective ends when
the last of its ranks has come and its bytes have moved, less what went on while the last of them still computed. All ranks wait
for each other before the update: its norm, and whether it is finite, are of the whole gradient.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shoal.core.plan import Plan
from shoal.planner.pricing.cost import StepParts
from shoal.planner.simulation.cells import (
    CODEC,
    COMPUTE,
    FIXED,
    GATHER,
    REDUCE,
    TRANSFER,
    UPDATE,
    CellTimes,
    StepBytes,
    peak_bytes,
    play_columns,
)
from shoal.planner.simulation.conditions import Array, Folded, ranks_of
from shoal.schedules.player import Order, critical_path
from shoal.schedules.schedule import Schedule

Span = tuple[float, float]
Piece = tuple[str, str, float, float]
"""What, name, start, end."""


@dataclass(frozen=True, kw_only=True)
class StepEnds:
    """Times from the step's begin."""

    begin: float
    """When the first cells start."""
    end: float
    decides: tuple[int, int]
    """Pipeline place and group of replicas that everybody else waits for."""
    pieces: tuple[Piece, ...]
    """What the step waits for after the last cell of those, in order."""
    reduces: tuple[Span, ...]
    """The sum of gradients, by place; empty spans where there is none."""
    updated_from: float
    """When all have their sums."""
    updates: tuple[tuple[float, ...], ...]
    """When the update ends, by place and group."""
    gathers: tuple[Span, ...]
    """What is left of the gather after the update, by place."""


def play_step_ends(
    parts: StepParts, plan: Plan, schedule: Schedule, last: Array, compute: Array, links: Array
) -> StepEnds:
    """The collectives and the update around a pipeline.

    Args:
        parts: what they take.
        plan: which of them come before the first cell.
        schedule: an asynchronous one has them inside its cells.
        last: when the last cell ends, by (place, group), counted from the first start.
        compute: how many times as long a rank takes, by (place, group).
        links: the same of its links.
    """
    if schedule.updates.are_asynchronous:
        return _nothing(last)
    slowest = links.max(axis=1)
    gathers = _left_over(parts.gather * slowest, parts.gather_hidden, compute)
    comes_first = plan.zero == 3
    begin = float(gathers.max()) if comes_first else 0.0
    ready = begin + last.max(axis=1)
    sums = parts.reduce * slowest
    exposed = _left_over(sums, parts.reduce_hidden, compute)
    # Encoding comes before a compressed sum and decoding after it; both are the device's work, and told as one.
    coded = ready + parts.codec * compute.max(axis=1)
    summed = coded + exposed
    place = int(summed.argmax())
    group = int(last[place].argmax())
    all_summed = float(summed[place])
    updated = all_summed + parts.update * compute
    after = np.zeros_like(gathers) if comes_first else gathers
    gathered = updated.max(axis=1) + after
    slow = int(gathered.argmax())
    done, until = float(updated[slow].max()), float(gathered[slow])
    end = until + parts.fixed
    return StepEnds(
        begin=begin,
        end=end,
        decides=(place, group),
        pieces=(
            (CODEC, "codec", float(ready[place]), float(coded[place])),
            (REDUCE, "reduce", float(coded[place]), all_summed),
            (UPDATE, "update", all_summed, done),
            (GATHER, "gather", done, until),
            (FIXED, "fixed", until, end),
        ),
        reduces=tuple((float(at - whole), float(at)) for at, whole in zip(summed, sums, strict=True)),
        updated_from=all_summed,
        updates=tuple(tuple(map(float, row)) for row in updated),
        gathers=tuple((float(row.max()), float(at)) for row, at in zip(updated, gathered, strict=True)),
    )


def _left_over(whole: Array, hidden: float, compute: Array) -> Array:
    """What nothing hides, by place: where devices are faster than the data sheet's, less goes on under their passes."""
    found: Array = np.maximum(0.0, whole - hidden * np.minimum(1.0, compute.min(axis=1)))
    return found


def _nothing(last: Array) -> StepEnds:
    place, group = np.unravel_index(int(last.argmax()), last.shape)
    end = float(last.max())
    return StepEnds(
        begin=0.0,
        end=end,
        decides=(int(place), int(group)),
        pieces=(),
        reduces=((end, end),) * len(last),
        updated_from=end,
        updates=tuple((end,) * last.shape[1] for _ in last),
        gathers=((end, end),) * len(last),
    )


@dataclass(frozen=True)
class Segment:
    """A piece of the critical path: what the step waited for, and where."""

    what: str
    """compute, update, fixed, zero, or the axis of a communication."""
    name: str
    start: float
    end: float
    place: int
    group: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStep:
    """One step of a whole cluster."""

    plan: Plan
    parts: StepParts
    order: Order
    prices: CellTimes
    folded: Folded
    last: Array
    """When the last cell ends, by (place, group of replicas), counted from the first start."""
    ends: StepEnds
    needed: StepBytes | None
    window: tuple[float, float]
    """The part of the pipeline's time that is one step: all of it, or where schedules flow, what the third step adds."""

    @property
    def step_seconds(self) -> float:
        """From one step to the next."""
        return self.window[1] - self.window[0] + self.parts.fixed if self.is_asynchronous else self.ends.end

    @property
    def is_asynchronous(self) -> bool:
        """True when steps follow each other without a flush."""
        return self.order.schedule.updates.are_asynchronous

    @property
    def num_places(self) -> int:
        """Ranks of a pipeline."""
        return len(self.order.rows)

    @property
    def num_groups(self) -> int:
        """Kinds of replicas."""
        return len(self.folded.groups)

    @property
    def makespan(self) -> float:
        """From the first start of a cell to the last end."""
        return float(self.last.max())

    def ranks(self, place: int, group: int) -> list[int]:
        """The ranks that do the same as each other."""
        return ranks_of(self.plan, place=place, replicas=self.folded.groups[group])

    def durations(self, group: int) -> Array:
        """Of every cell in the order of work, for the replicas of a group."""
        columns = slice(group, group + 1)
        found: Array = self.prices.durations(self.folded.compute[:, columns], self.folded.links[:, columns])[:, 0]
        return found

    def times(self, group: int) -> tuple[Array, Array]:
        """Starts and ends of every cell, for the replicas of a group, counted from the step's begin."""
        starts, ends = self._played(group)
        return starts + self.ends.begin, ends + self.ends.begin

    @cached_property
    def bubble(self) -> float:
        """Share of all ranks' time in the pipeline in which they have nothing to do."""
        if self.is_asynchronous:
            first, last = self.window
            starts, ends = self.times(0)
            inside = np.clip(ends, first, last) - np.clip(starts, first, last)
            return float(1.0 - inside.sum() / ((last - first) * self.num_places)) if last > first else 0.0
        sizes = [len(group) for group in self.folded.groups]
        busy = float(self._busy.sum(axis=0) @ np.array(sizes, dtype=np.float64))
        total = self.makespan * self.num_places * sum(sizes)
        return 1.0 - busy / total if total else 0.0

    def busy(self, place: int, group: int) -> float:
        """Time in the pipeline's cells, of all that is played."""
        return float(self._busy[place, group])

    @cached_property
    def _busy(self) -> Array:
        return self.prices.busy(self.folded.compute, self.folded.links)

    @cached_property
    def critical_path(self) -> tuple[Segment, ...]:
        """What the step waited for, from its begin to its end, without gaps."""
        place, group = self.ends.decides
        if self.is_asynchronous:
            _, ends = self._played(group)
            first, last = self.window
            whole = self._chain(int(np.flatnonzero(ends == last)[0]), group)
            inside = [replace(piece, start=max(piece.start, first)) for piece in whole if piece.end > first]
            fixed = self.parts.fixed
            return (*inside, *([Segment(FIXED, "fixed", last, last + fixed, place, group)] if fixed else []))
        begin = self.ends.begin
        head = [Segment(GATHER, "gather", 0.0, begin, place, group)] if begin else []
        cells = [
            replace(piece, start=piece.start + begin, end=piece.end + begin)
            for piece in self._chain(self.order.rows[place][-1], group)
        ]
        # A piece that takes no time is no piece of a path.
        after = [Segment(*piece, place, group) for piece in self.ends.pieces if piece[3] > piece[2]]
        return (*head, *cells, *after)

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the critical path by what they go to; they add up to the step."""
        found: dict[str, float] = {}
        for piece in self.critical_path:
            found[piece.what] = found.get(piece.what, 0.0) + piece.seconds
        return found

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of communication on the critical path, by axis; ``zero`` are the gathers of sharded weights."""
        return {
            what: seconds for what, seconds in self.breakdown.items() if what not in (COMPUTE, UPDATE, FIXED, CODEC)
        }

    def pieces(self, number: int, group: int, start: float, end: float) -> list[Segment]:
        """A cell's time by what it goes to, one after another: what nothing hides of its communication comes last."""
        step = self.order.cells[number]
        name = "&".join(map(str, step.cell))
        compute, links = self.folded.compute[step.rank, group], self.folded.links[step.rank, group]
        shares = self.prices.split(number, float(compute), float(links))
        found, at = [], start
        for index, (what, seconds) in enumerate(shares.items()):
            until = end if index == len(shares) - 1 else min(end, at + seconds)
            found.append(Segment(what, name, at, until, step.rank, group))
            at = until
        return found

    def peak_bytes(self, place: int) -> float | None:
        """The most that a rank of a place holds; None where no bytes were given."""
        return None if self.needed is None else peak_bytes(self.order.schedule, place, self.needed)

    def _played(self, group: int) -> tuple[Array, Array]:
        """The same, counted from the first start."""
        transfers = self.parts.delay * self.folded.links[:, group : group + 1]
        starts, ends = play_columns(self.order, self.durations(group)[:, None], transfers)
        return starts[:, 0], ends[:, 0]

    def _chain(self, number: int, group: int) -> list[Segment]:
        """The cells and transfers that a cell's end goes back to, from the first start on."""
        starts, ends = self._played(group)
        transfers = self.parts.delay * self.folded.links[:, group]
        found: list[Segment] = []
        ended: int | None = None
        for cell in critical_path(self.order, starts.tolist(), ends.tolist(), transfers.tolist(), last=number):
            if ended is not None and ends[ended] < starts[cell]:
                place = self.order.cells[ended].rank
                found.append(Segment(TRANSFER, "transfer", float(ends[ended]), float(starts[cell]), place, group))
            found += self.pieces(cell, group, float(starts[cell]), float(ends[cell]))
            ended = cell
        return found
