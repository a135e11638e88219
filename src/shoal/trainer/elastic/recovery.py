"""How the ranks of a new view come to the state of one step: they tell each other what they hold, choose, and fetch what lacks.

The choice is a pure function (``elastic/commit.py``) of what all of them say, so all choose alike. What a rank holds lies in its
whole tensors as placements say, and what it needs under the new view lies there too: so each takes what it has itself, and asks
those who hold the rest for it (``handover.py``). Where everybody holds all that it needs nothing is moved.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from shoal.checkpoint.boxes import Box
from shoal.checkpoint.holdings import Cut, Listing, decode_listing, encode_listing
from shoal.checkpoint.pieces import dtype_name, list_holdings
from shoal.comm.channel import PeerLost
from shoal.comm.full_tensor import box
from shoal.comm.world import World
from shoal.core.errors import RunError
from shoal.core.placement import Shape
from shoal.elastic.commit import Holding, Resumption, Shard, choose_step
from shoal.engine.state import RankState, load_rank_state
from shoal.trainer.elastic.handover import (
    BoxRequest,
    cut_messages,
    digest_of,
    num_bytes,
    piece_bytes,
    plan_pieces,
    transfer,
    view_of,
    write_piece,
)
from shoal.trainer.progress import Boundary
from shoal.trainer.samedata import gather_texts

_MESSAGES_AT_ONCE = 64
"""Between two meetings of all ranks while state is handed over: a gigabyte."""

Counts = dict[str, float]
"""What a run counts of its disturbances: the largest that anybody knows is right."""


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """Everything that a member has in its hands between two views."""

    member: str
    own: Mapping[Shard, RankState] = field(default_factory=dict)
    """What it trained with; live tensors that nobody changes any more."""
    copies: Mapping[Shard, RankState] = field(default_factory=dict)
    """Snapshots, its own and those of others."""
    boundaries: tuple[Boundary, ...] = ()
    history: int = 0
    counts: Counts = field(default_factory=dict)

    def report(self) -> str:
        """What it tells the others, as JSON."""
        return json.dumps(
            {
                "member": self.member,
                "own": [[one.step, one.index, one.num_shards] for one in self.own],
                "copies": [[one.step, one.index, one.num_shards] for one in self.copies],
                "history": self.history,
                "boundaries": [one.as_values() for one in self.boundaries],
                "counts": self.counts,
            }
        )

    def find(self, shard: Shard) -> RankState | None:
        """A shard that it holds."""
        return self.own.get(shard) or self.copies.get(shard)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all members of a view know after they have told each other what they hold."""

    chosen: Resumption | None
    """None where nothing whole is left in anybody's memory."""
    boundary: Boundary | None
    newest: int
    """Steps that the furthest of them had taken."""
    history: int
    counts: Counts


def agree(world: World, held: MemberState, *, checkpoint: int | None) -> Agreed:
    """Tell each other what is held and choose the step to go on from. All ranks call it together.

    Args:
        world: the ranks of the view.
        held: by this rank.
        checkpoint: the step of the newest checkpoint, the same on every rank.
    """
    told = [json.loads(text) for text in gather_texts(world, held.report())]
    reports = [
        Holding(member=one["member"], own=_shards(one["own"]), copies=_shards(one["copies"]), history=one["history"])
        for one in told
    ]
    chosen = choose_step(reports, checkpoint=checkpoint)
    known = [Boundary.from_values(values, origin=one["member"]) for one in told for values in one["boundaries"]]
    boundary = None
    if chosen is not None:
        fitting = [one for one in known if one.progress.step == chosen.step]
        # One who has done all that comes after the step, if there is one.
        boundary = min(fitting, key=lambda one: one.unsettled is not None, default=None)
        chosen = chosen if boundary is not None else None
    newest = max((one.progress.step for one in known), default=0)
    names = {name for one in told for name in one["counts"]}
    return Agreed(
        chosen=chosen,
        boundary=boundary,
        newest=newest,
        history=max(one["history"] for one in told),
        counts={name: max(one["counts"].get(name, 0) for one in told) for name in names},
    )


def _shards(values: Sequence[Sequence[int]]) -> tuple[Shard, ...]:
    return tuple(Shard(step=step, index=index, num_shards=number) for step, index, number in values)


def fetch_state(held: MemberState, chosen: Resumption, target: RankState, *, world: World, own: Shard) -> str:
    """Bring the state of the chosen step into the live tensors of ``target``. All ranks call it together.

    Who holds all that it needs takes it from its own memory. Others ask, each for what it lacks and one holder for each part.

    Args:
        held: by this rank.
        chosen: what all agreed on.
        target: this rank's state under the new view, to be written to.
        world: the ranks.
        own: the shard that ``target`` is.

    Returns:
        Where it came from, for people: ``own``, ``a peer`` or ``copies``.

    Raises:
        PeerLost: what arrived is not what was sent.
        RunError: nobody holds what this rank needs.
    """
    mine = held.own.get(own)
    is_same_cut = (own.step, own.num_shards) == (chosen.step, chosen.num_shards)
    has_all = mine is not None and is_same_cut
    votes = world.all_gather(torch.tensor([int(has_all)], device=world.device))
    if has_all and mine is not None:
        load_rank_state(target, mine.tensors, origin="this rank's own state")
    if all(int(vote) for vote in votes):
        return "own"
    listings = _gather_listings(held, chosen, world)
    lacking = _Lacking(target, held, chosen, listings, own=own) if not has_all else None
    asked = {
        "member": held.member,
        "pieces": [] if lacking is None else lacking.requests,
        "compared": own.index if lacking is not None and is_same_cut else None,
    }
    told = [json.loads(text) for text in gather_texts(world, json.dumps(asked))]
    _move(told, lacking, held, chosen, listings, world=world)
    _compare(told, target, held, chosen, world=world)
    is_copied = any(held.own.get(shard) is None for shard in _sources(held, chosen))
    copied = world.all_reduce_(torch.tensor([int(is_copied)], device=world.device))
    return "copies" if int(copied) else "a peer"


class _Lacking:
    """What a rank needs: the pieces that it has are put in their places, the others are asked for."""

    def __init__(
        self,
        target: RankState,
        held: MemberState,
        chosen: Resumption,
        listings: Sequence[Listing],
        *,
        own: Shard,
    ) -> None:
        self._views: list[torch.Tensor] = []
        self.requests: list[list[object]] = []
        """Shard, name, start and shape of each piece."""
        here = {index: state for index in range(chosen.num_shards) if (state := held.find(_shard(chosen, index)))}
        # First what is here, then what the shard of the same place has: with whole replicas that is everything, from one peer.
        order = sorted(range(chosen.num_shards), key=lambda index: (index not in here, index != own.index, index))
        for name, tensor in sorted(target.tensors.items()):
            placement = target.placements[name]
            self._check(name, tensor, placement.whole_shape, listings, step=chosen.step)
            if sum(math.prod(patch.shape) for patch in placement.patches) < tensor.numel():
                tensor.zero_()  # what no patch covers
            for patch in placement.patches:
                if not math.prod(patch.shape):
                    continue
                part = tensor[box(patch.local_start, patch.shape)]
                whole = Box(patch.whole_start, patch.shape)
                need = Cut(name=name, shape=placement.whole_shape, box=whole)
                for piece in plan_pieces(need, listings, order):
                    at, extent = piece.cut.box.start, piece.cut.box.shape
                    start = tuple(low - first for low, first in zip(at, patch.whole_start, strict=True))
                    view = part[box(start, extent)]
                    if piece.shard in here:
                        view.copy_(view_of(here[piece.shard], piece.cut))
                    else:
                        self._views.append(view)
                        self.requests.append([piece.shard, name, list(at), list(extent)])

    @staticmethod
    def _check(name: str, tensor: torch.Tensor, shape: Shape, listings: Sequence[Listing], *, step: int) -> None:
        found = next((listing[name] for listing in listings if name in listing), None)
        if found is None:
            raise RunError(f"nobody holds {name!r} of step {step}")
        if (found.dtype, found.shape) != (dtype_name(tensor.dtype), shape):
            raise RunError(
                f"the state of step {step} does not fit: {name!r} is {found.dtype} {list(found.shape)} at its holders, and this "
                f"rank needs {dtype_name(tensor.dtype)} {list(shape)}"
            )

    def write(self, piece: int, data: torch.Tensor) -> None:
        """Put what was asked for into its place."""
        write_piece(self._views[piece], data)


def _gather_listings(held: MemberState, chosen: Resumption, world: World) -> list[Listing]:
    """What every shard has, told by the first of its holders."""
    own = {str(shard.index): _listing(held.find(shard)) for shard in _sources(held, chosen)}
    told = [json.loads(text) for text in gather_texts(world, json.dumps(own))]
    found = {int(index): listing for one in told for index, listing in one.items()}
    return [decode_listing(found[index].encode()) for index in range(chosen.num_shards)]


def _move(
    told: Sequence[Mapping[str, Any]],
    lacking: _Lacking | None,
    held: MemberState,
    chosen: Resumption,
    listings: Sequence[Listing],
    *,
    world: World,
) -> None:
    """Send and receive what all have asked for."""
    ranks = {one["member"]: rank for rank, one in enumerate(told)}
    pieces = {
        (reader, number): BoxRequest(
            shard=shard, cut=Cut(name=name, shape=listings[shard][name].shape, box=Box(tuple(start), tuple(shape)))
        )
        for reader, one in enumerate(told)
        for number, (shard, name, start, shape) in enumerate(one["pieces"])
    }
    sizes: dict[tuple[int, int], dict[int, int]] = {}
    for (reader, number), piece in pieces.items():
        source = ranks[chosen.source(piece.shard, reader)]
        sizes.setdefault((source, reader), {})[number] = num_bytes(piece.cut, listings, piece.shard)
    # In turn, so that nobody waits for what another one is sent.
    lists = [list(cut_messages(source, reader, some)) for (source, reader), some in sizes.items()]
    messages = [one for turn in zip_longest(*lists) for one in turn if one is not None]

    def read(reader: int, number: int) -> torch.Tensor:
        piece = pieces[reader, number]
        state = held.find(_shard(chosen, piece.shard))
        assert state is not None, "it said that it holds it"
        return piece_bytes(state, piece.cut)

    def write(number: int, data: torch.Tensor) -> None:
        assert lacking is not None, "only who asks is sent something"
        lacking.write(number, data)

    with torch.no_grad():
        for begin in range(0, len(messages), _MESSAGES_AT_ONCE):
            if begin:
                world.barrier()  # Who is sent nothing waits here for a part, and not in the next sum for all of it.
            transfer(messages[begin : begin + _MESSAGES_AT_ONCE], world=world, read=read, write=write)


def _compare(
    told: Sequence[Mapping[str, Any]], target: RankState, held: MemberState, chosen: Resumption, *, world: World
) -> None:
    """See that who has taken a whole shard from others has what its holder has, before the first sum that it takes part in.

    Raises:
        PeerLost: somebody has got another state.
    """
    pairs = [
        (reader, chosen.source(one["compared"], reader), one["compared"])
        for reader, one in enumerate(told)
        if one["compared"] is not None
    ]
    given = {index for _, member, index in pairs if member == held.member}
    states = {index: held.find(_shard(chosen, index)) for index in given}
    own = {
        "got": digest_of(target) if any(reader == world.rank for reader, _, _ in pairs) else "",
        "gave": {str(index): digest_of(state) for index, state in states.items() if state is not None},
    }
    digests = [json.loads(text) for text in gather_texts(world, json.dumps(own))]
    ranks = {one["member"]: rank for rank, one in enumerate(told)}
    wrong = [told[reader]["member"] for reader, member, index in pairs
             if digests[reader]["got"] != digests[ranks[member]]["gave"][str(index)]]  # fmt: skip
    if wrong:
        raise PeerLost(f"{' and '.join(wrong)} got another state of step {chosen.step} than its holders have", ranks=[])


def _sources(held: MemberState, chosen: Resumption) -> list[Shard]:
    """The shards that this member gives to the others."""
    mine = [index for index in range(chosen.num_shards) if chosen.source(index) == held.member]
    return [_shard(chosen, index) for index in mine]


def _shard(chosen: Resumption, index: int) -> Shard:
    return Shard(step=chosen.step, index=index, num_shards=chosen.num_shards)


def _listing(state: RankState | None) -> str:
    assert state is not None, "it said that it holds it"
    return encode_listing(list_holdings(state.tensors, state.placements)).decode()


def counted(counts: Counts, **more: float) -> Counts:
    """The counts with some added."""
    return {**counts, **{name: counts.get(name, 0) + value for name, value in more.items()}}
