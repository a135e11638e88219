"""How the ranks of a new view come to the state of one step: they tell each other what they hold, choose, and hand it round.

The choice is a pure function (``elastic/commit.py``) of what all of them say, so all choose alike. What a rank holds lies in its
whole tensors as placements say, and what it needs under the new view lies there too: so every tensor is put together from those
who hold its parts, one after the other, and each takes its own. Where everybody holds all that it needs nothing is moved.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shoal.checkpoint.holdings import Cut, decode_listing, divide, encode_listing
from shoal.checkpoint.pieces import list_holdings, view_cuts, zeros
from shoal.comm.channel import PeerLost
from shoal.comm.full_tensor import box, take_local
from shoal.comm.mesh import Mesh
from shoal.comm.world import World
from shoal.core.errors import RunError
from shoal.elastic.commit import Holding, Resumption, Shard, choose_step
from shoal.engine.state import RankState, load_rank_state
from shoal.trainer.progress import Boundary
from shoal.trainer.samedata import gather_texts

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


def hand_round(
    held: MemberState, chosen: Resumption, target: RankState, *, world: World, mesh: Mesh, own: Shard
) -> str:
    """Bring the state of the chosen step into the live tensors of ``target``. All ranks call it together.

    Args:
        held: by this rank.
        chosen: what all agreed on.
        target: this rank's state under the new view, to be written to.
        world: the ranks.
        mesh: the same ranks, by which tensors travel.
        own: the shard that ``target`` is.

    Returns:
        Where it came from, for people: ``own``, ``a peer`` or ``copies``.
    """
    mine = held.own.get(own)
    has_all = mine is not None and (own.step, own.num_shards) == (chosen.step, chosen.num_shards)
    votes = world.all_gather(torch.tensor([int(has_all)], device=world.device))
    if mine is not None and all(int(vote) for vote in votes):
        load_rank_state(target, mine.tensors, origin="this rank's own state")
        return "own"
    offered = _offered(held, chosen)
    texts = gather_texts(world, json.dumps({str(index): _listing(state) for index, state in offered.items()}))
    listings = {int(index): listing.encode() for text in texts for index, listing in json.loads(text).items()}
    decoded = [decode_listing(listings[index]) for index in range(chosen.num_shards)]
    cuts = divide(decoded)
    pieces: dict[str, list[tuple[Cut, torch.Tensor]]] = {}
    for index, state in offered.items():
        for cut, view in view_cuts(state.tensors, state.placements, cuts[index]).items():
            pieces.setdefault(cut.name, []).append((cut, view))
    forms = {name: (one.dtype, one.shape) for listing in decoded for name, one in listing.items()}
    if missing := sorted(target.tensors.keys() - forms.keys()):
        raise RunError(f"nobody holds {missing[0]!r} of step {chosen.step}")
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, (dtype, shape) in sorted(forms.items()):
            whole = zeros(dtype, shape)
            for cut, view in pieces.get(name, ()):
                whole[box(cut.box.start, cut.box.shape)] = view.to("cpu")
            flat = whole.reshape(-1).view(torch.uint8).to(world.device)
            # Bytes: zeros of those who do not speak change none, whereas -0.0 + 0.0 would be 0.0.
            if flat.numel():
                mesh.everyone.all_reduce_(flat)
                digest.update(flat.cpu().numpy().data)
            whole = flat.view(whole.dtype).reshape(whole.shape)
            if name in target.tensors:
                target.tensors[name].copy_(take_local(whole, target.placements[name]))
    _compare(world, digest.hexdigest(), held.member, chosen.step)
    is_copied = any(held.own.get(shard) is None for shard in _sources(held, chosen))
    copied = world.all_reduce_(torch.tensor([int(is_copied)], device=world.device))
    return "copies" if int(copied) else "a peer"


def _compare(world: World, digest: str, member: str, step: int) -> None:
    """See that all have got the same state, before the first sum that a newcomer takes part in.

    Raises:
        PeerLost: somebody has got another one than most.
    """
    told = [json.loads(text) for text in gather_texts(world, json.dumps([member, digest]))]
    most, _ = Counter(found for _, found in told).most_common(1)[0]
    others = [name for name, found in told if found != most]
    if others:
        raise PeerLost(f"{' and '.join(others)} got another state of step {step} than the others", ranks=[])


def _sources(held: MemberState, chosen: Resumption) -> list[Shard]:
    """The shards that this member gives to the others."""
    mine = [index for index in range(chosen.num_shards) if chosen.source(index) == held.member]
    return [Shard(step=chosen.step, index=index, num_shards=chosen.num_shards) for index in mine]


def _offered(held: MemberState, chosen: Resumption) -> dict[int, RankState]:
    found = {shard.index: held.find(shard) for shard in _sources(held, chosen)}
    assert all(state is not None for state in found.values()), "it said that it holds them"
    return {index: state for index, state in found.items() if state is not None}


def _listing(state: RankState) -> str:
    return encode_listing(list_holdings(state.tensors, state.placements)).decode()


def counted(counts: Counts, **more: float) -> Counts:
    """The counts with some added."""
    return {**counts, **{name: counts.get(name, 0) + value for name, value in more.items()}}
