"""The step that survivors go on from, and who gives which part of the state: the rule, as a pure function.

The state after a step is cut into *shards*: one for each process of a replica where every replica holds all of it
(``zero=0``), and that times the present replicas where ZeRO shards it. Every member of a new view tells all others what it
holds, and all of them compute the same answer from the same reports.

A step is committed when its update was applied wherever somebody survives, and the data position belongs to the step. Some may
have applied step s when others have not: then s is whole if every shard of it is held by somebody, as its owner or as a copy,
and those behind take it from them; otherwise s - 1 is, and step s is done again. So no update is applied twice, and none is
left out.

Without ZeRO and with one process to a replica everybody holds everything, and nothing else is needed. Where the processes of a
replica hold different parts, all of one place could have applied s and none of another: so no rank applies an update before
all members are known to have its sum (the exchange of the gradient's norm tells), and one that has the sum counts the step
after as its own.

With ``elastic.copies`` each rank writes what only it holds into two buffers in turn, one pair in its own and one in a peer's
memory (``groupview.copy_holder``). Four rules make one of s and s - 1 whole whichever one replica, or host, dies and whenever:

- ``may_write``: a rank joins the sum of step s + 1 when its snapshot of s is written, at home and at its peer. So the end of that
  sum tells everybody that version s is whole, and s + 1 may be written over s - 1.
- That sum is one over the members of all replicas together, and not one for each tp, pp or cp place.
- Under a new view a rank keeps all that it held until every member has loaded its part *and* has it copied at its new peer.
- What was held before everything went back to a checkpoint is forgotten (``Holding.history``).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, order=True)
class Shard:
    """One shard of the state after a step. Two with equal fields hold the same bits."""

    step: int
    """Updates that were applied."""
    index: int
    num_shards: int
    """How many shards the state was cut into where this one was made: the cut depends on this number alone."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What a member of a new view has in its hands. A newcomer has nothing."""

    member: str
    own: tuple[Shard, ...] = ()
    """What it trains with. A shard whose update was under way is not among it; the next step's is, where it has the whole sum and
    can still apply it."""
    copies: tuple[Shard, ...] = ()
    """Snapshots, its own and those of others."""
    history: int = 0
    """How often everything went back to a checkpoint. What an earlier history holds does not count."""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """The step to go on from, and where its shards are."""

    step: int
    num_shards: int
    holders: tuple[tuple[str, ...], ...]
    """For each shard the members that give it: its owners, or where none is left those that have a copy."""
    history: int = 0

    def source(self, shard: int, reader: int = 0) -> str:
        """Who gives a shard to the member in this place of the view: different ones for different readers, where there are
        several."""
        holders = self.holders[shard]
        return holders[(shard + reader) % len(holders)]


def choose_step(reports: Sequence[Holding], *, checkpoint: int | None = None) -> Resumption | None:
    """The largest step of which every shard is held by somebody.

    Args:
        reports: of every member of the view. Their order does not matter.
        checkpoint: the step of the newest checkpoint, if there is one. Memory that is older than that is not used.

    Returns:
        The step and its holders; None where nothing whole is left: then everybody loads the newest checkpoint, or begins at
        step 0, and counts one more ``history``.
    """
    history = max((report.history for report in reports), default=0)
    counted = sorted((one for one in reports if one.history == history), key=lambda one: one.member)
    owners = _holders((report.member, report.own) for report in counted)
    copies = _holders((report.member, report.copies) for report in counted)
    # Of two cuts of one step the one with fewer shards: it has more holders of each.
    cuts = sorted({(shard.step, -shard.num_shards) for shard in (*owners, *copies)}, reverse=True)
    for step, minus in cuts:
        if checkpoint is not None and step < checkpoint:
            break
        shards = [Shard(step=step, index=index, num_shards=-minus) for index in range(-minus)]
        holders = tuple(owners.get(shard) or copies.get(shard) or () for shard in shards)
        if all(holders):
            return Resumption(step=step, num_shards=-minus, holders=holders, history=history)
    return None


def _holders(reports: Iterable[tuple[str, Iterable[Shard]]]) -> dict[Shard, tuple[str, ...]]:
    found: dict[Shard, tuple[str, ...]] = defaultdict(tuple)
    for member, shards in reports:
        for shard in dict.fromkeys(shards):
            found[shard] += (member,)
    return dict(found)


def may_write(version: int, *, finished: int) -> bool:
    """Whether a rank may write the snapshot of a version, over the one of two versions before.

    Args:
        version: the step after whose update it is.
        finished: the newest version of which every rank is known to have written all its snapshots, at home and at its peer.
    """
    return finished >= version - 1
