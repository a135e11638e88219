"""One save as one rank goes through it: begin, vote, settle who writes what, write, vote, commit, vote.

Every exit is the same on every rank. A rank that fails before a vote does not raise, it votes no, because the others are
waiting for its ballot. What makes a draft a checkpoint is the place's affair (``places/``); where all ranks see one folder, rank
0 makes the draft, writes the manifest and renames. When the ranks lose touch after that, the disk decides: the checkpoint with
this save's id either has its name or has not.

Who writes which piece is agreed by all ranks and kept for as long as no rank's holdings change (``Agreement``). What the others
hold is only known by asking them, and asking must not delay the training loop: it happens in the thread that writes, between
its votes. So the first save copies everything that this rank holds, and every later one only what this rank was given to write.
Each save compares the sums of all listings, so that every rank sees a change on any of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from shoal.checkpoint.commit import Draft
from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.holdings import Cut, Listing, decode_listing, divide, encode_listing
from shoal.checkpoint.manifest import Part, decode_part, encode_part
from shoal.checkpoint.pieces import blobs_of
from shoal.checkpoint.places.storage import OneFolder, Proposal, Storage, explain
from shoal.checkpoint.shard import Blob
from shoal.checkpoint.vote import LostTouch, Phase, SaveFailed, Votes
from shoal.core.clock import Deadline


def sum_of(listing: Listing | None) -> bytes:
    """The sum by which a change of a listing is seen; empty when a rank saves whole tensors only and lists nothing."""
    return b"" if listing is None else xxhash.xxh3_64_hexdigest(encode_listing(listing)).encode()


class Agreement:
    """The division of one group of ranks. Written by the thread that saves, read by the loop while that thread rests."""

    def __init__(self) -> None:
        self._sums: tuple[bytes, ...] = ()
        self._mine: tuple[Cut, ...] = ()
        self._rank = 0

    def expect(self, listing: Listing) -> tuple[Cut, ...] | None:
        """What this rank will have to write if nothing has changed; None when that is not known."""
        is_known = bool(self._sums) and self._sums[self._rank] == sum_of(listing)
        return self._mine if is_known else None

    def settle(
        self, listing: Listing, sums: Sequence[bytes], *, step: int, vote: Votes, deadline: Deadline
    ) -> tuple[Cut, ...]:
        """What this rank writes in this save. All ranks call it together; it asks only when some rank's sum is a new one.

        Args:
            listing: what this rank holds.
            sums: of the listings of all ranks, by rank.
            step: the step that is being saved.
            vote: how to ask.
            deadline: when to stop waiting for the others.

        Raises:
            SaveFailed: together the ranks do not hold every tensor, or one could not say what it holds; on all ranks alike.
            LostTouch: a rank did not come.
        """
        if tuple(sums) == self._sums:
            return self._mine
        self._sums = ()
        texts = vote.exchange(step, Phase.LIST, deadline, text=encode_listing(listing))
        try:
            shares = divide([decode_listing(text) for text in texts])
        except NotWhole as error:
            raise SaveFailed(str(error)) from error
        self._sums, self._mine, self._rank = tuple(sums), tuple(shares[vote.rank]), vote.rank
        return self._mine


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one rank wants to have saved."""

    step: int
    plan: str
    values: Mapping[str, Any]
    blobs: Mapping[str, Blob]
    """This rank's own share, as far as it is known before the save: its part of the shared tensors, and its local ones."""
    shared: Mapping[str, tuple[str, tuple[int, ...]]]
    """All shared tensors as ``{name: (dtype, whole shape)}``: together the ranks must write each of them once."""
    deadline: Deadline
    listing: Listing | None = None
    """What this rank holds of the shared tensors, when ranks hold pieces; its share of them is then settled in the save."""
    copies: Mapping[Cut, Tensor] = field(default_factory=dict)
    """The pieces of ``listing`` that this rank has copied and can write."""
    problem: str | None = None
    """Why this rank cannot take part; it still votes."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A committed checkpoint."""

    path: str
    num_bytes: int
    lost_touch: str | None = None
    """Set when the last vote was cut off and the disk said that the commit had happened."""


def attempt(
    request: Request, *, root: Path, vote: Votes, agreement: Agreement, storage: Storage | None = None
) -> Saved:
    """Save once, together with all other ranks.

    Args:
        request: what to save.
        root: this rank's ``checkpoints`` folder.
        vote: of all ranks.
        agreement: who writes which piece, from earlier saves.
        storage: where checkpoints are; left out, in ``root``, which all ranks see.

    Raises:
        SaveFailed: some rank failed, so there is no new checkpoint; what was written is removed.
        LostTouch: a rank died or did not come in time; there is no new checkpoint as far as this rank can see.
    """
    storage = storage or OneFolder(root, rank=vote.rank)
    draft, sums = _begin(request, root, vote, storage)
    try:
        cuts = _settle(request, sums, vote, agreement)
        parts = _write(request, draft, vote, cuts, storage)
        saved = Saved(path=storage.name_of(draft), num_bytes=sum(part.entry.size for part in parts))
        proposal = Proposal(
            parts=tuple(parts),
            id=draft.id,
            step=request.step,
            plan=request.plan,
            values=request.values,
            shared=request.shared,
            deadline=request.deadline,
        )
        try:
            storage.finish(draft, proposal, vote)
        except LostTouch as error:
            if not storage.is_committed(draft):
                raise
            return Saved(path=saved.path, num_bytes=saved.num_bytes, lost_touch=str(error))
        return saved
    except SaveFailed as error:
        storage.abandon(draft, is_lost=isinstance(error, LostTouch))
        raise


def _begin(request: Request, root: Path, vote: Votes, storage: Storage) -> tuple[Draft, list[bytes]]:
    """Rank 0 makes the folder and tells its id; every rank tells the sum of what it holds."""
    draft, problem = None, request.problem
    if vote.rank == 0 and problem is None:
        try:
            draft = storage.begin(request.step)
        except OSError as error:
            problem = f"cannot make a folder in {storage.where}: {explain(error)}"
    text = (draft.id.encode() if draft is not None else b"") + b" " + sum_of(request.listing)
    try:
        texts = vote.exchange(request.step, Phase.BEGIN, request.deadline, problem=problem, text=text)
    except SaveFailed as error:
        if draft is not None:
            storage.abandon(draft, is_lost=isinstance(error, LostTouch))
        raise
    pairs = [other.split(b" ") for other in texts]
    return Draft(root=root, step=request.step, id=pairs[0][0].decode()), [sum for _, sum in pairs]


def _settle(request: Request, sums: list[bytes], vote: Votes, agreement: Agreement) -> tuple[Cut, ...]:
    """The pieces that this rank writes; none when the ranks hold whole tensors, whose shares need no asking."""
    with_pieces = [rank for rank, sum in enumerate(sums) if sum]
    if not with_pieces:
        return ()
    if len(with_pieces) < len(sums) or request.listing is None:
        without = next(rank for rank, sum in enumerate(sums) if not sum)
        raise SaveFailed(
            f"rank {with_pieces[0]} saves with placements and rank {without} without; give them on all ranks"
        )
    return agreement.settle(request.listing, sums, step=request.step, vote=vote, deadline=request.deadline)


def _write(request: Request, draft: Draft, vote: Votes, cuts: tuple[Cut, ...], storage: Storage) -> list[Part]:
    """Write this rank's shard and hear what the others wrote."""
    problem, text = None, b""
    try:
        blobs = {**request.blobs, **blobs_of(cuts, request.copies)}
        storage.join(draft)
        text = encode_part(storage.write(draft, vote.rank, blobs, cuts))
    except FileNotFoundError as error:
        problem = f"cannot write its shard: {explain(error)}; is {draft.root} the same folder for all ranks?"
    except OSError as error:
        problem = f"cannot write its shard: {explain(error)}"
    # torch raises RuntimeError when there is no memory to cut a piece out of a copy.
    except (ValueError, RuntimeError, MemoryError) as error:
        problem = f"cannot cut its pieces: {error}"
    texts = vote.exchange(request.step, Phase.WRITE, request.deadline, problem=problem, text=text)
    try:
        return [decode_part(other) for other in texts]
    except NotWhole as error:
        raise SaveFailed(str(error)) from error
