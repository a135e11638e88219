"""Schedules whose backward is cut in two: ZB-H1 and ZB-H2 on one stage per rank; ZBV, V-Half and V-Min on two.

ZB-H1 and ZB-H2: 1F1B with the backward cut in two, so that weights' gradients fill the time in which ranks would wait.

The stage before waits only for the gradient of the input (I); that of the weights (W) can be put off. A rank that runs
``lead`` microbatches ahead does so with forwards before its first I, with W's that it puts off, or with both: the first rank
with forwards, the last with W's. Each rank then holds lead+1 microbatches, and the more it may hold the less it waits:

    ZB-H1   lead P-1    each rank holds what 1F1B's first does     the first rank waits (P-1)(F+I-W), from M=P on
    ZB-H2   lead 2P-2   about twice that                           the first rank waits (P-1)(F+I-2W), from M=2P-1 on

These are the waits between a rank's first cell and its last while W is no longer than F and than I; rank i has P-1-i in the
place of P-1, and 1F1B waits (P-1)(F+I+W). At F=I=W=1 no rank of H2 waits, yet both take 3M+P-1 from M=P on (2M+2P-1 for
fewer), the least that any order takes: H2 gains only where a rank may begin the next step while others are still in this one.

Two stages per rank, down the ranks and back up: ZBV, V-Half and V-Min (Qi et al., arXiv 2401.10241, 2405.15362).

A microbatch walks four legs over the ranks: forwards down and up, then input gradients down and up. The first rank holds the
first stage for long and the last for a moment, the last rank holds both for the same time, so all ranks hold about as much. A
family is an order of these cells on every rank. ``squeeze`` runs it at a unit of time per cell and lets the weights' gradients,
which nobody waits for, fill the holes. With P ranks, M microbatches and F = I = W = 1, and counted in stages of which a rank
has two (1F1B so counted: 2P and 6P-6):

              activations held    makespan beyond a rank's work
    zbv       2P                  P-1 from M = P on; from M = 2P-1 on no rank waits within its own span
    v-half    2 floor(P/2) + 2    3P-4, 3P-5 for even P > 2; with few microbatches 4P-3-2M, where that is more
    v-min     2 floor((P+4)/3)    4P-5

One rank alone never waits. The activations are those that the authors give for their schedules.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from shoal.schedules.families.family import Family, Size
from shoal.schedules.families.one_f_one_b import one_by_one
from shoal.schedules.schedule import Action, Cell, Fold, Kind, Result, Row, made_by, needs_of


def _lead(size: Size, per_rank: int) -> int:
    """Microbatches that a rank runs ahead; all but one where there are few, or the W's would all be left to the end."""
    return min(per_rank * (size.ranks - 1), size.microbatches - 1)


def _row(size: Size, rank: int, per_rank: int) -> Row:
    lead = _lead(size, per_rank)
    warm_up = min(lead, per_rank * (size.ranks - 1 - rank))
    put_off = lead - warm_up
    forwards, inputs, weights = (
        [Action(rank, kind, microbatch) for microbatch in range(size.microbatches)]
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    )
    cells: list[Cell] = []
    for (action,) in one_by_one(forwards, inputs, warm_up):
        cells.append((action,))
        if action.kind is Kind.INPUT and action.microbatch >= put_off:
            cells.append((weights[action.microbatch - put_off],))
    return (*cells, *((action,) for action in weights[size.microbatches - put_off :]))


def _rows(size: Size, per_rank: int) -> tuple[Row, ...]:
    return tuple(_row(size, rank, per_rank) for rank in range(size.ranks))


ZB_H1 = Family(
    name="zb-h1",
    summary="1F1B with weights' gradients put off: a third of the bubble for the same memory",
    source="Qi et al., 2023, arXiv 2401.10241, section 2.1",
    fold=Fold.LINE,
    rows=lambda size: _rows(size, 1),
    activations=lambda size, rank: _lead(size, 1) + 1,
)

ZB_H2 = Family(
    name="zb-h2",
    summary="weights' gradients put off further: no rank waits between its first cell and its last, for twice the memory",
    source="Qi et al., 2023, arXiv 2401.10241, section 2.2",
    fold=Fold.LINE,
    rows=lambda size: _rows(size, 2),
    activations=lambda size, rank: _lead(size, 2) + 1,
)


_CONTROLLABLE = "Qi et al., 2024, arXiv 2405.15362"
_PERIOD = 6
"""Cells of one microbatch on one rank: F, I and W of two stages. A block starts every so many units."""

Order = Sequence[Action]
"""A rank's forwards and input gradients, one after the other."""


@dataclass(frozen=True, slots=True)
class Block:
    """When one microbatch is where, in units of time: the paper's building block.

    Blocks that start ``_PERIOD`` apart never meet on a rank if its four cells differ modulo ``_PERIOD``; the two units
    that are left are for W. The longer a block takes, the more of them are under way, and the more is held.
    """

    steps: tuple[int, int, int, int]
    """From one rank to the next, on each leg: F down, F up, I down, I up."""
    turns: tuple[int, int, int]
    """From the last cell of a leg to the first of the next, which is on the same rank."""

    def starts(self, ranks: int) -> list[tuple[int, Kind, int]]:
        """Start, kind and stage of the cells, along the walk."""
        stages = range(2 * ranks)
        walk = [*((Kind.FORWARD, stage) for stage in stages), *((Kind.INPUT, stage) for stage in reversed(stages))]
        cells, now = [], 0
        for place, (kind, stage) in enumerate(walk):
            leg, step = divmod(place, ranks)
            now += self.steps[leg] if step else (0, *self.turns)[leg]
            cells.append((now, kind, stage))
        return cells


# The turns were found by a search over 1 to 5 for one rule that keeps the figures above for every P up to 16.


def half_block(ranks: int) -> Block:
    """Six units per rank, there and back twice. With an even P the turns are longer, or two cells would meet."""
    return Block((1, 2, 1, 2), (1, 1, 2) if ranks % 2 else (4, 1, 5))


def min_block(ranks: int) -> Block:
    """Four units per rank, the fewest that there can be. With P a multiple of 3 the turns are longer, as above."""
    return Block((1, 1, 1, 1), (1, 1, 1) if ranks % 3 else (3, 1, 3))


def repeat(block: Block, size: Size) -> tuple[Order, ...]:
    """Each rank's cells of one block per microbatch, by time."""
    cells = [
        (start + _PERIOD * microbatch, Action(stage, kind, microbatch))
        for start, kind, stage in block.starts(size.ranks)
        for microbatch in range(size.microbatches)
    ]
    orders: list[list[Action]] = [[] for _ in range(size.ranks)]
    for _, action in sorted(cells, key=itemgetter(0)):
        orders[min(action.stage, size.stages - 1 - action.stage)].append(action)
    return tuple(orders)


def zbv_order(size: Size, rank: int) -> Order:
    """Forwards until the first gradient is back, one cell of each kind in turn, then the gradients that are left.

    The counts are for 2P-1 microbatches or more. With fewer, the cells of those that are not there are left out, which
    takes nothing from the others that they need.
    """
    ranks, microbatches = size.ranks, max(size.microbatches, 2 * size.ranks - 1)
    below = ranks - rank
    down, up = (Kind.FORWARD, rank), (Kind.FORWARD, size.stages - 1 - rank)
    back_down, back_up = (Kind.INPUT, size.stages - 1 - rank), (Kind.INPUT, rank)
    phases = (
        (2 * below - 1, (down,)),
        (rank, (up, down)),
        (below, (up, back_down)),
        (microbatches - (2 * ranks - 1 - rank), (down, back_up, up, back_down)),
        (below - 1, (back_up, up, back_down)),
        (rank, (back_up, back_down)),
        (below, (back_up,)),
    )
    actions: list[Action] = []
    done: Counter[tuple[Kind, int]] = Counter()
    for times, turn in phases:
        for kind, stage in turn * times:
            actions.append(Action(stage, kind, done[kind, stage]))
            done[kind, stage] += 1
    return [action for action in actions if action.microbatch < size.microbatches]


def squeeze(orders: Sequence[Order], size: Size, limit: int) -> tuple[Row, ...]:
    """Run the orders, a unit of time per cell: a rank that must wait, or holds ``limit``, does its oldest W instead.

    An order must hold no more than ``limit`` between F and I. What it leaves free is for activations that wait for
    their W, so that there are some when there is a hole to fill.
    """
    ranks = [_Rank(deque(order), deque(), []) for order in orders]
    done: set[Result] = set()
    while any(rank.left for rank in ranks):
        # All choose before any result shows: what is made in this unit is there in the next.
        chosen = [rank.choose(done, size.stages, limit) for rank in ranks]
        assert any(chosen), f"no rank can go on with {limit} activations"
        for rank, action in zip(ranks, chosen, strict=True):
            if action is not None:
                rank.take(action)
                done.update(made_by(action))
    return tuple(tuple(rank.row) for rank in ranks)


@dataclass(slots=True)
class _Rank:
    """A rank while its order is squeezed."""

    order: deque[Action]
    weights: deque[Action]
    """W whose I is done."""
    row: list[Cell]
    held: int = 0

    @property
    def left(self) -> int:
        return len(self.order) + len(self.weights)

    def choose(self, done: set[Result], num_stages: int, limit: int) -> Action | None:
        if self.order:
            action = self.order[0]
            fits = action.kind is not Kind.FORWARD or self.held < limit
            if fits and done.issuperset(needs_of(action, num_stages)):
                return action
        return self.weights[0] if self.weights else None

    def take(self, action: Action) -> None:
        self.row.append((action,))
        if action.kind is Kind.WEIGHT:
            self.weights.popleft()
            self.held -= 1
            return
        self.order.popleft()
        if action.kind is Kind.FORWARD:
            self.held += 1
        else:
            self.weights.append(Action(action.stage, Kind.WEIGHT, action.microbatch))


def _vee(
    name: str, summary: str, source: str, orders: Callable[[Size], Sequence[Order]], limit: Callable[[int], int]
) -> Family:
    return Family(
        name=name,
        summary=summary,
        source=source,
        fold=Fold.VEE,
        rows=lambda size: squeeze(orders(size), size, limit(size.ranks)),
        activations=lambda size, rank: min(2 * size.microbatches, limit(size.ranks)),
        chunks=2,
    )


ZBV = _vee(
    "zbv",
    "no bubble within a rank's span, with the activations of 1F1B's first rank on every rank",
    "Qi et al., 2023, arXiv 2401.10241",
    lambda size: [zbv_order(size, rank) for rank in range(size.ranks)],
    lambda ranks: 2 * ranks,
)

V_HALF = _vee(
    "v-half",
    "half of 1F1B's activations and half of its bubble",
    _CONTROLLABLE,
    lambda size: repeat(half_block(size.ranks), size),
    lambda ranks: 2 * (ranks // 2 + 1),
)

V_MIN = _vee(
    "v-min",
    "a third of 1F1B's activations and two thirds of its bubble",
    _CONTROLLABLE,
    lambda size: repeat(min_block(size.ranks), size),
    lambda ranks: 2 * ((ranks + 4) // 3),
)
